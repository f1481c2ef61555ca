#include <limits>

#include "server/chat_request.h"
#include "server/completion_request.h"
#include "support/test_support.h"

namespace quern::server {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr RequestLimits kLimits{1000, 4096};

Json json(std::string_view text) { return Json::parse(text); }

/// A chat request with one message and these further members.
Result<ChatRequest> chat(std::string_view members, const SamplingDefaults& defaults = {}) {
  Json body = json(R"({"messages": [{"role": "user", "content": "hi"}]})");
  body.update(json(members));
  return parse_chat_request(body, defaults, kLimits);
}
Result<CompletionRequest> completion(std::string_view body) { return parse_completion_request(json(body), {}, kLimits); }

struct Refusal {
  std::string body;
  std::string field;
  std::string words;
};

TEST(ChatRequest, HasNeutralDefaults) {
  const auto request = chat("{}");
  ASSERT_OK(request);
  const auto& sampling = request->generation.sampling;
  EXPECT_EQ(sampling.temperature, 1.0F);
  EXPECT_EQ(sampling.top_p, 1.0F);
  EXPECT_EQ(sampling.top_k, 0);
  EXPECT_EQ(sampling.repetition_penalty, 1.0F);
  EXPECT_EQ(request->max_tokens, std::nullopt);
  EXPECT_EQ(request->generation.seed, std::nullopt);
  EXPECT_EQ(request->generation.n, 1);
  EXPECT_TRUE(request->conversation.add_generation_prompt);
}

TEST(ChatRequest, NullIsTheSameAsAbsent) {
  const auto request =
      chat(R"({"temperature": null, "top_k": null, "stop": null, "seed": null, "max_tokens": null, "stream": null, "n": null,
    "logit_bias": null, "stream_options": null, "response_format": null, "tools": null, "tool_choice": null, "logprobs": null, "top_logprobs": null,
    "stop_token_ids": null, "user": null, "chat_template_kwargs": null, "model": null, "best_of": null, "functions": null})");
  ASSERT_OK(request);
  EXPECT_EQ(request->generation.sampling.temperature, 1.0F);
  EXPECT_EQ(request->generation.model, "");
}

TEST(ChatRequest, TakesDefaultsOfTheModelOnlyWhereTheRequestIsSilent) {
  SamplingDefaults defaults;
  defaults.temperature = 0.6;
  defaults.top_k = 20;
  defaults.top_p = 0.95;
  const auto silent = chat("{}", defaults), loud = chat(R"({"temperature": 0, "top_k": -1, "top_p": 1})", defaults);
  ASSERT_OK(silent);
  ASSERT_OK(loud);
  EXPECT_EQ(silent->generation.sampling.temperature, 0.6F);
  EXPECT_EQ(silent->generation.sampling.top_k, 20);
  EXPECT_EQ(silent->generation.sampling.top_p, 0.95F);
  EXPECT_EQ(loud->generation.sampling.temperature, 0.0F);
  EXPECT_EQ(loud->generation.sampling.top_k, 0) << "-1 switches it off";
  EXPECT_EQ(loud->generation.sampling.top_p, 1.0F);
}

TEST(ChatRequest, ReadsEveryField) {
  const auto request =
      chat(R"({"model": "m", "temperature": 0.5, "top_p": 0.9, "top_k": 7, "min_p": 0.1, "presence_penalty": 1, "frequency_penalty": -1,
    "repetition_penalty": 1.1, "seed": -3, "logit_bias": {"5": -100, "999": 2.5}, "min_tokens": 2, "max_tokens": 9.0, "n": 3, "stop": ["a", "b"],
    "stop_token_ids": [1, 2], "ignore_eos": true, "include_stop_str_in_output": true, "skip_special_tokens": false, "stream": true,
    "stream_options": {"include_usage": true, "continuous_usage_stats": true}, "return_token_ids": true, "priority": -5, "cache_salt": "salt",
    "logprobs": true, "top_logprobs": 20, "enable_thinking": false, "user": "u", "metadata": {}, "store": true, "unheard_of": [1]})");
  ASSERT_OK(request);
  const GenerationFields& fields = request->generation;
  EXPECT_EQ(fields.model, "m");
  EXPECT_EQ(fields.sampling.temperature, 0.5F);
  EXPECT_EQ(fields.sampling.top_k, 7);
  EXPECT_EQ(fields.sampling.min_p, 0.1F);
  EXPECT_EQ(fields.sampling.presence_penalty, 1.0F);
  EXPECT_EQ(fields.sampling.frequency_penalty, -1.0F);
  EXPECT_EQ(fields.sampling.repetition_penalty, 1.1F);
  EXPECT_EQ(fields.seed, static_cast<uint64_t>(-3));
  EXPECT_THAT(fields.sampling.logit_bias, ElementsAre(std::pair(5, -100.0F), std::pair(999, 2.5F)));
  EXPECT_EQ(fields.sampling.min_tokens, 2);
  EXPECT_EQ(request->max_tokens, 9);
  EXPECT_EQ(fields.n, 3);
  EXPECT_THAT(fields.stop, ElementsAre("a", "b"));
  EXPECT_THAT(fields.stop_token_ids, ElementsAre(1, 2));
  EXPECT_TRUE(fields.ignore_eos && fields.include_stop_str_in_output && !fields.skip_special_tokens && fields.stream &&
              fields.include_usage);
  EXPECT_TRUE(fields.continuous_usage_stats && fields.return_token_ids);
  EXPECT_EQ(fields.priority, -5);
  EXPECT_EQ(fields.cache_salt, "salt");
  EXPECT_TRUE(request->logprobs);
  EXPECT_EQ(request->top_logprobs, 20);
  EXPECT_EQ(request->conversation.template_kwargs, json(R"({"enable_thinking": false})"));
}

TEST(ChatRequest, NamesTheFieldThatIsWrong) {
  const Refusal refusals[] = {
      {R"({"temperature": "hot"})", "temperature", "expected a number, found a string"},
      {R"({"temperature": -0.1})", "temperature", "between 0 and 100"},
      {R"({"temperature": 1e300})", "temperature", "between 0 and 100"},
      {R"({"top_p": 0})", "top_p", "above 0"},
      {R"({"top_p": 1.01})", "top_p", "between 0 and 1"},
      {R"({"top_k": -2})", "top_k", "between -1 and"},
      {R"({"top_k": 1.5})", "top_k", "expected an integer"},
      {R"({"top_k": 1e30})", "top_k", "expected an integer"},
      {R"({"top_k": 18446744073709551615})", "top_k", "expected an integer"},
      {R"({"presence_penalty": 3})", "presence_penalty", "between -2 and 2"},
      {R"({"repetition_penalty": 0})", "repetition_penalty", "between"},
      {R"({"seed": "x"})", "seed", "expected an integer"},
      {R"({"seed": 1.5})", "seed", "expected an integer"},
      {R"({"max_tokens": 0})", "max_tokens", "between 1 and"},
      {R"({"max_tokens": -186})", "max_tokens", "between 1 and"},
      {R"({"max_completion_tokens": true})", "max_completion_tokens", "expected an integer, found a boolean"},
      {R"({"n": 0})", "n", "between 1 and 16"},
      {R"({"n": 17})", "n", "between 1 and 16"},
      {R"({"prompt_logprobs": -1})", "prompt_logprobs", "between 0 and 20"},
      {R"({"prompt_logprobs": 21})", "prompt_logprobs", "between 0 and 20"},
      {R"({"truncate_prompt_tokens": 0})", "truncate_prompt_tokens", "at least 1"},
      {R"({"truncate_prompt_tokens": -2})", "truncate_prompt_tokens", "between -1 and 4096"},
      {R"({"request_id": "a b"})", "request_id", "without spaces"},
      {R"({"request_id": "naïve"})", "request_id", "ASCII"},
      {R"({"stop": 5})", "stop", "expected a string or a list of strings"},
      {R"({"stop": ["a", 5]})", "stop", "found an integer in it"},
      {R"({"stop": ""})", "stop", "empty"},
      {R"({"stop": ["1","2","3","4","5","6","7","8","9","10","11","12","13","14","15","16","17"]})", "stop", "at most 16"},
      {R"({"stop_token_ids": [1000]})", "stop_token_ids", "between 0 and 999"},
      {R"({"logit_bias": {"1000": 1}})", "logit_bias", "below 1000"},
      {R"({"logit_bias": {"-1": 1}})", "logit_bias", "not a token id"},
      {R"({"logit_bias": {"1x": 1}})", "logit_bias", "not a token id"},
      {R"({"logit_bias": {"": 1}})", "logit_bias", "not a token id"},
      {R"({"logit_bias": {"1": 101}})", "logit_bias", "between -100 and 100"},
      {R"({"logit_bias": [1]})", "logit_bias", "expected an object"},
      {R"({"stream": 1})", "stream", "expected true or false"},
      {R"({"stream_options": {"include_usage": true}})", "stream_options", "only allowed with"},
      {R"({"stream": true, "stream_options": {"include_usage": 1}})", "stream_options", "include_usage"},
      {R"({"top_logprobs": 3})", "top_logprobs", "logprobs"},
      {R"({"logprobs": true, "top_logprobs": 21})", "top_logprobs", "between 0 and 20"},
      {R"({"logprobs": 5})", "logprobs", "expected true or false"},
      {R"({"min_tokens": 5, "max_tokens": 4})", "min_tokens", "more than max_tokens"},
      {R"({"messages": "hi"})", "messages", "expected a list, found a string"},
      {R"({"messages": []})", "messages", "empty"},
      {R"({"tool_choice": "maybe"})", "tool_choice", "auto"},
      {R"({"tool_choice": "required"})", "tool_choice", "needs tools"},
      {R"({"tool_choice": {"type": "function", "function": {"name": "f"}}})", "tool_choice", "no tool \"f\""},
      {R"({"tool_choice": {"type": "function"}, "tools": [{"function": {"name": "f"}}]})", "tool_choice", "expected"},
      {R"({"tools": [{"function": {}}]})", "tools[0].function.name", "expected a string"},
      {R"({"parallel_tool_calls": "no"})", "parallel_tool_calls", "true or false"},
      {R"({"chat_template_kwargs": []})", "chat_template_kwargs", "expected an object"},
      {R"({"enable_thinking": "no"})", "enable_thinking", "expected true or false"},
      {R"({"continue_final_message": true, "add_generation_prompt": true})", "continue_final_message", "cannot be true together"},
  };
  for (const Refusal& refusal : refusals) {
    const auto request = chat(refusal.body);
    ASSERT_FALSE(request) << refusal.body;
    EXPECT_EQ(request.error().code == ErrorCode::kInvalidArgument || request.error().code == ErrorCode::kUnsupported, true) << refusal.body;
    EXPECT_EQ(request.error().field, refusal.field) << refusal.body;
    EXPECT_THAT(request.error().message, HasSubstr(refusal.words)) << refusal.body;
    EXPECT_THAT(request.error().message, HasSubstr(refusal.field)) << refusal.body;
  }
}

TEST(ChatRequest, RefusesWhatItCannotKeepInsteadOfIgnoringIt) {
  const Refusal refusals[] = {
      {R"({"response_format": {"type": "xml"}})", "response_format", "only \"text\", \"json_object\""},
      {R"({"guided_whitespace_pattern": "x"})", "guided_whitespace_pattern", "not supported"},
      {R"({"structured_outputs": {"structural_tag": {}, "regex": "a"}})", "structured_outputs.structural_tag", "not supported"},
      {R"({"tool_choice": {"type": "custom"}})", "tool_choice", "only \"function\""},
      {R"({"tools": [{"type": "web_search"}]})", "tools[0].type", "only \"function\""},
      {R"({"best_of": 2})", "best_of", "only 1"},
      {R"({"use_beam_search": true})", "use_beam_search", "not supported"},
      {R"({"allowed_token_ids": [1]})", "allowed_token_ids", "logit_bias"},
      {R"({"bad_words": ["x"]})", "bad_words", "not supported"},
      {R"({"chat_template": "x"})", "chat_template", "not supported"},
      {R"({"documents": []})", "documents", "not supported"},
      {R"({"echo": true})", "echo", "/v1/completions"},
      {R"({"functions": []})", "functions", "use tools"},
      {R"({"modalities": ["text", "audio"]})", "modalities", "only text"},
  };
  for (const Refusal& refusal : refusals) {
    const auto request = chat(refusal.body);
    ASSERT_FALSE(request) << refusal.body;
    EXPECT_EQ(request.error().code, ErrorCode::kUnsupported) << refusal.body;
    EXPECT_EQ(request.error().field, refusal.field) << refusal.body;
    EXPECT_THAT(request.error().message, HasSubstr(refusal.words)) << refusal.body;
  }
  EXPECT_OK(chat(R"({"response_format": {"type": "text"}, "best_of": 1, "tool_choice": "auto", "modalities": ["text"]})"));
}

TEST(ChatRequest, SaysWhatIsWrongWithAFormat) {
  const Refusal refusals[] = {
      {R"({"response_format": {}})", "response_format.type", "has to be a string"},
      {R"({"response_format": {"type": "json_schema", "json_schema": {}}})", "response_format.json_schema.schema", "is required"},
      {R"({"response_format": {"type": "json_schema", "json_schema": {"schema": 3}}})", "response_format.json_schema.schema", "expected a JSON schema"},
      {R"({"guided_json": "{"})", "guided_json", "parse"},
      {R"({"guided_json": 3})", "guided_json", "expected a JSON schema"},
      {R"({"guided_regex": 3})", "guided_regex", "expected a string"},
      {R"({"guided_choice": []})", "guided_choice", "expected a list"},
      {R"({"guided_choice": ["a", ""]})", "guided_choice", "not empty"},
      {R"({"structured_outputs": {}})", "structured_outputs", "has none of"},
      {R"({"structured_outputs": {"json": {}, "regex": "a"}})", "structured_outputs", "several"},
      {R"({"guided_regex": "a", "response_format": {"type": "json_object"}})", "guided_regex", "stands beside response_format"},
  };
  for (const Refusal& refusal : refusals) {
    const auto request = chat(refusal.body);
    ASSERT_FALSE(request) << refusal.body;
    EXPECT_EQ(request.error().code, ErrorCode::kInvalidArgument) << refusal.body;
    EXPECT_EQ(request.error().field, refusal.field) << refusal.body;
    EXPECT_THAT(request.error().message, HasSubstr(refusal.words)) << refusal.body;
  }
}

TEST(ChatRequest, AnEffortOfNoneSwitchesThinkingOff) {
  EXPECT_EQ(chat(R"({"reasoning_effort": "none"})")->conversation.template_kwargs, json(R"({"reasoning_effort": "none", "enable_thinking": false})"));
  EXPECT_EQ(chat(R"({"reasoning_effort": "none", "enable_thinking": true})")->conversation.template_kwargs["enable_thinking"], true);
}

TEST(ChatRequest, KwargsWinOverTheirShortForms) {
  const auto request = chat(R"({"enable_thinking": true, "chat_template_kwargs": {"enable_thinking": false}, "reasoning_effort": "low"})");
  ASSERT_OK(request);
  EXPECT_EQ(request->conversation.template_kwargs, json(R"({"enable_thinking": false, "reasoning_effort": "low"})"));
}

TEST(CompletionRequest, TakesPromptsOfAllFourKinds) {
  const auto text = completion(R"({"prompt": "a"})"), texts = completion(R"({"prompt": ["a", "b"]})"),
             ids = completion(R"({"prompt": [1, 2]})"), lists = completion(R"({"prompt": [[1], [2, 3]]})");
  ASSERT_OK(text);
  ASSERT_OK(texts);
  ASSERT_OK(ids);
  ASSERT_OK(lists);
  EXPECT_THAT(text->prompts, ElementsAre(PromptInput("a")));
  EXPECT_THAT(texts->prompts, ElementsAre(PromptInput("a"), PromptInput("b")));
  EXPECT_THAT(ids->prompts, ElementsAre(PromptInput(std::vector<int32_t>{1, 2})));
  EXPECT_THAT(lists->prompts, ElementsAre(PromptInput(std::vector<int32_t>{1}), PromptInput(std::vector<int32_t>{2, 3})));
  EXPECT_EQ(text->max_tokens, 16);
  EXPECT_EQ(text->logprobs, -1);
}

TEST(CompletionRequest, NamesTheFieldThatIsWrong) {
  const Refusal refusals[] = {{R"({})", "prompt", "required"},
                              {R"({"prompt": null})", "prompt", "required"},
                              {R"({"prompt": []})", "prompt", "empty"},
                              {R"({"prompt": {}})", "prompt", "expected a string, a list"},
                              {R"({"prompt": [1, "a"]})", "prompt", "index 1"},
                              {R"({"prompt": [[1], 5]})", "prompt", "found an integer in the list"},
                              {R"({"prompt": [1000]})", "prompt", "below 1000"},
                              {R"({"prompt": [-1]})", "prompt", "below 1000"},
                              {R"({"prompt": [1e99]})", "prompt", "below 1000"},
                              {R"({"prompt": [1.5]})", "prompt", "below 1000"},
                              {R"({"prompt": "a", "max_tokens": -1})", "max_tokens", "between 0 and"},
                              {R"({"prompt": "a", "logprobs": true})", "logprobs", "expected an integer"},
                              {R"({"prompt": "a", "logprobs": 21})", "logprobs", "between 0 and 20"},
                              {R"({"prompt": "a", "echo": 1})", "echo", "expected true or false"},
                              {R"({"prompt": "a", "suffix": "b"})", "suffix", "fill in the middle"}};
  for (const Refusal& refusal : refusals) {
    const auto request = completion(refusal.body);
    ASSERT_FALSE(request) << refusal.body;
    EXPECT_EQ(request.error().field, refusal.field) << refusal.body;
    EXPECT_THAT(request.error().message, HasSubstr(refusal.words)) << refusal.body;
  }
  EXPECT_FALSE(parse_completion_request(json("[]"), {}, kLimits));
  EXPECT_FALSE(parse_chat_request(json("5"), {}, kLimits));
}

TEST(GenerationConfig, ReadsTheModelsOwnFile) {
  const auto config = read_generation_config(testing::data_path("qwen3.6-27b/generation_config.json"));
  ASSERT_OK(config);
  EXPECT_EQ(config->sampling.temperature, 1.0);
  EXPECT_EQ(config->sampling.top_k, 20);
  EXPECT_EQ(config->sampling.top_p, 0.95);
  EXPECT_THAT(config->eos_ids, ElementsAre(248046, 248044));
}

TEST(GenerationConfig, TakesOneEosIdAndSaysWhatIsWrong) {
  const auto one = parse_generation_config(json(R"({"eos_token_id": 7, "do_sample": false})"));
  ASSERT_OK(one);
  EXPECT_THAT(one->eos_ids, ElementsAre(7));
  EXPECT_EQ(one->sampling.temperature, 0.0);
  const auto wrong = parse_generation_config(json(R"({"top_k": "many"})"));
  ASSERT_FALSE(wrong);
  EXPECT_THAT(wrong.error().message, HasSubstr("generation_config.json: top_k"));
}

}  // namespace
}  // namespace quern::server
