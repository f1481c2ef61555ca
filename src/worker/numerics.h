#pragma once

#include <cstdint>

#include "base/dtype.h"

namespace quern::worker {

/// What all problems of one plan share.
struct Numerics {
  DType activation = DType::kBF16, kv = DType::kBF16, ring = DType::kBF16;
  int32_t k_max = 0;
  bool draft_head = false;  // an FP8 copy of lm_head
};

}  // namespace quern::worker
