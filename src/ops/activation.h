#pragma once

#include "ops/tensor.h"

namespace quern::ops {

/// In which form rows travel from one op to the next; the platform's table chooses.
enum class ActivationLayout : uint8_t {
  kPlain,     // data: the activation dtype (bf16 or f32)
  kE4M3,      // data: e4m3, scale: f32 per row and group of 128
  kHalf,      // data: f16, scale: one power of two per row, so that half never overflows
};

struct Activation {
  ActivationLayout layout = ActivationLayout::kPlain;
  TensorView data;   // [rows, features]
  TensorView scale;  // empty for kPlain
};

}  // namespace quern::ops
