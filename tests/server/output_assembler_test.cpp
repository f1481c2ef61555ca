#include "server/output_assembler.h"

#include "support/standin_tokenizer.h"
#include "support/test_support.h"

namespace quern::server {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

const text::Tokenizer& tokenizer() {
  static const text::Tokenizer instance = text::Tokenizer::load(testing::standin_tokenizer_dir()).value();
  return instance;
}

/// A request's tokens and how it ends.
struct Case {
  std::string text;  // tokenized, control tokens included
  OutputOptions options;
  engine::FinishReason reason = engine::FinishReason::kStop;
};

struct Outcome {
  OutputDelta output;
  OutputUsage usage;
  std::optional<int32_t> stop_at;  // where stop_at() would have been called
};

/// Feeds the tokens in events that end at the given positions.
Outcome run(const Case& c, const std::vector<int32_t>& ids, const std::vector<size_t>& cuts, bool finish_in_own_event) {
  OutputAssembler assembler(c.options);
  Outcome outcome;
  size_t begin = 0;
  std::vector<size_t> ends = cuts;
  ends.push_back(ids.size());
  for (size_t k = 0; k < ends.size(); ++k) {
    engine::TokenEvent event;
    for (size_t i = begin; i < ends[k]; ++i) {
      event.tokens.push_back(ids[i]);
      event.logprobs.push_back({-static_cast<float>(i), 1, {}});
    }
    begin = ends[k];
    const bool last = k + 1 == ends.size();
    engine::Finish finish;
    finish.reason = c.reason;
    if (!ids.empty() && c.reason == engine::FinishReason::kStop) finish.stop_token = ids.back();
    finish.usage = {10, static_cast<int32_t>(ids.size()), 4};
    if (last && !finish_in_own_event) event.finish = finish;
    const bool was_stopped = assembler.stopped();
    outcome.output.append(assembler.push(std::move(event)));
    if (!was_stopped && assembler.stopped()) outcome.stop_at = assembler.usage().completion_tokens;
    if (last && finish_in_own_event) {
      engine::TokenEvent end;
      end.finish = finish;
      outcome.output.append(assembler.push(std::move(end)));
    }
  }
  outcome.usage = assembler.usage();
  return outcome;
}

OutputOptions options(bool thinking = true) {
  OutputOptions o;
  o.tokenizer = &tokenizer();
  o.split_reasoning = true;
  o.starts_in_reasoning = thinking;
  o.stop_ids = {*tokenizer().token_to_id("<|im_end|>")};
  return o;
}

OutputOptions with_stop(OutputOptions o, std::vector<std::string> stop, bool include = false) {
  o.stop = std::move(stop);
  o.include_stop = include;
  return o;
}

OutputOptions with_tools(bool parallel = true) {
  OutputOptions o = options(parallel);
  const Json tools = Json::parse(
      R"([{"function": {"name": "f", "parameters": {"properties": {"s": {"type": "string"}, "n": {"type": "integer"}}}}}, {"function": {"name": "g"}}])");
  o.tools = std::make_shared<const text::ToolSchemas>(text::ToolSchemas::parse(tools).value());
  o.parallel_tool_calls = parallel;
  return o;
}

/// Without ids, which are new in every run.
std::string calls_of(const OutputDelta& output) {
  std::string text;
  for (const ToolCallDelta& call : output.tool_calls) text += fmt::format("{} {}({})", call.index, call.name, call.arguments);
  return text;
}

std::vector<Case> cases() {
  return {
      {"I think so.\n</think>\n\nYes: naïve 你好 🙂!<|im_end|>", options()},
      {"only thought, cut off 🙂", options(), engine::FinishReason::kLength},
      {"plain answer<|im_end|>", options(false)},
      {"<think>\nself-made\n</think>\n\nanswer<|im_end|>", options(false)},
      {"thought </think>\n\nanswer STOP more<|im_end|>", with_stop(options(), {"STOP"})},
      {"thought with STOP inside </think>\n\nanswer<|im_end|>", with_stop(options(), {"STOP"})},
      {"a</think>\n\nends with STO<|im_end|>", with_stop(options(), {"STOP"})},
      {"a</think>\n\nendingSTOP", with_stop(options(), {"STOP"}), engine::FinishReason::kLength},
      {"a</think>\n\nx STOP y", with_stop(options(), {"STOP"}, true), engine::FinishReason::kLength},
      {"thought\n</think>\n\nanswer", with_stop(options(), {"</think>"}), engine::FinishReason::kLength},
      {"thought\n</think>\n\nanswer < <th </thin", with_stop(options(), {"<zzz", "</thinking"}), engine::FinishReason::kLength},
      {"a 你好 b", with_stop(options(false), {"好"}), engine::FinishReason::kLength},
      {"a</think>\n\n<tool_call>\n<function=f>\n</function>\n</tool_call><|im_end|>", options()},
      {"a</think>\n\ntext\n\n<tool_call>\n<function=f>\n<parameter=s>\na 🙂 \"b\"\n</parameter>\n<parameter=n>\n12\n</parameter>\n</function>\n</tool_call><|im_end|>", with_tools()},
      {"<tool_call>\n<function=f>\n</function>\n</tool_call>\n<tool_call>\n<function=g>\n</function>\n</tool_call><|im_end|>", with_tools(false)},
      {"thinks <tool_call>\n<function=f>\n<parameter=s>\nwords", with_tools(), engine::FinishReason::kLength},
      {"a</think>\n\n<tool_call>\nno call STOP", with_stop(with_tools(), {"STOP"}), engine::FinishReason::kLength},
      {"", options(), engine::FinishReason::kLength},
  };
}

TEST(OutputAssembler, GivesTheSameOutputWhereverTheTokenStreamIsCut) {
  size_t num_runs = 0;
  for (const Case& c : cases()) {
    std::vector<int32_t> ids = tokenizer().encode(c.text);
    if (c.reason == engine::FinishReason::kLength && c.text.ends_with("🙂")) ids.pop_back();  // ends within a character
    const Outcome whole = run(c, ids, {}, false);
    ASSERT_TRUE(whole.output.end) << c.text;
    const auto expect_equal = [&](const std::vector<size_t>& cuts, bool own) {
      ++num_runs;
      const Outcome cut = run(c, ids, cuts, own);
      EXPECT_EQ(cut.output.reasoning, whole.output.reasoning) << c.text;
      EXPECT_EQ(cut.output.content, whole.output.content) << c.text;
      EXPECT_EQ(calls_of(cut.output), calls_of(whole.output)) << c.text;
      EXPECT_EQ(cut.output.token_ids, whole.output.token_ids) << c.text;
      EXPECT_EQ(cut.output.logprobs.size(), cut.output.token_ids.size());
      EXPECT_EQ(cut.output.end->finish_reason, whole.output.end->finish_reason) << c.text;
      EXPECT_EQ(cut.output.end->stop_string, whole.output.end->stop_string) << c.text;
      EXPECT_EQ(cut.stop_at, whole.stop_at) << c.text;
      EXPECT_EQ(cut.usage.completion_tokens, whole.usage.completion_tokens) << c.text;
      EXPECT_EQ(cut.usage.reasoning_tokens, whole.usage.reasoning_tokens) << c.text;
    };
    for (size_t i = 0; i <= ids.size(); ++i) {
      for (size_t j = i; j <= ids.size(); ++j) expect_equal({i, j}, (i + j) % 2 == 0);
    }
    std::vector<size_t> every;
    for (size_t i = 0; i <= ids.size(); ++i) every.push_back(i);
    expect_equal(every, true);
  }
  EXPECT_GT(num_runs, 500U);
}

Outcome run_whole(const std::string& text, OutputOptions o, engine::FinishReason reason = engine::FinishReason::kStop) {
  const Case c{text, std::move(o), reason};
  return run(c, tokenizer().encode(text), {}, false);
}

TEST(OutputAssembler, SplitsReasoningFromContent) {
  const Outcome o = run_whole("I think so.\n</think>\n\nYes 🙂<|im_end|>", options());
  EXPECT_EQ(o.output.reasoning, "I think so.\n");
  EXPECT_EQ(o.output.content, "Yes 🙂");
  EXPECT_EQ(o.output.end->finish_reason, "stop");
  EXPECT_GT(o.usage.reasoning_tokens, 0);
  EXPECT_LT(o.usage.reasoning_tokens, o.usage.completion_tokens);
  EXPECT_EQ(o.usage.cached_tokens, 4);
}

TEST(OutputAssembler, ReasoningThenContentThenCalls) {
  const Outcome o = run_whole(cases()[13].text, with_tools());
  EXPECT_EQ(o.output.reasoning, "a");
  EXPECT_EQ(o.output.content, "text");
  EXPECT_EQ(calls_of(o.output), "0 f({\"s\": \"a 🙂 \\\"b\\\"\", \"n\": 12})");
  EXPECT_EQ(o.output.end->finish_reason, "tool_calls");
  const Outcome alone = run_whole(cases()[14].text, with_tools(false));
  EXPECT_EQ(calls_of(alone.output), "0 f({})");
  EXPECT_EQ(alone.output.end->finish_reason, "tool_calls");
  EXPECT_EQ(alone.stop_at, alone.usage.completion_tokens);
  const Outcome cut = run_whole(cases()[15].text, with_tools(), engine::FinishReason::kLength);
  EXPECT_EQ(cut.output.reasoning, "thinks ");
  EXPECT_EQ(calls_of(cut.output), "0 f({\"s\": \"words\"})");
  EXPECT_EQ(cut.output.end->finish_reason, "length");
}

TEST(OutputAssembler, AnOutputThatEndsWhileThinkingIsAllReasoning) {
  const Outcome o = run_whole("still thinking", options(), engine::FinishReason::kLength);
  EXPECT_EQ(o.output.reasoning, "still thinking");
  EXPECT_EQ(o.output.content, "");
  EXPECT_EQ(o.output.end->finish_reason, "length");
  EXPECT_EQ(o.usage.reasoning_tokens, o.usage.completion_tokens);
}

TEST(OutputAssembler, EndsAtTheTokenThatCompletesAStopString) {
  const Outcome o = run_whole("x</think>\n\none two three four", with_stop(options(), {"two th"}), engine::FinishReason::kLength);
  EXPECT_EQ(o.output.content, "one ");
  EXPECT_EQ(o.output.end->finish_reason, "stop");
  EXPECT_EQ(o.output.end->stop_string, "two th");
  EXPECT_EQ(o.stop_at, o.usage.completion_tokens);
  EXPECT_EQ(o.output.token_ids.size(), static_cast<size_t>(o.usage.completion_tokens));
  EXPECT_EQ(tokenizer().decode(o.output.token_ids, true), "x</think>\n\none two three");
}

TEST(OutputAssembler, ReleasesAHeldBackBeginningOfAStopAtTheEnd) {
  EXPECT_EQ(run_whole("x</think>\n\nends with STO<|im_end|>", with_stop(options(), {"STOP"})).output.content, "ends with STO");
  EXPECT_EQ(run_whole("thinks STO", with_stop(options(), {"STOP"}), engine::FinishReason::kLength).output.reasoning, "thinks STO");
}

TEST(OutputAssembler, FlushesAnIncompleteCharacterOnce) {
  std::vector<int32_t> ids = tokenizer().encode("a 🫠");
  ASSERT_GE(ids.size(), 3U) << "the test needs a character of several tokens";
  ids.pop_back();
  const Case c{"", options(false), engine::FinishReason::kLength};
  EXPECT_EQ(run(c, ids, {}, false).output.content, tokenizer().decode(ids, true));
}

TEST(OutputAssembler, NamesAStopTokenOnlyWhenTheRequestDid) {
  OutputOptions named = options(false);
  named.named_stop_ids = named.stop_ids;
  EXPECT_EQ(run_whole("a<|im_end|>", named).output.end->stop_token, named.stop_ids[0]);
  EXPECT_EQ(run_whole("a<|im_end|>", options(false)).output.end->stop_token, std::nullopt);
}

TEST(OutputAssembler, ShowsSpecialTokensAndStopsOnlyWhenAsked) {
  OutputOptions raw = options(false);
  raw.skip_special_tokens = false;
  EXPECT_EQ(run_whole("a<|im_start|>b<|im_end|>", raw).output.content, "a<|im_start|>b");
  EXPECT_EQ(run_whole("a<|im_start|>b<|im_end|>", options(false)).output.content, "ab");
  raw.include_stop = true;
  EXPECT_EQ(run_whole("a<|im_start|>b<|im_end|>", raw).output.content, "a<|im_start|>b<|im_end|>");
  EXPECT_EQ(run_whole("one STOP", with_stop(options(false), {"STOP"}, true)).output.content, "one STOP");
}

TEST(OutputAssembler, WithoutATokenizerThereAreOnlyTokenIds) {
  OutputOptions o;
  o.stop_ids = {9};
  OutputAssembler assembler(o);
  engine::TokenEvent event;
  event.tokens = {5, 6, 9};
  event.finish = engine::Finish{engine::FinishReason::kStop, 9, {}, {1, 3, 0}};
  const OutputDelta delta = assembler.push(event);
  EXPECT_EQ(delta.content, "");
  EXPECT_THAT(delta.token_ids, ElementsAre(5, 6, 9));
  EXPECT_EQ(assembler.usage().completion_tokens, 3);
}

TEST(OutputAssembler, DropsTokensThatArriveAfterAStop) {
  OutputAssembler assembler(with_stop(options(false), {"b"}));
  engine::TokenEvent event;
  event.tokens = tokenizer().encode("a b c");
  const OutputDelta first = assembler.push(event);
  EXPECT_EQ(first.content, "a ");
  EXPECT_TRUE(assembler.stopped());
  const int32_t completion_tokens = assembler.usage().completion_tokens;
  EXPECT_THAT(assembler.push(event).token_ids, IsEmpty());
  EXPECT_EQ(assembler.usage().completion_tokens, completion_tokens);
}

}  // namespace
}  // namespace quern::server
