#pragma once

#include "ops/kernel.h"

namespace quern::ops {

/// Input of the MTP layer: fc [ RMSNorm1p(embedding) ; RMSNorm1p(hidden) ] (model-spec.md 1.8; embedding first).
struct MtpIn {
  static constexpr std::string_view kName = "mtp_in";
  struct Problem {
    int64_t hidden = 0;
    LinearShape fc;  // [hidden, 2 * hidden]
    float eps = 1e-6f;
    DType activation = DType::kBF16;
  };
  struct Weights {
    TensorView norm_embedding, norm_hidden;  // [hidden], zero-centred
    LinearSource fc;
  };
  class Kernel : public ops::Kernel {
   public:
    virtual void pack(const Weights& weights, Buffer& packed, Stream& stream) const = 0;
    /// embedding, hidden, x [rows, hidden]
    virtual void enqueue(const Rows& rows, const TensorView& embedding, const TensorView& hidden, const Buffer& packed, const TensorView& x,
                         Launch& launch) const = 0;
  };
};

}  // namespace quern::ops
