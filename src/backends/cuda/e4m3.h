#pragma once

#include "backends/cuda/plain.h"

// The candidate "cuda.mma.e4m3": linear layers whose FP8 weights meet activations quantised per row and group of 128 on matrix units that multiply e4m3 by e4m3 (sm_89, sm_120 and newer). One
// arithmetic for prompt and decode rows. Weights that are not FP8 meet bf16 activations there, as in cuda.mma. "cuda.mma.e4m3.emulated" is the same where the compiler makes 16-bit products of the
// instruction (sm_90, sm_100): for tests, by request.

namespace quern::cuda::e4m3 {

/// Whether matrix units of the device multiply e4m3 by e4m3 where a warp asks for it.
ops::Verdict multiplies(const ops::DeviceTraits& traits);

#define QUERN_E4M3(Op)                                                                    \
  ops::Verdict accepts(const ops::Op::Problem& problem, const ops::DeviceTraits& traits); \
  Result<std::unique_ptr<ops::Op::Kernel>> make(const ops::Op::Problem& problem, ops::Device& device);
QUERN_E4M3(AttnIn)
QUERN_E4M3(GdnIn)
QUERN_E4M3(MlpIn)
QUERN_E4M3(MtpIn)
QUERN_E4M3(Head)
QUERN_E4M3(LinearResidual)
#undef QUERN_E4M3

}  // namespace quern::cuda::e4m3
