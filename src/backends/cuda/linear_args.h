#pragma once

#include <cstdint>

#include "base/dtype.h"

namespace quern::cuda {

/// Where a weight's slice begins inside its first scale block; known when it is packed, so it is kept beside the weight on the device.
struct GridOffsets {
  int64_t row = 0, column = 0;
};

/// One packed linear weight as device code reads it.
struct Weight {
  int64_t out_features, in_features;
  DType dtype;                 // of the stored elements
  enum class Scales : uint8_t { kNone, kBlock, kChannel, kTensor } scales;
  const void* data;            // [out_features, in_features]
  const float* scale;          // f32, as in ops::LinearSource
  const GridOffsets* offsets;  // kBlock
};

/// What becomes of y = W x, where r(.) rounds to the activation dtype.
enum class Epilogue : uint8_t {
  kStore,        // out = r(y)
  kStoreF32,     // out = y, f32
  kAddResidual,  // out = r(out + r(y))
  kSilu,         // out = r(silu(r(y)))
  kMultiply,     // out = r(out * r(y))
};

struct LinearArgs {
  Weight weight;
  DType activation;
  Epilogue epilogue;
  int32_t num_rows;
  const void* x;            // [., in_features] in the activation dtype
  const int32_t* x_rows;    // [num_rows]: the row of x of each row, -1: zeros; null: the row itself
  void* out;                // [num_rows, out_features]
};

/// out = r(x * rsqrt(mean(x^2) + eps) * (weight + weight_offset)), row by row.
struct NormArgs {
  DType activation;
  int32_t width;
  float eps, weight_offset;
  const void* x;        // [num_rows, width]
  const float* weight;  // [width]
  void* out;            // row i begins at element i * out_stride
  int64_t out_stride;
};

/// out[i] = source[i] + addend, widened to f32.
struct WidenArgs {
  const void* source;
  DType dtype;
  DType round_to;  // bf16: rounded first, as the model's dtype would hold it; f32: kept
  float addend;
  float* out;
  int64_t num_elements;
};

}  // namespace quern::cuda
