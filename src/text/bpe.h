#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

namespace quern::text {

/// left, right -> merged; the place in the list of merges is the rank, and the lowest rank merges first.
struct Merge {
  int32_t left, right, merged;
};

/// Byte pair encoding over token ids: every byte is a token, and within a piece the pair of neighbours with the lowest rank
/// merges, the leftmost first, until no pair is in the list.
/// Goals: linear-logarithmic in the length of a piece, no allocation for ordinary words, no state. Non-goals: dropout, unknown tokens.
class Bpe {
 public:
  /// byte_tokens: the token of each byte. A pair that is listed twice has its last rank.
  Bpe(const std::array<int32_t, 256>& byte_tokens, std::span<const Merge> merges);

  /// Appends the tokens of one piece. Thread-safe.
  void encode(std::string_view piece, std::vector<int32_t>& out) const;

 private:
  static constexpr uint32_t kNoRank = UINT32_MAX;
  struct Found {
    uint32_t rank = kNoRank;
    int32_t merged = -1;
  };
  struct Slot {
    uint64_t key;  // left in the upper half, right in the lower
    Found found;   // kNoRank: an empty slot
  };

  Found find(int32_t left, int32_t right) const;
  void encode_short(std::string_view piece, std::vector<int32_t>& out) const;
  void encode_long(std::string_view piece, std::vector<int32_t>& out) const;

  std::array<int32_t, 256> byte_tokens_;
  std::vector<Slot> slots_;  // open addressing, a power of two, at most half full
};

}  // namespace quern::text
