#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "ops/tensor.h"

namespace quern::ops {

/// How the weight of one linear layer is stored (model-spec.md sections 2 and 3). The scheme belongs to each tensor, not to the checkpoint.
enum class WeightScheme : uint8_t {
  kF32,
  kBF16,
  kF16,
  kFp8Block,    // e4m3 with one scale per 128 x 128 block, ragged at the edges
  kFp8Channel,  // e4m3 with one scale per output row
  kFp8Tensor,   // e4m3 with one scale for all
};
std::string_view weight_scheme_name(WeightScheme scheme);  // "bf16", "block fp8", "channel fp8", "static fp8", ...
constexpr bool is_fp8(WeightScheme s) {
  return s == WeightScheme::kFp8Block || s == WeightScheme::kFp8Channel || s == WeightScheme::kFp8Tensor;
}
constexpr DType stored_dtype(WeightScheme s) {
  if (is_fp8(s)) return DType::kE4M3;
  return s == WeightScheme::kF32 ? DType::kF32 : s == WeightScheme::kF16 ? DType::kF16 : DType::kBF16;
}

/// Edge of a scale block in both directions.
inline constexpr int64_t kScaleBlock = 128;

/// Extent and scheme of a linear layer's weight, known before a byte of it is read.
struct LinearShape {
  int64_t out_features = 0, in_features = 0;
  WeightScheme scheme = WeightScheme::kBF16;
  bool static_input_scale = false;  // the checkpoint carries a static activation scale
  friend bool operator==(const LinearShape&, const LinearShape&) = default;

  /// Bytes of weight and scales (f32) as kept in device memory.
  [[nodiscard]] size_t packed_bytes() const;
};

/// Scale blocks that `extent` rows or columns touch, the first of which lies `offset` < 128 inside a block.
constexpr int64_t scale_blocks(int64_t offset, int64_t extent) { return (offset + extent + kScaleBlock - 1) / kScaleBlock; }
/// Most scales that a weight of this shape can have, wherever it begins in the scale grid; 0 without FP8.
int64_t max_scales(const LinearShape& shape);

/// One linear weight (or this rank's slice of it) as stored, in device memory, ready to be packed.
///   weight  [out_features, in_features] of stored_dtype(scheme)
///   scale   f32: [ceil((row_offset + out) / 128) - row_offset / 128, the same for columns] for block, [out] for channel, [1] for tensor, empty otherwise.
///           The loader widens BF16 scales.
struct LinearSource {
  LinearShape shape;
  TensorView weight;
  TensorView scale;
  int64_t row_offset = 0, column_offset = 0;  // of this slice inside its first scale block: weight row r has scale row (row_offset + r) / 128
  std::optional<float> input_scale;           // static activation scale
};
/// That `source` is what a kernel made for `shape` expects: extents, dtypes and number of scales. A weight or scales that are not there are left to the kernel.
void check_source(const LinearSource& source, const LinearShape& shape);

}  // namespace quern::ops
