#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "base/check.h"
#include "base/shape.h"
#include "ops/linear.h"
#include "weights/source.h"

namespace quern::weights {

inline Range clip(int64_t begin, int64_t end, int64_t extent) {
  const Range range{begin, end < 0 ? extent : end};
  CHECK(0 <= range.begin && range.begin <= range.end && range.end <= extent);
  return range;
}
inline Range column_range(const Slice& slice, const ops::LinearShape& shape) {
  return clip(slice.column_begin, slice.column_end, shape.in_features);
}

/// Rows of a tensor of `extent` rows, piece by piece.
class RowPieces {
 public:
  RowPieces(const Slice& slice, int64_t extent) : pieces_{clip(slice.row_begin, slice.row_end, extent)} {
    for (const Range& piece : slice.further_rows) pieces_.push_back(clip(piece.begin, piece.end, extent));
    for (const Range& piece : pieces_) size_ += piece.size();
  }
  [[nodiscard]] const std::vector<Range>& pieces() const { return pieces_; }
  [[nodiscard]] int64_t size() const { return size_; }
  /// Where row `row` of the joined pieces is stored.
  [[nodiscard]] int64_t stored(int64_t row) const {
    for (const Range& piece : pieces_) {
      if (row < piece.size()) return piece.begin + row;
      row -= piece.size();
    }
    CHECK_UNREACHABLE();
  }
  /// visit(row, piece) for each piece that is not empty; `row` is its first of the joined rows. Stops at the first error.
  template <class Visit>
  [[nodiscard]] Result<void> for_each(const Visit& visit) const {
    int64_t row = 0;
    for (const Range& piece : pieces_) {
      if (piece.size() > 0) RETURN_IF_ERROR(visit(row, piece));
      row += piece.size();
    }
    return {};
  }

 private:
  std::vector<Range> pieces_;
  int64_t size_ = 0;
};

/// `shape` with `rows` entries of its first extent.
inline Shape shape_of_rows(const Shape& shape, int64_t rows) {
  std::vector<int64_t> extents(shape.extents().begin(), shape.extents().end());
  extents[0] = rows;
  return Shape(std::span<const int64_t>(extents));
}

/// The scale blocks that a range touches.
inline Range blocks_of(const Range& range) {
  return {range.begin / ops::kScaleBlock, range.size() == 0 ? range.begin / ops::kScaleBlock : ceil_div(range.end, ops::kScaleBlock)};
}

/// Which stored row of scales serves each block of 128 joined rows, when row 0 of them lies `offset` rows inside its block.
struct ScaleRows {
  int64_t offset = 0;
  std::vector<int64_t> stored;
};
/// None when the pieces' own grids do not meet on one grid of 128: heads of 128 and blocks of 128 always do. `first_row` is where the tensor's row 0 lies in the stored one.
inline std::optional<ScaleRows> scale_rows_of(const RowPieces& rows, int64_t first_row) {
  // A stretch of joined rows with one stored row of scales; where one ends, a block has to end.
  struct Stretch {
    int64_t begin, stored;
  };
  std::vector<Stretch> stretches;
  int64_t begin = 0;
  for (const Range& piece : rows.pieces()) {
    for (int64_t row = first_row + piece.begin, end = first_row + piece.end; row < end;) {
      const int64_t block = row / ops::kScaleBlock, next = std::min(end, (block + 1) * ops::kScaleBlock);
      if (stretches.empty() || stretches.back().stored != block) stretches.push_back({begin, block});
      begin += next - row;
      row = next;
    }
  }
  ScaleRows found;
  if (stretches.empty()) return found;
  const auto in_block = [](int64_t row) { return (row % ops::kScaleBlock + ops::kScaleBlock) % ops::kScaleBlock; };
  found.offset = rows.pieces().size() == 1 ? in_block(first_row + rows.pieces()[0].begin) : stretches.size() == 1 ? 0 : in_block(-stretches[1].begin);
  found.stored.assign(static_cast<size_t>(ops::scale_blocks(found.offset, rows.size())), -1);
  for (size_t i = 0; i < stretches.size(); ++i) {
    const int64_t end = i + 1 < stretches.size() ? stretches[i + 1].begin : rows.size();
    if (i > 0 && (found.offset + stretches[i].begin) % ops::kScaleBlock != 0) return std::nullopt;
    for (int64_t block = (found.offset + stretches[i].begin) / ops::kScaleBlock; block * ops::kScaleBlock < found.offset + end; ++block)
      found.stored[static_cast<size_t>(block)] = stretches[i].stored;
  }
  return found;
}

}  // namespace quern::weights
