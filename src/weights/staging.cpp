#include "weights/staging.h"

#include <algorithm>
#include <utility>

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
  if (device_.reads_host_memory()) {
    write(0, rows, view.data<std::byte>());
    return view;
  }
  const size_t row_bytes = static_cast<size_t>(columns) * dtype_size(dtype);
  const int64_t rows_at_once = std::clamp(static_cast<int64_t>(kChunkBytes / row_bytes), int64_t{1}, rows);
  std::vector<std::byte> chunk(static_cast<size_t>(rows_at_once) * row_bytes);
  for (int64_t row = 0; row < rows; row += rows_at_once) {
    const int64_t count = std::min(rows_at_once, rows - row);
    write(row, count, chunk.data());
    stream_.copy_to_device(chunk.data(), TensorView{view.buffer, static_cast<size_t>(row) * row_bytes, dtype, {count, columns}});
    RETURN_IF_ERROR(stream_.finish());
  }
  return view;
}

}  // namespace quern::weights
