#pragma once

#include <cstdint>

namespace quern::text {

/// What the pre-tokenizer's patterns ask of a code point: \p{L}, \p{M}, \p{N}, \s (White_Space), none of them. Unicode 16.0.
enum class Category : uint8_t { kOther, kLetter, kMark, kNumber, kSpace };

namespace internal {
constexpr uint32_t kCategoryBlockSize = 128;         // code points a block; two categories a byte, the lower one first
constexpr uint32_t kNumCategoryBlockIndexes = 7172;  // what lies beyond is kOther
extern const uint8_t kBlockOfCodePoint[];            // generated: unicode_category_table.cpp
extern const uint8_t kCategoryBlocks[];
}  // namespace internal

inline Category category_of(char32_t code_point) {
  const uint32_t index = code_point / internal::kCategoryBlockSize;
  if (index >= internal::kNumCategoryBlockIndexes) return Category::kOther;
  const uint32_t within = code_point % internal::kCategoryBlockSize;
  const uint32_t at = (internal::kBlockOfCodePoint[index] * internal::kCategoryBlockSize + within) / 2;
  return static_cast<Category>(internal::kCategoryBlocks[at] >> (within % 2 * 4) & 0xF);
}

}  // namespace quern::text
