#include "engine/ngram.h"

#include "support/test_support.h"

namespace quern::engine {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

std::vector<int32_t> drafts(const std::vector<int32_t>& prompt, const std::vector<int32_t>& generated, int32_t least, int32_t most, int32_t n) {
  return ngram_drafts(prompt, generated, least, most, n);
}

TEST(Ngram, ReturnsWhatFollowedTheLastTokensBefore) { EXPECT_THAT(drafts({1, 2, 3, 4, 5}, {9, 2, 3}, 2, 4, 2), ElementsAre(4, 5)); }

TEST(Ngram, PrefersTheLongestRunAndThenTheLatest) {
  EXPECT_THAT(drafts({7, 1, 2, 50, 1, 2, 60, 1, 2}, {7, 1, 2}, 1, 3, 1), ElementsAre(50)) << "three tokens agree there";
  EXPECT_THAT(drafts({7, 1, 2, 50, 1, 2, 60}, {8, 1, 2}, 1, 3, 1), ElementsAre(60));
  EXPECT_THAT(drafts({7, 1, 2, 50, 1, 2, 60}, {7, 1, 2}, 1, 2, 1), ElementsAre(60)) << "more than two are not looked at";
}

TEST(Ngram, LooksAcrossTheEndOfThePrompt) { EXPECT_THAT(drafts({5, 1}, {2, 3, 1, 2}, 2, 3, 3), ElementsAre(3, 1, 2)); }

TEST(Ngram, IsSilentWhereTooFewTokensAgree) {
  EXPECT_THAT(drafts({1, 2, 3}, {9, 3}, 2, 3, 3), IsEmpty());
  EXPECT_THAT(drafts({1}, {}, 1, 3, 3), IsEmpty());
  EXPECT_THAT(drafts({1, 1}, {}, 1, 3, 3), ElementsAre(1));
}

}  // namespace
}  // namespace quern::engine
