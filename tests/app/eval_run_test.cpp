#include "app/eval_run.h"

#include "support/test_support.h"

namespace quern::app {
namespace {

using worker::RowKind;

/// "P0-64 P64-100"
std::string shown(const std::vector<Piece>& pieces) {
  std::string text;
  for (const Piece& piece : pieces)
    text += fmt::format("{}{}{}-{}", text.empty() ? "" : " ", piece.kind == RowKind::kPrompt ? "P" : "D", piece.begin, piece.end);
  return text;
}

TEST(CutPrompt, TakesMultiplesOfTheGridAsPromptRows) {
  EXPECT_EQ(shown(cut_prompt(150, 64, 512)), "P0-64 P64-128 P128-150");
  EXPECT_EQ(shown(cut_prompt(150, 128, 512)), "P0-128 P128-150");
  EXPECT_EQ(shown(cut_prompt(64, 64, 512)), "P0-64");
}

TEST(CutPrompt, TakesTheWholePromptAsPromptRowsByDefaultAndWhenTheChunkCoversIt) {
  EXPECT_EQ(shown(cut_prompt(150, 0, 512)), "P0-150");
  EXPECT_EQ(shown(cut_prompt(150, 150, 512)), "P0-150");
  EXPECT_EQ(shown(cut_prompt(150, 1000, 512)), "P0-150");
  EXPECT_EQ(shown(cut_prompt(1, 7, 512)), "P0-1");
}

TEST(CutPrompt, TakesOtherChunksAsDecodeRowsCutAtBoundaries) {
  EXPECT_EQ(shown(cut_prompt(10, 7, 512)), "D0-7 D7-10");
  EXPECT_EQ(shown(cut_prompt(70, 63, 512)), "D0-63 D63-64 D64-70");
  EXPECT_EQ(shown(cut_prompt(150, 100, 512)), "D0-64 D64-128 D128-150");
  EXPECT_EQ(cut_prompt(150, 1, 512).size(), 150u);
}

TEST(CutPrompt, NeverExceedsTheRowsOfAStepAndStaysOnTheGrid) {
  EXPECT_EQ(shown(cut_prompt(300, 0, 150)), "P0-128 P128-256 P256-300");
  EXPECT_EQ(shown(cut_prompt(300, 192, 128)), "P0-128 P128-256 P256-300");
  EXPECT_EQ(shown(cut_prompt(70, 33, 20)), "D0-20 D20-40 D40-60 D60-64 D64-70");
}

}  // namespace
}  // namespace quern::app
