#pragma once

#include <array>
#include <bit>
#include <cstdint>
#include <string_view>

namespace quern::text {

/// A set of byte values.
class ByteSet {
 public:
  constexpr ByteSet() = default;
  static constexpr ByteSet range(uint8_t low, uint8_t high) {
    ByteSet set;
    for (unsigned byte = low; byte <= high; ++byte) set.add(static_cast<uint8_t>(byte));
    return set;
  }
  static constexpr ByteSet of(std::string_view bytes) {
    ByteSet set;
    for (const char c : bytes) set.add(static_cast<uint8_t>(c));
    return set;
  }
  constexpr void add(uint8_t byte) { words_[byte >> 6] |= uint64_t{1} << (byte & 63); }
  [[nodiscard]] constexpr bool has(uint8_t byte) const { return (words_[byte >> 6] >> (byte & 63) & 1) != 0; }
  [[nodiscard]] constexpr bool empty() const { return (words_[0] | words_[1] | words_[2] | words_[3]) == 0; }
  [[nodiscard]] constexpr int count() const {
    int count = 0;
    for (const uint64_t word : words_) count += std::popcount(word);
    return count;
  }
  /// Adds all of `other`; true when that changed something.
  constexpr bool merge(const ByteSet& other) {
    bool grew = false;
    for (size_t i = 0; i < words_.size(); ++i) {
      grew = grew || (other.words_[i] & ~words_[i]) != 0;
      words_[i] |= other.words_[i];
    }
    return grew;
  }
  [[nodiscard]] constexpr const std::array<uint64_t, 4>& words() const { return words_; }
  friend constexpr bool operator==(const ByteSet&, const ByteSet&) = default;

 private:
  std::array<uint64_t, 4> words_{};
};

}  // namespace quern::text
