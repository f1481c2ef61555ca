#include "text/bpe.h"

#include "base/hash.h"
#include "support/test_support.h"

namespace quern::text {
namespace {

using ::testing::ElementsAre;

std::array<int32_t, 256> bytes_as_tokens() {
  std::array<int32_t, 256> tokens;
  for (size_t i = 0; i < tokens.size(); ++i) tokens[i] = static_cast<int32_t>(i);
  return tokens;
}

std::vector<int32_t> encode(const Bpe& bpe, std::string_view piece) {
  std::vector<int32_t> out;
  bpe.encode(piece, out);
  return out;
}

/// By the definition: look at all pairs for the lowest rank, merge its leftmost one, until there is none.
std::vector<int32_t> encode_by_definition(std::span<const Merge> merges, std::string_view piece) {
  std::vector<int32_t> tokens;
  for (const char c : piece) tokens.push_back(static_cast<uint8_t>(c));
  while (true) {
    size_t best_rank = merges.size(), best = 0;
    for (size_t i = 0; i + 1 < tokens.size(); ++i) {
      for (size_t rank = 0; rank < best_rank; ++rank) {
        if (merges[rank].left == tokens[i] && merges[rank].right == tokens[i + 1]) {
          best_rank = rank;
          best = i;
        }
      }
    }
    if (best_rank == merges.size()) return tokens;
    tokens[best] = merges[best_rank].merged;
    tokens.erase(tokens.begin() + static_cast<ptrdiff_t>(best) + 1);
  }
}

TEST(Bpe, LeavesBytesAloneWithoutMerges) {
  const Bpe bpe(bytes_as_tokens(), {});
  EXPECT_THAT(encode(bpe, "ab"), ElementsAre('a', 'b'));
  EXPECT_THAT(encode(bpe, ""), ElementsAre());
}

TEST(Bpe, MergesTheLowestRankFirstAndTheLeftmostOfEqualOnes) {
  const std::vector<Merge> merges{{'b', 'c', 256}, {'a', 'b', 257}, {'a', 'a', 258}};
  const Bpe bpe(bytes_as_tokens(), merges);
  EXPECT_THAT(encode(bpe, "abc"), ElementsAre('a', 256));
  EXPECT_THAT(encode(bpe, "aaa"), ElementsAre(258, 'a'));
  EXPECT_THAT(encode(bpe, "aab"), ElementsAre('a', 257));
}

TEST(Bpe, FollowsTheDefinitionOnPiecesOfEveryLength) {
  // Few letters and merges over merges, so that ranks collide with what neighbours have become.
  std::vector<Merge> merges;
  SplitMix64 rng(7);
  int32_t next = 256;
  const auto any = [&]() {
    return rng.next() % 3 != 0 || next == 256 ? static_cast<int32_t>('a' + rng.next() % 3)
                                              : static_cast<int32_t>(256 + rng.next() % (next - 256));
  };
  for (int i = 0; i < 60; ++i) {
    const int32_t left = any(), right = any();
    const bool known = std::any_of(merges.begin(), merges.end(), [&](const Merge& m) { return m.left == left && m.right == right; });
    if (!known) merges.push_back({left, right, next++});
  }
  const Bpe bpe(bytes_as_tokens(), merges);
  for (size_t length = 0; length < 200; ++length) {
    for (int repeat = 0; repeat < 4; ++repeat) {
      std::string piece;
      for (size_t i = 0; i < length; ++i) piece.push_back(static_cast<char>('a' + rng.next() % (repeat + 1)));
      ASSERT_EQ(encode(bpe, piece), encode_by_definition(merges, piece)) << piece;
    }
  }
}

TEST(Bpe, UsesTheLastRankOfAPairThatIsListedTwice) {
  const std::vector<Merge> merges{{'a', 'b', 256}, {'b', 'c', 257}, {'a', 'b', 256}};
  EXPECT_THAT(encode(Bpe(bytes_as_tokens(), merges), "abc"), ElementsAre('a', 257));
}

}  // namespace
}  // namespace quern::text
