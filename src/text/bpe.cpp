#include "text/bpe.h"

#include <algorithm>
#include <bit>
#include <functional>
#include <queue>

#include "base/hash.h"

namespace quern::text {
namespace {

/// Up to this many bytes a scan of all ranks after each merge is faster than a heap (measured on English text and code).
constexpr size_t kShortPiece = 48;

uint64_t pair_key(int32_t left, int32_t right) { return uint64_t{static_cast<uint32_t>(left)} << 32 | static_cast<uint32_t>(right); }

}  // namespace

Bpe::Bpe(const std::array<int32_t, 256>& byte_tokens, std::span<const Merge> merges)
    : byte_tokens_(byte_tokens), slots_(std::bit_ceil(2 * merges.size() + 1), Slot{0, {}}) {
  const size_t mask = slots_.size() - 1;
  for (size_t rank = 0; rank < merges.size(); ++rank) {
    const uint64_t key = pair_key(merges[rank].left, merges[rank].right);
    size_t at = mix64(key) & mask;
    while (slots_[at].found.rank != kNoRank && slots_[at].key != key) at = (at + 1) & mask;
    slots_[at] = {key, {static_cast<uint32_t>(rank), merges[rank].merged}};
  }
}

Bpe::Found Bpe::find(int32_t left, int32_t right) const {
  const uint64_t key = pair_key(left, right);
  const size_t mask = slots_.size() - 1;
  for (size_t at = mix64(key) & mask;; at = (at + 1) & mask) {
    const Slot& slot = slots_[at];
    if (slot.key == key || slot.found.rank == kNoRank) return slot.found;
  }
}

void Bpe::encode(std::string_view piece, std::vector<int32_t>& out) const {
  if (piece.size() <= kShortPiece) {
    encode_short(piece, out);
  } else {
    encode_long(piece, out);
  }
}

void Bpe::encode_short(std::string_view piece, std::vector<int32_t>& out) const {
  if (piece.empty()) return;
  int32_t tokens[kShortPiece];
  Found pairs[kShortPiece];  // pairs[i]: tokens[i] with tokens[i + 1]
  size_t n = piece.size();
  for (size_t i = 0; i < n; ++i) tokens[i] = byte_tokens_[static_cast<uint8_t>(piece[i])];
  for (size_t i = 0; i + 1 < n; ++i) pairs[i] = find(tokens[i], tokens[i + 1]);
  while (n > 1) {
    size_t best = 0;
    for (size_t i = 1; i + 1 < n; ++i) {
      if (pairs[i].rank < pairs[best].rank) best = i;
    }
    if (pairs[best].rank == kNoRank) break;
    tokens[best] = pairs[best].merged;
    std::copy(tokens + best + 2, tokens + n, tokens + best + 1);
    std::copy(pairs + best + 1, pairs + n - 1, pairs + best);
    --n;
    if (best > 0) pairs[best - 1] = find(tokens[best - 1], tokens[best]);
    if (best + 1 < n) pairs[best] = find(tokens[best], tokens[best + 1]);
  }
  out.insert(out.end(), tokens, tokens + n);
}

void Bpe::encode_long(std::string_view piece, std::vector<int32_t>& out) const {
  constexpr uint32_t kNone = UINT32_MAX;
  struct Symbol {
    int32_t token;  // -1: merged into the symbol before it
    uint32_t previous, next;
  };
  struct Candidate {
    uint32_t rank, left;  // the heap's order: lowest rank, then leftmost
    int32_t left_token, right_token, merged;
    bool operator>(const Candidate& other) const { return rank != other.rank ? rank > other.rank : left > other.left; }
  };
  const auto size = static_cast<uint32_t>(piece.size());
  std::vector<Symbol> symbols(size);
  for (uint32_t i = 0; i < size; ++i) {
    symbols[i] = {byte_tokens_[static_cast<uint8_t>(piece[i])], i == 0 ? kNone : i - 1, i + 1 == size ? kNone : i + 1};
  }
  std::priority_queue<Candidate, std::vector<Candidate>, std::greater<>> heap;
  const auto push = [&](uint32_t left) {
    const uint32_t right = symbols[left].next;
    if (right == kNone) return;
    const Found found = find(symbols[left].token, symbols[right].token);
    if (found.rank != kNoRank) heap.push({found.rank, left, symbols[left].token, symbols[right].token, found.merged});
  };
  for (uint32_t i = 0; i + 1 < size; ++i) push(i);
  while (!heap.empty()) {
    const Candidate best = heap.top();
    heap.pop();
    Symbol& left = symbols[best.left];
    // Stale when either symbol has since merged into something else.
    if (left.token != best.left_token || left.next == kNone || symbols[left.next].token != best.right_token) continue;
    Symbol& right = symbols[left.next];
    left.token = best.merged;
    left.next = right.next;
    right.token = -1;
    if (left.next != kNone) symbols[left.next].previous = best.left;
    if (left.previous != kNone) push(left.previous);
    push(best.left);
  }
  for (uint32_t i = 0; i != kNone; i = symbols[i].next) out.push_back(symbols[i].token);
}

}  // namespace quern::text
