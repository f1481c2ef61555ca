#pragma once

#include <memory>

#include "backends/cpu/device.h"
#include "backends/cpu/packed_linear.h"
#include "ops/kernel_table.h"

// The candidates named "cpu.plain": portable code, right for every legal problem. Each op has its file. Prompt and decode rows share one
// arithmetic: the bits of a row depend on its sequence only, not on other rows, on cuts, or on the number of threads.

namespace quern::cpu::plain {

#define QUERN_PLAIN(Op)                                                            \
  ops::Verdict accepts(const ops::Op::Problem& problem, const ops::DeviceTraits&); \
  Result<std::unique_ptr<ops::Op::Kernel>> make(const ops::Op::Problem& problem, ops::Device& device);
QUERN_PLAIN(Sample)
QUERN_PLAIN(DraftRows)
QUERN_PLAIN(StateCopy)
QUERN_PLAIN(Combine)
#undef QUERN_PLAIN

// The same kernel runs on any path: its loops are those of vector_math.h, and those that multiply with weights pack them for it (packed_linear.h).
// On kPlain it is cpu.plain.
#define QUERN_VECTOR(Op)                                                            \
  ops::Verdict accepts(const ops::Op::Problem& problem, const ops::DeviceTraits&); \
  Result<std::unique_ptr<ops::Op::Kernel>> make(const ops::Op::Problem& problem, ops::Device& device, LinearPath path);
QUERN_VECTOR(Attention)
QUERN_VECTOR(GdnMix)
QUERN_VECTOR(Embed)
QUERN_VECTOR(AttnIn)
QUERN_VECTOR(GdnIn)
QUERN_VECTOR(MlpIn)
QUERN_VECTOR(LinearResidual)
QUERN_VECTOR(MtpIn)
QUERN_VECTOR(Head)
#undef QUERN_VECTOR

// What they share.

inline ThreadPool& pool_of(ops::Device& device) {
  CHECK(device.traits().platform == ops::Platform::kCpu);
  return static_cast<Device&>(device).pool();
}
inline std::string_view arithmetic_id(DType activation, LinearPath path = LinearPath::kPlain) {
  if (path == LinearPath::kPlain) return activation == DType::kF32 ? "cpu.plain.f32" : "cpu.plain.bf16";
  if (path == LinearPath::kAvx512Bf16) return "cpu.dot.bf16";
  if (path == LinearPath::kAmx) return "cpu.amx.bf16";
  if (path == LinearPath::kAmxPrompt) return "cpu.amx.bf16, cpu.dot.bf16";  // prompt and decode rows
  return activation == DType::kF32 ? "cpu.fma.f32" : "cpu.fma.bf16";
}
inline ops::Verdict accepts_activation(DType activation, ops::ActivationLayout layout = ops::ActivationLayout::kPlain) {
  if (activation != DType::kF32 && activation != DType::kBF16)
    return ops::refuse("activation dtype {} is not supported; f32 and bf16 are", dtype_name(activation));
  if (layout != ops::ActivationLayout::kPlain) return ops::refuse("activations travel in plain layout on the CPU");
  return ops::accept();
}

}  // namespace quern::cpu::plain
