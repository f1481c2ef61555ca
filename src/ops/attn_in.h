#pragma once

#include <array>
#include <vector>

#include "ops/kernel.h"

namespace quern::ops {

/// RMSNorm1p, query + gate, key and value projections, q/k norm, rotary embedding, KV write (model-spec.md 1.4, 1.5).
struct AttnIn {
  static constexpr std::string_view kName = "attn_in";
  struct Problem {
    int64_t hidden = 0, num_q_heads = 0, num_kv_heads = 0, head_dim = 0;
    LinearShape q, k, v;                  // q: [num_q_heads * 2 * head_dim, hidden], per head query rows then gate rows
    float eps = 1e-6f;
    DType activation = DType::kBF16;
    DType kv = DType::kBF16;              // activation dtype or e4m3
    std::vector<float> inv_freq;          // rotary_dim / 2 frequencies, YaRN already applied
    float rope_scale = 1.0f;              // YaRN's attention factor: multiplies cos and sin
    std::array<int32_t, 3> mrope_section{};
  };
  struct Weights {
    TensorView norm;                      // [hidden], bf16 or f32, zero-centred
    LinearSource q, k, v;
    TensorView q_norm, k_norm;            // [head_dim]
  };
  class Kernel : public ops::Kernel {
   public:
    virtual void pack(const Weights& weights, Buffer& packed, Stream& stream) const = 0;
    /// x [rows, hidden] -> query, gate [rows, num_q_heads, head_dim] in the activation dtype; key and value go to their KV slots (rows.indices).
    virtual void enqueue(const Rows& rows, const TensorView& x, const Buffer& packed, const TensorView& query, const TensorView& gate,
                         const KvCacheView& kv, Launch& launch) const = 0;
  };
};

}  // namespace quern::ops
