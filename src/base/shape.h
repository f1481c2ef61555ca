#pragma once

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <array>
#include <cstdint>
#include <initializer_list>
#include <span>
#include <string>

#include "base/check.h"

namespace quern {

/// Up to five extents, row-major, the last one contiguous.
class Shape {
 public:
  static constexpr int kMaxRank = 5;
  Shape() = default;
  Shape(std::initializer_list<int64_t> extents) : Shape(std::span<const int64_t>(extents.begin(), extents.size())) {}
  explicit Shape(std::span<const int64_t> extents) : rank_(static_cast<int>(extents.size())) {
    CHECK(extents.size() <= kMaxRank);
    for (int i = 0; i < rank_; ++i) extents_[i] = extents[i];
  }

  [[nodiscard]] int rank() const { return rank_; }
  int64_t operator[](int i) const { return extents_[i]; }
  [[nodiscard]] int64_t num_elements() const {
    int64_t n = 1;
    for (int i = 0; i < rank_; ++i) n *= extents_[i];
    return n;
  }
  [[nodiscard]] std::span<const int64_t> extents() const { return {extents_.data(), static_cast<size_t>(rank_)}; }
  friend bool operator==(const Shape&, const Shape&) = default;

  /// "[17408, 5120]"
  [[nodiscard]] std::string to_string() const { return fmt::format("[{}]", fmt::join(extents(), ", ")); }

 private:
  std::array<int64_t, kMaxRank> extents_{};
  int rank_ = 0;
};

inline constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
inline constexpr int64_t round_up(int64_t a, int64_t b) { return ceil_div(a, b) * b; }

}  // namespace quern
