#include "text/pretokenizer.h"

#include "support/test_support.h"
#include "text/unicode_category.h"

namespace quern::text {
namespace {

using ::testing::ElementsAre;

std::vector<std::string> pieces(SplitPattern pattern, std::string_view text) {
  std::vector<std::string> result;
  while (!text.empty()) {
    const size_t length = next_piece(pattern, text);
    result.emplace_back(text.substr(0, length));
    text.remove_prefix(length);
  }
  return result;
}
std::vector<std::string> pieces(std::string_view text) { return pieces(SplitPattern::kQwen3_5, text); }

TEST(UnicodeCategory, FollowsUnicode16) {
  EXPECT_EQ(category_of(U'a'), Category::kLetter);
  EXPECT_EQ(category_of(U'7'), Category::kNumber);
  EXPECT_EQ(category_of(U'_'), Category::kOther);
  EXPECT_EQ(category_of(0x0301), Category::kMark);
  EXPECT_EQ(category_of(0x00A0), Category::kSpace);
  EXPECT_EQ(category_of(0x0085), Category::kSpace);
  EXPECT_EQ(category_of(0x001C), Category::kOther);    // not White_Space
  EXPECT_EQ(category_of(0x180E), Category::kOther);    // no longer White_Space
  EXPECT_EQ(category_of(0x2167), Category::kNumber);   // Roman numeral eight: Nl
  EXPECT_EQ(category_of(0x10D50), Category::kLetter);  // Garay, new in 16.0
  EXPECT_EQ(category_of(0x10D69), Category::kMark);
  EXPECT_EQ(category_of(0x10D40), Category::kNumber);
  EXPECT_EQ(category_of(0xE01EF), Category::kMark);  // the last mark
  EXPECT_EQ(category_of(0xE0200), Category::kOther);
  EXPECT_EQ(category_of(0x10FFFF), Category::kOther);
}

TEST(UnicodeCategory, HasAsManyCharactersOfEachKindAsUnicode16) {
  std::array<size_t, 5> count{};
  for (char32_t c = 0; c < 0x110000; ++c) ++count[static_cast<size_t>(category_of(c))];
  EXPECT_EQ(count[static_cast<size_t>(Category::kLetter)], 141028u);
  EXPECT_EQ(count[static_cast<size_t>(Category::kMark)], 2501u);
  EXPECT_EQ(count[static_cast<size_t>(Category::kNumber)], 1911u);
  EXPECT_EQ(count[static_cast<size_t>(Category::kSpace)], 25u);
}

TEST(Pretokenizer, KeepsOneSpaceWithTheWordThatFollows) {
  EXPECT_THAT(pieces("Hello,  world"), ElementsAre("Hello", ",", " ", " world"));
  EXPECT_THAT(pieces("\tx .y"), ElementsAre("\tx", " .", "y"));
}

TEST(Pretokenizer, CutsNumbersIntoSingleDigits) { EXPECT_THAT(pieces("x2024 3½"), ElementsAre("x", "2", "0", "2", "4", " ", "3", "½")); }

TEST(Pretokenizer, KeepsRunsOfPunctuationTogether) {
  EXPECT_THAT(pieces("a->b() != c;\n\n}"), ElementsAre("a", "->", "b", "()", " !=", " c", ";\n\n", "}"));
}

TEST(Pretokenizer, CutsContractionsInAnyCaseAndWithTheLongS) {
  EXPECT_THAT(pieces("it's WE'LL he'D"), ElementsAre("it", "'s", " WE", "'LL", " he", "'D"));
  EXPECT_THAT(pieces("'ſx"), ElementsAre("'ſ", "x"));
  EXPECT_THAT(pieces("'rE'r'le"), ElementsAre("'rE", "'r", "'le"));
  EXPECT_THAT(pieces("'"), ElementsAre("'"));
  EXPECT_THAT(pieces("'l"), ElementsAre("'l"));
}

TEST(Pretokenizer, TakesSpacesUpToTheLastLineBreakAndLeavesOneForTheNextWord) {
  EXPECT_THAT(pieces("a \n \r\n  b"), ElementsAre("a", " \n \r\n", " ", " b"));
  EXPECT_THAT(pieces("a   "), ElementsAre("a", "   "));
  EXPECT_THAT(pieces("  1"), ElementsAre(" ", " ", "1"));
  EXPECT_THAT(pieces(" \u3000b"), ElementsAre(" ", "\u3000b"));
}

TEST(Pretokenizer, JoinsMarksToWordsSinceQwen3_5Only) {
  constexpr std::string_view kHindi = "हिन्दी";
  EXPECT_THAT(pieces(SplitPattern::kQwen3_5, kHindi), ElementsAre(kHindi));
  EXPECT_THAT(pieces(SplitPattern::kQwen2, kHindi), ElementsAre("ह", "िन", "्द", "ी"));
  EXPECT_THAT(pieces(SplitPattern::kQwen3_5, "!\u0301"), ElementsAre("!\u0301"));
  EXPECT_THAT(pieces(SplitPattern::kQwen3_5, "1\u0301"), ElementsAre("1", "\u0301"));
}

TEST(Pretokenizer, TakesAllTextAsOnePieceWithoutAPattern) { EXPECT_THAT(pieces(SplitPattern::kNone, "a b\n1"), ElementsAre("a b\n1")); }

TEST(Pretokenizer, KnowsItsPatternsByTheirSourceText) {
  for (const SplitPattern pattern : {SplitPattern::kQwen2, SplitPattern::kQwen3_5})
    EXPECT_EQ(find_split_pattern(regex_of(pattern)), pattern);
  EXPECT_EQ(find_split_pattern(R"(\p{L}+)"), std::nullopt);
  EXPECT_EQ(find_split_pattern(""), std::nullopt);
}

}  // namespace
}  // namespace quern::text
