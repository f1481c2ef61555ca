#pragma once

#include <span>
#include <vector>

#include "ops/gdn_in.h"
#include "ops/kernel.h"

namespace quern::ops {

/// How a kernel keeps a head's S, [d_v, d_k], in GdnStateView::state.
enum class GdnStateLayout {
  kF32,
  /// In halves of 16 bits: first the upper ones of all elements, which are S rounded to bf16, then the lower ones. The bits of the f32 are 2^16 upper + lower, where lower is signed.
  kHalves,
};
/// Whole heads of `head_size` elements, in place, between f32 and how a kernel keeps them. Loses nothing; a NaN stays one.
void to_layout(GdnStateLayout layout, std::span<float> state, int64_t head_size);
void from_layout(GdnStateLayout layout, std::span<float> state, int64_t head_size);

/// Causal conv, gates, one row after the other of the gated delta rule against the state of the last boundary, gated norm
/// (model-spec.md 1.6, architecture.md section 4). Per value head:
///   u = beta (v - e^G S^T k - sum_j e^(G - Gj) (kj . k) uj)       o = e^G S^T q + sum_{j <= i} e^(G - Gj) (kj . q) uj
/// and at a boundary  S <- e^(G64) S + sum_j e^(G64 - Gj) kj uj^T.
/// For every run, with c = cursor[slot]:
///   before its rows, a fold that is due (boundary + 64 <= c) is stored, with the three conv columns before the new boundary;
///   a row past the next boundary is computed against the folded S; the fold is stored within the step iff the run is `committed`;
///   a committed run that ends on a boundary stores that fold as well.
/// So the stored state stands at 64 * floor(c / 64) after the step, or 64 * floor((c + num_rows) / 64) for committed runs;
/// `sample` sets rows.slots.boundary to it when the last layer is done. k and u are rounded to the ring's dtype before any later use.
/// Source: Yang, Kautz, Hatamizadeh, "Gated Delta Networks", 2024.
struct GdnMix {
  static constexpr std::string_view kName = "gdn_mix";
  struct Problem {
    int64_t num_k_heads = 0, num_v_heads = 0, d_k = 0, d_v = 0;
    std::vector<int32_t> k_head;  // local k head of each local v head
    int64_t k_max = 0;            // drafts a verify may hold: ring and window lengths
    float eps = 1e-6f;
    DType activation = DType::kBF16;
    DType ring = DType::kF32;
    ActivationLayout out = ActivationLayout::kPlain;
  };
  struct Weights {
    TensorView conv1d;          // [channels, 4], bf16 or f32; tap 3 multiplies the current token
    TensorView a_log, dt_bias;  // [num_v_heads]
    TensorView norm;            // [d_v], plain weight
  };
  class Kernel : public ops::Kernel {
   public:
    [[nodiscard]] virtual GdnStateLayout state_layout() const { return GdnStateLayout::kF32; }
    virtual void pack(const Weights& weights, Buffer& packed, Stream& stream) const = 0;
    /// in -> out [rows, num_v_heads * d_v]
    virtual void enqueue(const Rows& rows, const GdnInputs& in, const Buffer& packed, const GdnStateView& state, const Activation& out,
                         Launch& launch) const = 0;
  };
};

}  // namespace quern::ops
