#pragma once

#include "ops/kernel.h"

namespace quern::ops {

/// x <- round(x + round(W in)) where one rank holds all of W; with several ranks the rounded partial is written to x instead and `combine` adds it.
struct LinearResidual {
  struct Problem {
    LinearShape linear;
    ActivationLayout in = ActivationLayout::kPlain;
    DType activation = DType::kBF16;
    bool add_residual = true;
  };
  class Kernel : public ops::Kernel {
   public:
    virtual void pack(const LinearSource& weight, Buffer& packed, Stream& stream) const = 0;
    /// in [rows, in_features]; x [rows, out_features] in the activation dtype.
    virtual void enqueue(const Rows& rows, const Activation& in, const Buffer& packed, const TensorView& x, Launch& launch) const = 0;
  };
};

/// o_proj and out_proj.
struct OutResidual : LinearResidual {
  static constexpr std::string_view kName = "out_residual";
};
/// down_proj.
struct DownResidual : LinearResidual {
  static constexpr std::string_view kName = "down_residual";
};

}  // namespace quern::ops
