#pragma once

#include <memory>

#include "backends/opencl/packed_linear.h"
#include "backends/opencl/stream.h"
#include "ops/kernel_table.h"

// The candidates named "opencl.plain": right for every legal problem on every OpenCL 3.0 device, and simple. Each op has its file. Prompt and decode rows share one
// arithmetic: every sum has an order fixed by the shape of the weight or by the token grid, never by the number of rows.

namespace quern::opencl::plain {

#define QUERN_PLAIN(Op)                                                                   \
  ops::Verdict accepts(const ops::Op::Problem& problem, const ops::DeviceTraits& traits); \
  Result<std::unique_ptr<ops::Op::Kernel>> make(const ops::Op::Problem& problem, ops::Device& device);
QUERN_PLAIN(Embed)
QUERN_PLAIN(AttnIn)
QUERN_PLAIN(Attention)
QUERN_PLAIN(GdnIn)
QUERN_PLAIN(GdnMix)
QUERN_PLAIN(LinearResidual)
QUERN_PLAIN(MlpIn)
QUERN_PLAIN(MtpIn)
QUERN_PLAIN(Head)
QUERN_PLAIN(Sample)
QUERN_PLAIN(DraftRows)
QUERN_PLAIN(StateCopy)
QUERN_PLAIN(Combine)
#undef QUERN_PLAIN

// What they share.

inline std::string_view arithmetic_id(DType activation) { return activation == DType::kF32 ? "opencl.plain.f32" : "opencl.plain.bf16"; }
inline std::string_view activation_definition(DType activation) { return activation == DType::kF32 ? "-DACTIVATION_F32" : "-DACTIVATION_BF16"; }
/// Definitions of attention.cl.
inline std::string kv_definitions(DType activation, DType kv) { return fmt::format("{}{}", activation_definition(activation), kv == DType::kE4M3 ? " -DKV_E4M3" : ""); }

inline ops::Verdict has_device_code(const ops::DeviceTraits& traits) {
  return traits.device_code ? ops::accept() : ops::refuse("{}", traits.why_no_device_code);
}
inline ops::Verdict accepts_activation(const ops::DeviceTraits& traits, DType activation, ops::ActivationLayout layout = ops::ActivationLayout::kPlain) {
  if (activation != DType::kF32 && activation != DType::kBF16)
    return ops::refuse("activation dtype {} is not supported; f32 and bf16 are", dtype_name(activation));
  if (layout != ops::ActivationLayout::kPlain) return ops::refuse("plain kernels take activations in plain layout");
  return has_device_code(traits);
}
/// KV and heads as attention.cl takes them.
ops::Verdict accepts_kv(const ops::DeviceTraits& traits, DType activation, DType kv, int64_t head_dim, ops::ActivationLayout layout = ops::ActivationLayout::kPlain);

/// Place of row `row` of a view of `columns` elements a row.
inline Place row_place(const ops::TensorView& view, int64_t row, int64_t columns) {
  Place place = place_of(view);
  place.offset_bytes += static_cast<size_t>(row * columns) * dtype_size(view.dtype);
  return place;
}
/// The row length of a table by slot; 0 where there is none.
inline int32_t row_stride(const ops::TensorView& table) { return table.shape.rank() == 2 ? static_cast<int32_t>(table.shape[1]) : 0; }

/// Groups of `size` that cover `n`.
inline size_t groups_for(int64_t n, size_t size) { return (static_cast<size_t>(n) + size - 1) / size; }

inline constexpr size_t kItems = 64;  // ITEMS of the plain kernels but sample.cl

}  // namespace quern::opencl::plain
