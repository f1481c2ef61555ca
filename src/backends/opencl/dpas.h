#pragma once

#include <memory>

#include "backends/opencl/tiled_linear.h"
#include "ops/kernel_table.h"

// The candidates named "opencl.dpas": linear layers on the matrix units of Xe2 (dpas.cl), W8A16 or W16A16 with f32 sums, and attention and GDN of prompts
// (attention_dpas.cl, gdn_prompt.cl). Each op has its file, beside plain.

namespace quern::opencl::dpas {

#define QUERN_DPAS(Op)                                                                    \
  ops::Verdict accepts(const ops::Op::Problem& problem, const ops::DeviceTraits& traits); \
  Result<std::unique_ptr<ops::Op::Kernel>> make(const ops::Op::Problem& problem, ops::Device& device);
QUERN_DPAS(AttnIn)
QUERN_DPAS(Attention)
QUERN_DPAS(GdnIn)
QUERN_DPAS(GdnMix)
QUERN_DPAS(LinearResidual)
QUERN_DPAS(MlpIn)
QUERN_DPAS(MtpIn)
QUERN_DPAS(Head)
#undef QUERN_DPAS

/// Whether all these weights can be multiplied.
ops::Verdict accepts_linears(const ops::DeviceTraits& traits, DType activation, std::initializer_list<ops::LinearShape> weights);

}  // namespace quern::opencl::dpas
