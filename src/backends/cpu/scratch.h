#pragma once

#include <cstddef>
#include <cstdint>

#include "base/check.h"
#include "base/shape.h"
#include "ops/tensor.h"

namespace quern::cpu {

/// Hands out 64-byte aligned pieces of a launch's workspace, one after the other.
class Scratch {
 public:
  explicit Scratch(const ops::TensorView& workspace)
      : next_(workspace.buffer == nullptr ? nullptr : workspace.data<std::byte>()), left_(workspace.size_bytes()) {}

  template <class T>
  T* take(int64_t count) {
    const size_t bytes = size<T>(count);
    CHECK(bytes <= left_);
    auto* piece = reinterpret_cast<T*>(next_);
    next_ += bytes;
    left_ -= bytes;
    return piece;
  }
  /// Bytes that take<T>(count) uses.
  template <class T>
  static constexpr size_t size(int64_t count) {
    return static_cast<size_t>(round_up(count * static_cast<int64_t>(sizeof(T)), 64));
  }

 private:
  std::byte* next_;
  size_t left_;
};

}  // namespace quern::cpu
