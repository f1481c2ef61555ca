#pragma once

#include "ops/kernel_table.h"

// The candidates named "cuda.sm90". Linear layers on Hopper's matrix units (linear_sm90.cuh): fp8 weights meet activations quantised per
// row and group of 128, bf16 weights bf16 activations. A sampler whose rows are shared by clusters of blocks (sample_sm90.cu).
// Attention, of which prompt rows have a kernel of their own (attention_prompt_sm90.cu). Each op has its file.

namespace quern::cuda::sm90 {

/// Whether the device, and this build, have what these kernels are made of.
ops::Verdict accepts_device(const ops::DeviceTraits& traits);

/// How blocks take prompt rows in linear layers; the bits are the same. In pairs: clusters of two take different rows and share weights. Tall: 256 rows a block instead
/// of 128, e4m3 only.
enum class PromptShape { kFastest, kSingle, kPair, kTallPair };

#define QUERN_SM90(Op)                                                                    \
  ops::Verdict accepts(const ops::Op::Problem& problem, const ops::DeviceTraits& traits); \
  Result<std::unique_ptr<ops::Op::Kernel>> make(const ops::Op::Problem& problem, ops::Device& device, PromptShape shape);
QUERN_SM90(AttnIn)
QUERN_SM90(GdnIn)
QUERN_SM90(MlpIn)
QUERN_SM90(MtpIn)
QUERN_SM90(Head)
QUERN_SM90(LinearResidual)
#undef QUERN_SM90
ops::Verdict accepts(const ops::Sample::Problem& problem, const ops::DeviceTraits& traits);
Result<std::unique_ptr<ops::Sample::Kernel>> make(const ops::Sample::Problem& problem, ops::Device& device);
ops::Verdict accepts(const ops::Attention::Problem& problem, const ops::DeviceTraits& traits);
Result<std::unique_ptr<ops::Attention::Kernel>> make(const ops::Attention::Problem& problem, ops::Device& device);

}  // namespace quern::cuda::sm90
