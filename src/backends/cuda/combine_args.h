#pragma once

#include <cstdint>

#include "base/dtype.h"

namespace quern::cuda {

/// x <- round(x + round(sum of partials in rank order))
struct CombineArgs {
  static constexpr int kMaxRanks = 16;
  const void* partials[kMaxRanks];
  int32_t num_ranks;
  DType dtype;
  void* x;
  int64_t num_elements;
};

}  // namespace quern::cuda
