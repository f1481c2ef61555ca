#pragma once

#include "ops/kernel.h"

namespace quern::ops {

/// What the GDN projections hand to gdn_mix, all in the activation dtype.
struct GdnInputs {
  TensorView qkv;  // [rows, 2 * num_k_heads * d_k + num_v_heads * d_v], before the conv
  TensorView z;    // [rows, num_v_heads * d_v]
  TensorView b;    // [rows, num_v_heads]
  TensorView a;    // [rows, num_v_heads]
};

/// RMSNorm1p and the projections of a Gated DeltaNet layer (model-spec.md 1.6).
struct GdnIn {
  static constexpr std::string_view kName = "gdn_in";
  struct Problem {
    int64_t hidden = 0;
    LinearShape qkv, z, b, a;
    float eps = 1e-6f;
    DType activation = DType::kBF16;
  };
  struct Weights {
    TensorView norm;  // [hidden], zero-centred
    LinearSource qkv, z, b, a;
  };
  class Kernel : public ops::Kernel {
   public:
    virtual void pack(const Weights& weights, Buffer& packed, Stream& stream) const = 0;
    virtual void enqueue(const Rows& rows, const TensorView& x, const Buffer& packed, const GdnInputs& out, Launch& launch) const = 0;
  };
};

}  // namespace quern::ops
