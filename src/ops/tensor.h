#pragma once

#include <algorithm>
#include <array>
#include <cstddef>

#include "base/dtype.h"
#include "base/shape.h"

namespace quern::ops {

/// A piece of a device's memory; released when destroyed.
class Buffer {
 public:
  virtual ~Buffer() = default;
  /// Address of the first byte as the device sees it: a host pointer on the CPU, a device pointer on CUDA, null on OpenCL (kernels
  /// there take the handle from their own Buffer type).
  [[nodiscard]] virtual std::byte* address() const = 0;
  [[nodiscard]] virtual size_t size_bytes() const = 0;
};

/// A dense row-major tensor inside a Buffer. Copies refer to the same memory; the Buffer outlives them.
struct TensorView {
  Buffer* buffer = nullptr;
  size_t offset_bytes = 0;
  DType dtype = DType::kF32;
  Shape shape;

  [[nodiscard]] bool empty() const { return buffer == nullptr || shape.num_elements() == 0; }
  [[nodiscard]] size_t size_bytes() const { return static_cast<size_t>(shape.num_elements()) * dtype_size(dtype); }
  /// Only where Buffer::address() is an address.
  template <class T>
  [[nodiscard]] T* data() const {
    return reinterpret_cast<T*>(buffer->address() + offset_bytes);
  }
  /// The sub-tensor at index `i` of the first extent.
  [[nodiscard]] TensorView at(int64_t i) const {
    const Shape rest(shape.extents().subspan(1));
    return {buffer, offset_bytes + static_cast<size_t>(i * rest.num_elements()) * dtype_size(dtype), dtype, rest};
  }
  /// The first `n` entries of the first extent.
  [[nodiscard]] TensorView first(int64_t n) const { return part(0, n); }
  /// The `n` entries of the first extent from `begin` on.
  [[nodiscard]] TensorView part(int64_t begin, int64_t n) const {
    std::array<int64_t, Shape::kMaxRank> extents{};
    std::copy(shape.extents().begin(), shape.extents().end(), extents.begin());
    extents[0] = n;
    const Shape rest(shape.extents().subspan(1));
    return {buffer, offset_bytes + static_cast<size_t>(begin * rest.num_elements()) * dtype_size(dtype), dtype,
            Shape(std::span<const int64_t>(extents.data(), static_cast<size_t>(shape.rank())))};
  }
};

}  // namespace quern::ops
