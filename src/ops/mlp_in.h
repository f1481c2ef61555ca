#pragma once

#include "ops/kernel.h"

namespace quern::ops {

/// round(silu(gate)) * up of RMSNorm1p(x) (model-spec.md 1.7).
struct MlpIn {
  static constexpr std::string_view kName = "mlp_in";
  struct Problem {
    int64_t hidden = 0, intermediate = 0;
    LinearShape gate, up;
    float eps = 1e-6f;
    DType activation = DType::kBF16;
    ActivationLayout out = ActivationLayout::kPlain;
  };
  struct Weights {
    TensorView norm;  // [hidden], zero-centred
    LinearSource gate, up;
  };
  class Kernel : public ops::Kernel {
   public:
    virtual void pack(const Weights& weights, Buffer& packed, Stream& stream) const = 0;
    /// x [rows, hidden] -> out [rows, intermediate]
    virtual void enqueue(const Rows& rows, const TensorView& x, const Buffer& packed, const Activation& out, Launch& launch) const = 0;
  };
};

}  // namespace quern::ops
