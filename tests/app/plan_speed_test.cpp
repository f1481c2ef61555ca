#include <filesystem>

#include "app/program.h"
#include "app/published_speeds.h"
#include "base/json.h"
#include "support/test_support.h"

// What `plan` prints of cards whose speed is modelled: the terms, the mark, what others published.

namespace quern::app {
namespace {

using quern::testing::data_path;
using quern::testing::ProgramResult;
using quern::testing::run_quern;
using quern::testing::TemporaryFolder;
using ::testing::HasSubstr;
using ::testing::Not;

/// A directory with nothing but the configuration of the 27B model.
class PlannedSpeed : public ::testing::Test {
 protected:
  PlannedSpeed() { std::filesystem::copy_file(data_path("qwen3.6-27b/config.fp8.json"), folder_.path() / "config.json"); }
  ProgramResult plan(std::vector<std::string> more, int exit_code = 0) {
    std::vector<std::string> arguments = {"plan", folder_.path().string()};
    arguments.insert(arguments.end(), more.begin(), more.end());
    ProgramResult result = run_quern(arguments);
    EXPECT_EQ(result.exit_code, exit_code) << result.log << result.output;
    return result;
  }
  Json plan_json(std::vector<std::string> more) {
    more.emplace_back("--json");
    const auto document = parse_json(plan(more).output, "plan");
    EXPECT_OK(document);
    return document ? *document : Json();
  }

  TemporaryFolder folder_;
};

TEST_F(PlannedSpeed, PrintsEveryTermWithItsMarkAndWhatWasPublished) {
  const std::string text = plan({"--device", "b60", "-tp", "2"}).output;
  for (const char* term : {"linear layers", "G instructions at 384 G/s", "states, rings, keys", "G instructions of GDN and", "G of attention at", "machine code", "launches", "129 of 30 us", "candidates of other ranks", "one token", "16 sequences", "a prompt of 512", "a prompt of 8192",
                           "512 in, 256 out", "all-reduces of 13 and 48 us", "MTP, 3 drafts"})
    EXPECT_THAT(text, HasSubstr(term));
  // No line names a speed of ours that is not marked, and none of others that is.
  for (size_t begin = 0, end = 0; begin < text.size(); begin = end + 1) {
    end = std::min(text.find('\n', begin), text.size());
    const std::string line = text.substr(begin, end - begin);
    if (line.find("tok/s") == std::string::npos) continue;
    EXPECT_NE(line.find("modelled") != std::string::npos, line.find("published") != std::string::npos) << line;
  }
  for (const PublishedSpeed& published : published_speeds())
    EXPECT_EQ(text.find(published.what) != std::string::npos, published.card == "b60" && published.num_cards == 2) << published.what;
  EXPECT_THAT(plan({"--device", "b70"}).output, AllOf(HasSubstr("modelled"), Not(HasSubstr("all-reduces")), Not(HasSubstr("published"))));
}

TEST_F(PlannedSpeed, TheTermsAreInTheJsonAndAddUp) {
  const Json speed = plan_json({"--device", "b70", "-tp", "2", "-pp", "2"})["card_speed"];
  EXPECT_EQ(speed["modelled"], true);
  ASSERT_EQ(speed["stages"].size(), 2u);
  double seconds = 0;
  for (const Json& stage : speed["stages"]) {
    const Json& t = stage["terms"];
    const auto term = [&](const char* name) { return t[name].get<double>(); };
    const double sum = std::max(term("weight_read_seconds"), term("weight_issue_seconds")) + std::max(term("mixer_read_seconds"), term("mixer_issue_seconds")) + term("launch_seconds") +
                       term("all_reduce_seconds") + term("gather_seconds") + term("hand_over_seconds");
    EXPECT_DOUBLE_EQ(term("seconds"), sum);
    EXPECT_NEAR(term("launch_seconds"), stage["work"]["launches"].get<double>() * speed["assumptions"]["launch_seconds"].get<double>(), 1e-12);
    seconds += sum;
  }
  EXPECT_DOUBLE_EQ(speed["decode_seconds"].get<double>(), seconds);
  EXPECT_EQ(speed["published"].size(), 2u) << "of four cards";
  EXPECT_EQ(speed["other_all_reduces"].size(), 2u);
  EXPECT_TRUE(plan_json({"--device", "h200"})["card_speed"].is_null()) << "measured, not modelled";
}

TEST_F(PlannedSpeed, LayoutsOfAllCardsAreCompared) {
  const Json layouts = plan_json({"--device", "b70", "--cards", "4"});
  ASSERT_EQ(layouts.size(), 3u);
  double last = 1e9;
  for (const Json& layout : layouts) {
    EXPECT_EQ(layout["tp"].get<int>() * layout["pp"].get<int>(), 4);
    EXPECT_TRUE(layout["fits"].get<bool>()) << layout["verdict"];
    EXPECT_LE(layout["expected_decode_tokens_per_second"].get<double>(), last);
    last = layout["expected_decode_tokens_per_second"].get<double>();
    EXPECT_EQ(layout["expected_decode_tokens_per_second"], layout["speed"]["decode_tokens_per_second"]);
  }
  EXPECT_EQ(layouts[0]["tp"], 4);
  EXPECT_THAT(plan({"--device", "b70", "--cards", "4"}).output, AllOf(HasSubstr("modelled"), HasSubstr("fastest for one sequence: -tp 4 -pp 1")));
  // Too small a card, and more ranks than heads.
  EXPECT_THAT(plan({"--device", "b60", "--cards", "1"}, 3).output, HasSubstr("does not fit"));
  EXPECT_THAT(plan({"--device", "b70", "--cards", "29"}).output, AllOf(HasSubstr("24 query heads"), HasSubstr("fastest for one sequence: -tp 1 -pp 29")));
}

}  // namespace
}  // namespace quern::app
