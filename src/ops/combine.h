#pragma once

#include "ops/kernel.h"

namespace quern::ops {

/// Adds the ranks' partial outputs to the residual: m = round(sum in f32, in rank order), x = round(x + m).
struct Combine {
  static constexpr std::string_view kName = "combine";
  struct Problem {
    int64_t hidden = 0;
    int32_t num_ranks = 1;
    DType activation = DType::kBF16;
  };
  class Kernel : public ops::Kernel {
   public:
    /// partials: one [rows, hidden] per rank, in rank order; x [rows, hidden].
    virtual void enqueue(std::span<const TensorView> partials, const TensorView& x, Launch& launch) const = 0;
  };
};

}  // namespace quern::ops
