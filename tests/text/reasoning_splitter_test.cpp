#include "text/reasoning_splitter.h"

#include <vector>

#include "base/hash.h"
#include "support/test_support.h"

namespace quern::text {
namespace {

struct Split {
  std::string reasoning, content;
  friend bool operator==(const Split&, const Split&) = default;
  friend std::ostream& operator<<(std::ostream& out, const Split& s) {
    return out << "reasoning [" << s.reasoning << "] content [" << s.content << "]";
  }
};

Split split_pieces(const std::vector<std::string_view>& pieces, bool starts_in_reasoning) {
  ReasoningSplitter splitter(starts_in_reasoning);
  Split split;
  const auto add = [&](const ReasoningSplitter::Delta& delta) {
    split.reasoning += delta.reasoning;
    split.content += delta.content;
  };
  for (const std::string_view piece : pieces) add(splitter.push(piece));
  add(splitter.finish());
  return split;
}

Split split(std::string_view text, bool starts_in_reasoning) { return split_pieces({text}, starts_in_reasoning); }

struct Case {
  std::string text;
  bool starts_in_reasoning;
  Split expected;
};

const std::vector<Case>& cases() {
  static const std::vector<Case> kCases = {
      {"", true, {"", ""}},
      {"", false, {"", ""}},
      {"thoughts\n</think>\n\nanswer", true, {"thoughts\n", "answer"}},
      {"thoughts</think>answer", true, {"thoughts", "answer"}},
      {"</think>\n\n\n\nanswer\n\n", true, {"", "answer\n\n"}},
      {"\n</think>\n\n  answer", true, {"\n", "  answer"}},
      {"cut off before the end", true, {"cut off before the end", ""}},
      {"cut off inside </thi", true, {"cut off inside </thi", ""}},
      {"cut off after</think>\n", true, {"cut off after", ""}},
      {"a < b and <b> and </thinker> and < /think>", true, {"a < b and <b> and </thinker> and < /think>", ""}},
      {"<<</think>x", true, {"<<", "x"}},
      {"</</think>x", true, {"</", "x"}},
      {"thoughts\n<tool_call>\n<function=f>\n</function>\n</tool_call>",
       true,
       {"thoughts\n", "<tool_call>\n<function=f>\n</function>\n</tool_call>"}},
      {"a<tool_call>b</think>c", true, {"a", "<tool_call>b</think>c"}},
      {"a</think><tool_call>b", true, {"a", "<tool_call>b"}},
      {"a<tool_calls>b</think>c", true, {"a<tool_calls>b", "c"}},
      {"a</think>b</think>c<think>d", true, {"a", "b</think>c<think>d"}},
      {"<think>\nrepeated\n</think>\n\nx", true, {"repeated\n", "x"}},
      {"just an answer", false, {"", "just an answer"}},
      {"\n\n just an answer\n", false, {"", "\n\n just an answer\n"}},
      {"<think>\nown thoughts\n</think>\n\nanswer", false, {"own thoughts\n", "answer"}},
      {" \n<think>own</think>answer", false, {"own", "answer"}},
      {"<think>own, cut off", false, {"own, cut off", ""}},
      {"<thin", false, {"", "<thin"}},
      {"  \n", false, {"", "  \n"}},
      {"  \n", true, {"  \n", ""}},
      {"answer with <think>tags</think>", false, {"", "answer with <think>tags</think>"}},
      {"<tool_call>x</tool_call>", false, {"", "<tool_call>x</tool_call>"}},
      {"思考…\n</think>\n\n答案 😀", true, {"思考…\n", "答案 😀"}},
  };
  return kCases;
}

TEST(ReasoningSplitter, SplitsWholeTexts) {
  for (const Case& c : cases()) EXPECT_EQ(split(c.text, c.starts_in_reasoning), c.expected) << c.text;
}

TEST(ReasoningSplitter, EveryCutGivesTheSame) {
  for (const Case& c : cases()) {
    const std::string_view text = c.text;
    for (size_t at = 0; at <= text.size(); ++at) {
      EXPECT_EQ(split_pieces({text.substr(0, at), text.substr(at)}, c.starts_in_reasoning), c.expected) << c.text << ", cut at " << at;
    }
    std::vector<std::string_view> bytes;
    for (size_t at = 0; at < text.size(); ++at) bytes.push_back(text.substr(at, 1));
    EXPECT_EQ(split_pieces(bytes, c.starts_in_reasoning), c.expected) << c.text << ", byte by byte";
  }
}

TEST(ReasoningSplitter, RandomTextsInRandomPiecesGiveTheSame) {
  const std::vector<std::string> words = {"<think>", "</think>", "<tool_call>", "</tool_call>", "<",    "</", "think>",
                                          "\n",      " ",        "a",           "tool_call>",   "<thi", "é"};
  SplitMix64 random(7);
  size_t num_with_both = 0;
  for (int round = 0; round < 5000; ++round) {
    std::string text;
    for (uint64_t n = random.next() % 12; n > 0; --n) text += words[random.next() % words.size()];
    const bool starts = random.next() % 2;
    const Split whole = split(text, starts);
    num_with_both += !whole.reasoning.empty() && !whole.content.empty();
    std::vector<std::string_view> pieces;
    for (size_t at = 0; at < text.size();) {
      const size_t size = std::min<size_t>(text.size() - at, random.next() % 6);
      pieces.push_back(std::string_view(text).substr(at, size));
      at += size;
    }
    ASSERT_EQ(split_pieces(pieces, starts), whole) << text;
  }
  EXPECT_GT(num_with_both, 500u);
}

TEST(ReasoningSplitter, HoldsBackNoMoreThanATag) {
  ReasoningSplitter splitter(true);
  EXPECT_EQ(splitter.push("abc</thi").reasoning, "abc");
  EXPECT_EQ(splitter.push("s is fine <tool").reasoning, "</this is fine ");
  EXPECT_TRUE(splitter.in_reasoning());
  EXPECT_EQ(splitter.push("_call>x").content, "<tool_call>x");
  EXPECT_FALSE(splitter.in_reasoning());
  EXPECT_EQ(splitter.push("</thi").content, "</thi");
}

TEST(ReasoningSplitter, KnowsBeforeTheFirstTokenWhetherItIsReasoning) {
  EXPECT_TRUE(ReasoningSplitter(true).in_reasoning());
  EXPECT_FALSE(ReasoningSplitter(false).in_reasoning());
}

}  // namespace
}  // namespace quern::text
