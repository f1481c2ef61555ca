#pragma once

#include <cstdint>

#include "base/check.h"
#include "base/shape.h"
#include "ops/linear.h"
#include "weights/source.h"

namespace quern::weights {

/// [begin, end)
struct Range {
  int64_t begin = 0, end = 0;
  [[nodiscard]] int64_t size() const { return end - begin; }
};

inline Range clip(int64_t begin, int64_t end, int64_t extent) {
  const Range range{begin, end < 0 ? extent : end};
  CHECK(0 <= range.begin && range.begin <= range.end && range.end <= extent);
  return range;
}
inline Range row_range(const Slice& slice, const ops::LinearShape& shape) {
  return clip(slice.row_begin, slice.row_end, shape.out_features);
}
inline Range column_range(const Slice& slice, const ops::LinearShape& shape) {
  return clip(slice.column_begin, slice.column_end, shape.in_features);
}

/// The scale blocks that a range touches.
inline Range blocks_of(const Range& range) {
  return {range.begin / ops::kScaleBlock, range.size() == 0 ? range.begin / ops::kScaleBlock : ceil_div(range.end, ops::kScaleBlock)};
}

}  // namespace quern::weights
