#include "weights/staging.h"

#include <algorithm>
#include <array>
#include <memory>
#include <optional>
#include <utility>

#include "base/parallel.h"

namespace quern::weights {

using ops::TensorView;

Result<TensorView> Staging::allocate(DType dtype, const Shape& shape, std::string_view purpose) {
  TensorView view{nullptr, 0, dtype, shape};
  if (view.size_bytes() == 0) return view;
  ASSIGN_OR_RETURN(auto buffer, device_.allocate(view.size_bytes(), purpose));
  view.buffer = buffer.get();
  buffers_.push_back(std::move(buffer));
  return view;
}

Result<TensorView> Staging::borrow(std::span<const std::byte> bytes, DType dtype, const Shape& shape, std::string_view purpose) {
  // Kernels read elements at addresses that are multiples of their size; a file promises nothing.
  const bool aligned = reinterpret_cast<uintptr_t>(bytes.data()) % dtype_size(dtype) == 0;
  if (device_.reads_host_memory() && aligned && !bytes.empty()) {
    auto buffer = device_.wrap_host_memory(bytes);
    CHECK(buffer != nullptr);
    buffers_.push_back(std::move(buffer));
    return TensorView{buffers_.back().get(), 0, dtype, shape};
  }
  ASSIGN_OR_RETURN(const TensorView view, allocate(dtype, shape, purpose));
  if (!bytes.empty()) stream_.copy_to_device(bytes.data(), view);
  return view;
}

Result<TensorView> Staging::copy(std::span<const float> values, const Shape& shape, std::string_view purpose) {
  ASSIGN_OR_RETURN(const TensorView view, allocate(DType::kF32, shape, purpose));
  if (!values.empty()) stream_.copy_to_device(values.data(), view);
  RETURN_IF_ERROR(stream_.finish());
  return view;
}

Result<TensorView> Staging::make_rows(DType dtype, int64_t rows, int64_t columns, std::string_view purpose, const WriteRows& write) {
  ASSIGN_OR_RETURN(const TensorView view, allocate(dtype, {rows, columns}, purpose));
  if (view.buffer == nullptr) return view;
  const size_t row_bytes = static_cast<size_t>(columns) * dtype_size(dtype);
  const auto write_rows = [&](int64_t first, int64_t count, std::byte* out) {
    constexpr int64_t kGrainBytes = 1 << 20;
    parallel_pieces(count, kGrainBytes / static_cast<int64_t>(row_bytes) + 1, [&](int64_t begin, int64_t end, int64_t) {
      write(first + begin, end - begin, out + static_cast<size_t>(begin) * row_bytes);
    });
  };
  if (device_.reads_host_memory()) {
    write_rows(0, rows, view.data<std::byte>());
    return view;
  }
  const int64_t rows_at_once = std::clamp(static_cast<int64_t>(kChunkBytes / row_bytes), int64_t{1}, rows);
  // Larger than what malloc ever takes from memory that it keeps: a chunk that is freed is given back. Of what is not written no page is there.
  constexpr size_t kAboveMalloc = size_t{1} << 20;
  static_assert(kChunkBytes >= size_t{32} << 20);
  struct Chunk {
    std::unique_ptr<std::byte[]> memory;
    std::optional<ops::Mark> read;  // passed when the stream has read it
  };
  std::array<Chunk, 2> chunks;
  for (int64_t row = 0, number = 0; row < rows; row += rows_at_once, ++number) {
    const int64_t count = std::min(rows_at_once, rows - row);
    Chunk& chunk = chunks[static_cast<size_t>(number) % chunks.size()];
    if (chunk.read) RETURN_IF_ERROR(stream_.wait(*chunk.read));
    if (!chunk.memory) chunk.memory = std::make_unique_for_overwrite<std::byte[]>(std::max(kChunkBytes, row_bytes) + kAboveMalloc);
    write_rows(row, count, chunk.memory.get());
    stream_.copy_to_device(chunk.memory.get(), TensorView{view.buffer, static_cast<size_t>(row) * row_bytes, dtype, {count, columns}});
    chunk.read = stream_.mark();
  }
  RETURN_IF_ERROR(stream_.finish());
  return view;
}

}  // namespace quern::weights
