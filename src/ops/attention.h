#pragma once

#include <vector>

#include "ops/kernel.h"

namespace quern::ops {

/// Causal softmax attention over the paged KV cache with the sigmoid output gate (model-spec.md 1.4, steps 5 and 6).
/// Keys are split every 512 indices from the sequence's start; parts are merged in order. Masked rows are not read.
struct Attention {
  static constexpr std::string_view kName = "attention";
  struct Problem {
    int64_t num_q_heads = 0, num_kv_heads = 0, head_dim = 0;
    std::vector<int32_t> kv_head;         // local kv head of each local q head
    DType activation = DType::kBF16;
    DType kv = DType::kBF16;
    ActivationLayout out = ActivationLayout::kPlain;
  };
  class Kernel : public ops::Kernel {
   public:
    /// query, gate [rows, num_q_heads, head_dim] -> out [rows, num_q_heads * head_dim]. A row at index i attends to 0 .. i
    /// (`first_index` .. i for the MTP layer, whose slot 0 is empty).
    virtual void enqueue(const Rows& rows, const TensorView& query, const TensorView& gate, const KvCacheView& kv, int32_t first_index,
                         const Activation& out, Launch& launch) const = 0;
  };
};

}  // namespace quern::ops
