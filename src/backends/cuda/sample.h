#pragma once

#include "backends/cuda/plain.h"
#include "backends/cuda/sample_args.h"

namespace quern::cuda {

/// What the sampler's kernels are told; `drawn` is the caller's.
SampleArgs sample_args(const ops::Sample::Problem& problem, const ops::TensorView& runs, const ops::TensorView& logits,
                       const ops::TensorView& masks, const ops::SamplerTables& sampler, const ops::SlotTables& slots,
                       const ops::SampleOutput& out);

}  // namespace quern::cuda
