#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <span>
#include <string_view>
#include <vector>

#include "base/result.h"
#include "ops/device.h"

namespace quern::weights {

using Buffers = std::vector<std::unique_ptr<ops::Buffer>>;

/// Brings tensors from host memory to a device for packing. Host memory of its own stays below two chunks.
class Staging {
 public:
  static constexpr size_t kChunkBytes = size_t{32} << 20;

  /// `buffers` will own what the views point to.
  Staging(ops::Device& device, ops::Stream& stream, Buffers& buffers) : device_(device), stream_(stream), buffers_(buffers) {}

  /// `bytes`, which stay where they are until Stream::finish() and longer where the device reads host memory in place.
  Result<ops::TensorView> borrow(std::span<const std::byte> bytes, DType dtype, const Shape& shape, std::string_view purpose);
  /// A copy of `values`; they may go as soon as this returns.
  Result<ops::TensorView> copy(std::span<const float> values, const Shape& shape, std::string_view purpose);
  /// Rows that `write(first_row, num_rows, destination)` makes, as many at a time as fit a chunk; several threads write rows of their own. While a chunk is copied the next one is made.
  using WriteRows = std::function<void(int64_t first_row, int64_t num_rows, std::byte* destination)>;
  Result<ops::TensorView> make_rows(DType dtype, int64_t rows, int64_t columns, std::string_view purpose, const WriteRows& write);

 private:
  Result<ops::TensorView> allocate(DType dtype, const Shape& shape, std::string_view purpose);

  ops::Device& device_;
  ops::Stream& stream_;
  Buffers& buffers_;
};

}  // namespace quern::weights
