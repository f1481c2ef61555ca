#pragma once

#include "ops/kernel_table.h"

// The candidates named "cuda.sm90": linear layers on Hopper's matrix units (linear_sm90.cuh). fp8 weights meet activations quantised per row and group of 128,
// bf16 weights bf16 activations. Each op has its file.

namespace quern::cuda::sm90 {

#define QUERN_SM90(Op)                                                                    \
  ops::Verdict accepts(const ops::Op::Problem& problem, const ops::DeviceTraits& traits); \
  Result<std::unique_ptr<ops::Op::Kernel>> make(const ops::Op::Problem& problem, ops::Device& device);
QUERN_SM90(AttnIn)
QUERN_SM90(GdnIn)
QUERN_SM90(MlpIn)
QUERN_SM90(MtpIn)
QUERN_SM90(Head)
#undef QUERN_SM90
ops::Verdict accepts(const ops::LinearResidual::Problem& problem, const ops::DeviceTraits& traits);
Result<std::unique_ptr<ops::LinearResidual::Kernel>> make(const ops::LinearResidual::Problem& problem, ops::Device& device);

}  // namespace quern::cuda::sm90
