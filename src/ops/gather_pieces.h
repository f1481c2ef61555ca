#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "base/check.h"
#include "base/shape.h"
#include "ops/collective.h"

namespace quern::ops {

/// Checks the tensors of an all_gather of this rank, and returns the number of rows.
inline int64_t check_gather(const Collective& end, const TensorView& mine, const TensorView& all, std::span<const int64_t> widths) {
  CHECK(std::ssize(widths) == end.size() && all.shape.rank() == 2 && mine.shape.rank() == 2 && mine.dtype == all.dtype);
  int64_t total = 0;
  for (const int64_t width : widths) total += width;
  CHECK(all.shape[0] == mine.shape[0] && all.shape[1] == total && mine.shape[1] == widths[static_cast<size_t>(end.rank())]);
  return all.shape[0];
}
/// The bytes of every rank's row. `row_bytes` keeps its memory from call to call.
inline void fill_row_bytes(std::span<const int64_t> widths, DType dtype, std::vector<size_t>& row_bytes) {
  row_bytes.clear();
  for (const int64_t width : widths) row_bytes.push_back(static_cast<size_t>(width) * dtype_size(dtype));
}

/// A part of an all_gather whose message is, on every rank, one run of bytes of its tensor: whole rows, or a part of one row.
struct GatherPiece {
  int64_t first_row = 0, num_rows = 0;
  size_t first_byte = 0, max_bytes = 0;  // of each rank's row

  /// Of a rank whose rows have so many bytes: what its rows have in this piece, where that begins in its tensor, and how much it is.
  [[nodiscard]] size_t row_share(size_t row_bytes) const { return std::min(row_bytes - std::min(row_bytes, first_byte), max_bytes); }
  [[nodiscard]] size_t offset(size_t row_bytes) const { return static_cast<size_t>(first_row) * row_bytes + std::min(row_bytes, first_byte); }
  [[nodiscard]] size_t bytes(size_t row_bytes) const { return static_cast<size_t>(num_rows) * row_share(row_bytes); }
  [[nodiscard]] bool whole_rows() const { return first_byte == 0 && max_bytes == SIZE_MAX; }
};

/// Calls work(piece) for pieces of at most `capacity` bytes a rank that cover a gather of `num_rows` rows; they depend on nothing else, so all ranks cut alike.
template <class Work>
void for_each_gather_piece(int64_t num_rows, std::span<const size_t> row_bytes, size_t capacity, const Work& work) {
  const size_t longest = *std::max_element(row_bytes.begin(), row_bytes.end());
  if (num_rows == 0 || longest == 0) return;
  if (longest <= capacity) {
    const auto rows = static_cast<int64_t>(capacity / longest);
    for (int64_t first = 0; first < num_rows; first += rows) work(GatherPiece{first, std::min(rows, num_rows - first), 0, SIZE_MAX});
    return;
  }
  for (int64_t row = 0; row < num_rows; ++row)
    for (size_t first = 0; first < longest; first += capacity) work(GatherPiece{row, 1, first, capacity});
}

}  // namespace quern::ops
