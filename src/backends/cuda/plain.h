#pragma once

#include <algorithm>
#include <memory>

#include "backends/cuda/attention_args.h"
#include "backends/cuda/packed_linear.h"
#include "backends/cuda/step_tables.h"
#include "backends/cuda/stream.h"
#include "ops/kernel_table.h"

// The candidates named "cuda.plain": right for every legal problem on every GPU, and simple. Each op has its file. Prompt and decode rows share one arithmetic:
// every sum has an order fixed by the shape of the weight or by the token grid, never by the number of rows. Kernels read the tables of the step on the device, so
// that launches can be replayed with new tables.

namespace quern::cuda::plain {

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

inline std::string_view arithmetic_id(DType activation) { return LinearLauncher::arithmetic(activation); }

inline ops::Verdict has_device_code(const ops::DeviceTraits& traits) {
  return traits.device_code ? ops::accept() : ops::refuse("{}", traits.why_no_device_code);
}
inline ops::Verdict accepts_activation(const ops::DeviceTraits& traits, DType activation, ops::ActivationLayout layout = ops::ActivationLayout::kPlain) {
  if (activation != DType::kF32 && activation != DType::kBF16)
    return ops::refuse("activation dtype {} is not supported; f32 and bf16 are", dtype_name(activation));
  if (layout != ops::ActivationLayout::kPlain) return ops::refuse("plain kernels take activations in plain layout");
  return has_device_code(traits);
}

/// Address of a view's first element; null where there is none.
template <class T>
T* address_or_null(const ops::TensorView& view) {
  return view.empty() ? nullptr : view.data<T>();
}
/// Address of row `row` of a view of `columns` elements a row.
inline std::byte* row_address(const ops::TensorView& view, int64_t row, int64_t columns) {
  return view.data<std::byte>() + static_cast<size_t>(row * columns) * dtype_size(view.dtype);
}
/// The tables of a step, and a layer's KV, as kernels take them.
StepTables step_tables(const ops::Rows& rows);
KvCache kv_cache(const ops::KvCacheView& kv);

/// Up to `most` bytes of what the next op reads.
inline Prefetch prefetch_of(const ops::Launch& launch, int64_t most) {
  if (launch.next_weights == nullptr) return {};
  return {launch.next_weights->address(), std::min(static_cast<int64_t>(launch.next_weights->size_bytes()), most) / 16 * 16};
}

/// Blocks of `size` that cover `n`.
inline unsigned blocks_for(int64_t n, int64_t size) { return static_cast<unsigned>((n + size - 1) / size); }

}  // namespace quern::cuda::plain
