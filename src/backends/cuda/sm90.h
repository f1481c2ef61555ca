#pragma once

#include "ops/kernel_table.h"

// The candidates named "cuda.sm90". Linear layers on Hopper's matrix units (linear_sm90.cuh): fp8 weights meet activations quantised per
// row and group of 128, bf16 weights bf16 activations. A sampler whose rows are shared by clusters of blocks (sample_sm90.cu).
// Attention, of which prompt rows have a kernel of their own (attention_prompt_sm90.cu). Each op has its file. make_pairs makes "cuda.sm90.pairs": the same, with blocks that take prompt rows in pairs (Linears::load).

namespace quern::cuda::sm90 {

/// Whether the device, and this build, have what these kernels are made of.
ops::Verdict accepts_device(const ops::DeviceTraits& traits);

#define QUERN_SM90(Op)                                                                    \
  ops::Verdict accepts(const ops::Op::Problem& problem, const ops::DeviceTraits& traits); \
  Result<std::unique_ptr<ops::Op::Kernel>> make(const ops::Op::Problem& problem, ops::Device& device); \
  Result<std::unique_ptr<ops::Op::Kernel>> make_pairs(const ops::Op::Problem& problem, ops::Device& device);
QUERN_SM90(AttnIn)
QUERN_SM90(GdnIn)
QUERN_SM90(MlpIn)
QUERN_SM90(MtpIn)
QUERN_SM90(Head)
#undef QUERN_SM90
ops::Verdict accepts(const ops::Sample::Problem& problem, const ops::DeviceTraits& traits);
Result<std::unique_ptr<ops::Sample::Kernel>> make(const ops::Sample::Problem& problem, ops::Device& device);
ops::Verdict accepts(const ops::Attention::Problem& problem, const ops::DeviceTraits& traits);
Result<std::unique_ptr<ops::Attention::Kernel>> make(const ops::Attention::Problem& problem, ops::Device& device);
ops::Verdict accepts(const ops::LinearResidual::Problem& problem, const ops::DeviceTraits& traits);
Result<std::unique_ptr<ops::LinearResidual::Kernel>> make(const ops::LinearResidual::Problem& problem, ops::Device& device);
Result<std::unique_ptr<ops::LinearResidual::Kernel>> make_pairs(const ops::LinearResidual::Problem& problem, ops::Device& device);

}  // namespace quern::cuda::sm90
