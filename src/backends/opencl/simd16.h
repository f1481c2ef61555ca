#pragma once

#include <memory>

#include "backends/opencl/stream.h"
#include "ops/kernel_table.h"

// The candidates named "opencl.simd16": attention and GDN on sub-groups of 16 with vector arithmetic in f32, for the head sizes of the model, and small ops that are bound by
// memory, whose text is plain's, built for larger groups. Made for Xe2.

namespace quern::opencl::simd16 {

#define QUERN_SIMD16(Op)                                                                  \
  ops::Verdict accepts(const ops::Op::Problem& problem, const ops::DeviceTraits& traits); \
  Result<std::unique_ptr<ops::Op::Kernel>> make(const ops::Op::Problem& problem, ops::Device& device);
QUERN_SIMD16(Attention)
QUERN_SIMD16(GdnMix)
QUERN_SIMD16(Embed)
QUERN_SIMD16(Sample)
QUERN_SIMD16(DraftRows)
QUERN_SIMD16(StateCopy)
QUERN_SIMD16(Combine)
#undef QUERN_SIMD16

inline std::string_view arithmetic_id(DType activation) { return activation == DType::kF32 ? "opencl.simd16.f32" : "opencl.simd16.bf16"; }
inline ops::Verdict accepts_device(const ops::DeviceTraits& traits) {
  return traits.architecture == 2021 || traits.architecture == 2031 ? ops::accept() : ops::refuse("made for Arc Pro B60 and B70 (Xe2)");
}
/// What the kernels are built with, beside an op's own definitions: 256 registers, since a state or eight heads' values live in them.
inline std::string definitions(const Device& device, std::string_view of_op) {
  return fmt::format("-cl-std=CL3.0 {}{}", of_op, device.emulates_xe2() ? device.emulation() : " -cl-intel-256-GRF-per-thread");
}
/// What the small ops' kernels are built with (PORTABLE in numeric.clh), and the items of their groups.
inline std::string portable_definitions(const Device& device, DType activation) {
  return fmt::format("-cl-std=CL3.0 {} -DSIMD16{}", activation == DType::kF32 ? "-DACTIVATION_F32" : "-DACTIVATION_BF16", device.emulation());
}
inline constexpr size_t kPortableItems = 256;

}  // namespace quern::opencl::simd16
