#pragma once

#include "ops/kernel_table.h"

// The sampler "cuda.rows": a block for each row of logits (sample_rows.cu), on every GPU. Tokens are those of the other samplers.

namespace quern::cuda::rows {

ops::Verdict accepts(const ops::Sample::Problem& problem, const ops::DeviceTraits& traits);
Result<std::unique_ptr<ops::Sample::Kernel>> make(const ops::Sample::Problem& problem, ops::Device& device);

}  // namespace quern::cuda::rows
