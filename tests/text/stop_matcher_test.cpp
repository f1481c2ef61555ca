#include "text/stop_matcher.h"

#include <algorithm>

#include "base/hash.h"
#include "support/test_support.h"

namespace quern::text {
namespace {

struct Outcome {
  std::string text, stop;
  friend bool operator==(const Outcome&, const Outcome&) = default;
  friend std::ostream& operator<<(std::ostream& out, const Outcome& o) { return out << "text [" << o.text << "] stop [" << o.stop << "]"; }
};

Outcome run_pieces(const std::vector<std::string>& stops, const std::vector<std::string_view>& pieces, const StopOptions& options = {}) {
  auto matcher = StopMatcher::create(stops, options);
  EXPECT_OK(matcher);
  Outcome outcome;
  for (const std::string_view piece : pieces) outcome.text += matcher->push(piece);
  outcome.text += matcher->finish();
  if (matcher->stopped()) outcome.stop = *matcher->matched();
  return outcome;
}

/// The same by looking at the whole text: the first end of a stop, and of those that end there the longest.
Outcome by_search(const std::vector<std::string>& stops, const std::string& text, bool include) {
  size_t end = std::string::npos;
  Outcome outcome{text, ""};
  for (const std::string& stop : stops) {
    const size_t at = text.find(stop);
    if (at == std::string::npos) continue;
    if (at + stop.size() < end || (at + stop.size() == end && stop.size() > outcome.stop.size())) {
      end = at + stop.size();
      outcome = {text.substr(0, include ? end : at), stop};
    }
  }
  return outcome;
}

TEST(StopMatcher, FindsTheStopThatIsCompleteFirst) {
  EXPECT_EQ(run_pieces({"END"}, {"some text END more"}), (Outcome{"some text ", "END"}));
  EXPECT_EQ(run_pieces({"nope"}, {"some text"}), (Outcome{"some text", ""}));
  EXPECT_EQ(run_pieces({"b", "abc"}, {"xabc"}), (Outcome{"xa", "b"}));
  EXPECT_EQ(run_pieces({"c", "abc", "bc"}, {"xabc"}), (Outcome{"x", "abc"}));
  EXPECT_EQ(run_pieces({"ab", "abc"}, {"xabc"}), (Outcome{"x", "ab"}));
  EXPECT_EQ(run_pieces({"aab"}, {"aaab"}), (Outcome{"a", "aab"}));
  EXPECT_EQ(run_pieces({"abab", "abc"}, {"ababc"}), (Outcome{"", "abab"}));
  EXPECT_EQ(run_pieces({}, {"anything"}), (Outcome{"anything", ""}));
}

TEST(StopMatcher, IncludesTheStopWhenAsked) {
  const StopOptions include{.include_stop_in_output = true};
  EXPECT_EQ(run_pieces({"END"}, {"text E", "ND more"}, include), (Outcome{"text END", "END"}));
}

// STOP-55, STOP-56
TEST(StopMatcher, EmitsNothingOfAStopThatSpansPieces) {
  auto matcher = StopMatcher::create({"\nUser:"});
  ASSERT_OK(matcher);
  EXPECT_EQ(matcher->push("Hi\n"), "Hi");
  EXPECT_EQ(matcher->push("User"), "");
  EXPECT_FALSE(matcher->stopped());
  EXPECT_EQ(matcher->push(": x"), "");
  EXPECT_TRUE(matcher->stopped());
  EXPECT_EQ(matcher->push("ignored"), "");
  EXPECT_EQ(matcher->finish(), "");
}

// STOP-58
TEST(StopMatcher, HoldsBackOnlyWhatCanStillBecomeAStop) {
  auto matcher = StopMatcher::create({"a long stop string", "lo"});
  ASSERT_OK(matcher);
  EXPECT_EQ(matcher->push("plain words"), "plain words");
  EXPECT_EQ(matcher->push(" a "), " ");
  EXPECT_EQ(matcher->push("b"), "a b");
  EXPECT_EQ(matcher->push("l"), "");
  EXPECT_EQ(matcher->push("l"), "l");
}

// STOP-59
TEST(StopMatcher, ReleasesHeldTextAtTheEnd) {
  auto matcher = StopMatcher::create({"stop here"});
  ASSERT_OK(matcher);
  EXPECT_EQ(matcher->push("don't stop"), "don't ");
  EXPECT_EQ(matcher->finish(), "stop");
  EXPECT_EQ(matcher->finish(), "");
}

// REAS-41
TEST(StopMatcher, DoesNotCutControlTokensWhenItHoldsBack) {
  const StopOptions options{.atomic = {"</think>", "<tool_call>"}};
  auto matcher = StopMatcher::create({"k>!", "l>\n"}, options);
  ASSERT_OK(matcher);
  EXPECT_EQ(matcher->push("done</think>"), "done");
  EXPECT_EQ(matcher->push("\n"), "</think>\n");
  EXPECT_EQ(matcher->push("<tool_call>"), "");
  EXPECT_EQ(matcher->push("x"), "<tool_call>x");
  EXPECT_EQ(matcher->push("thi"), "thi");
  EXPECT_EQ(matcher->push("k>"), "");  // no control token: only the true prefix is held
  EXPECT_EQ(matcher->finish(), "k>");
}

TEST(StopMatcher, RefusesAnEmptyStop) {
  const auto matcher = StopMatcher::create({"a", ""});
  ASSERT_FALSE(matcher.has_value());
  EXPECT_EQ(matcher.error().field, "stop");
}

TEST(StopMatcher, CanBeMoved) {
  auto matcher = StopMatcher::create({"ab"});
  ASSERT_OK(matcher);
  EXPECT_EQ(matcher->push("xa"), "x");
  StopMatcher moved = *std::move(matcher);
  EXPECT_EQ(moved.push("b"), "");
  ASSERT_TRUE(moved.stopped());
  EXPECT_EQ(*moved.matched(), "ab");
}

TEST(StopMatcher, AnyCutGivesWhatASearchOfTheWholeTextGives) {
  SplitMix64 random(3);
  const auto random_text = [&](size_t max_size, std::string_view alphabet) {
    std::string text;
    for (uint64_t n = random.next() % (max_size + 1); n > 0; --n) text += alphabet[random.next() % alphabet.size()];
    return text;
  };
  size_t num_stopped = 0;
  for (int round = 0; round < 20000; ++round) {
    std::vector<std::string> stops;
    for (uint64_t n = random.next() % 4; n > 0; --n) stops.push_back("a" + random_text(4, "ab"));
    for (std::string& stop : stops)
      std::rotate(stop.begin(), stop.begin() + static_cast<std::ptrdiff_t>(random.next() % stop.size()), stop.end());
    const std::string text = random_text(24, "aabc");
    const bool include = random.next() % 2;
    const StopOptions options{.include_stop_in_output = include, .atomic = {"abc", "ca"}};
    std::vector<std::string_view> pieces;
    for (size_t at = 0; at < text.size();) {
      const size_t size = std::min<size_t>(text.size() - at, random.next() % 5);
      pieces.push_back(std::string_view(text).substr(at, size));
      at += size;
    }
    const Outcome expected = by_search(stops, text, include);
    num_stopped += !expected.stop.empty();
    ASSERT_EQ(run_pieces(stops, pieces, options), expected) << text << " stops " << ::testing::PrintToString(stops);
  }
  EXPECT_GT(num_stopped, 3000u);
}

}  // namespace
}  // namespace quern::text
