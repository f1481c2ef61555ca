#include "engine/check_request.h"

#include <limits>

#include "engine/running_engine.h"
#include "ops/sample.h"

namespace quern::engine {
namespace {

using ::testing::HasSubstr;
using testing::make_prompt;
using testing::make_request;
using testing::small_limits;

Error refusal(const GenerationRequest& request, const worker::WorkerLimits& limits = small_limits()) {
  Result<void> checked = check_request(request, limits);
  EXPECT_FALSE(checked.has_value());
  return checked ? Error{} : checked.error();
}

TEST(CheckRequest, TakesWhatFillsTheWindowExactly) { EXPECT_OK(check_request(make_request(make_prompt(1000, 1), 24), small_limits())); }

TEST(CheckRequest, NamesAllThreeNumbersOfAPromptOverTheWindow) {
  const Error error = refusal(make_request(make_prompt(1100, 1), 16));
  EXPECT_EQ(error.code, ErrorCode::kInvalidArgument);
  EXPECT_EQ(error.field, "prompt");
  EXPECT_THAT(error.message, HasSubstr("maximum context length is 1024 tokens"));
  EXPECT_THAT(error.message, HasSubstr("1100 in the prompt and 16 for the completion"));
}

TEST(CheckRequest, BlamesMaxTokensWhenThePromptAloneWouldFit) {
  const Error error = refusal(make_request(make_prompt(1000, 1), 25));
  EXPECT_EQ(error.field, "max_tokens");
  EXPECT_THAT(error.message, HasSubstr("1000 in the prompt and 25 for the completion"));
}

TEST(CheckRequest, RefusesWhatAllBlocksTogetherCannotHold) {
  worker::WorkerLimits limits = small_limits();
  limits.num_blocks = 3;
  EXPECT_OK(check_request(make_request(make_prompt(100, 1), 93), limits));  // the last token is not fed back: 192 rows
  const Error error = refusal(make_request(make_prompt(100, 1), 94), limits);
  EXPECT_EQ(error.code, ErrorCode::kInvalidArgument);
  EXPECT_THAT(error.message, HasSubstr("4 KV blocks"));
}

TEST(CheckRequest, RefusesAnEmptyPrompt) { EXPECT_EQ(refusal(make_request({}, 5)).field, "prompt"); }

TEST(CheckRequest, RefusesIdsOutsideTheVocabulary) {
  EXPECT_THAT(refusal(make_request({1, 211}, 5)).message, HasSubstr("token 1 of the prompt is 211"));
  EXPECT_EQ(refusal(make_request({-1}, 5)).code, ErrorCode::kInvalidArgument);
  GenerationRequest biased = make_request({1}, 5);
  biased.sampling.logit_bias = {{211, 1.0f}};
  EXPECT_EQ(refusal(biased).field, "logit_bias");
}

TEST(CheckRequest, RefusesNegativeMaxTokensAndSurvivesTheLargest) {
  EXPECT_EQ(refusal(make_request({1}, -186)).field, "max_tokens");
  EXPECT_EQ(refusal(make_request({1}, std::numeric_limits<int32_t>::max())).field, "max_tokens");
}

TEST(CheckRequest, RefusesNumbersThatSamplersCannotUse) {
  const auto field_of = [](auto change) {
    GenerationRequest request = make_request({1}, 5);
    change(request);
    return refusal(request).field;
  };
  const float nan = std::numeric_limits<float>::quiet_NaN();
  EXPECT_EQ(field_of([&](auto& r) { r.sampling.temperature = nan; }), "temperature");
  EXPECT_EQ(field_of([](auto& r) { r.sampling.temperature = -0.5f; }), "temperature");
  EXPECT_EQ(field_of([](auto& r) { r.sampling.top_p = 0; }), "top_p");
  EXPECT_EQ(field_of([](auto& r) { r.sampling.top_p = 1.5f; }), "top_p");
  EXPECT_EQ(field_of([](auto& r) { r.sampling.top_k = -2; }), "top_k");
  EXPECT_EQ(field_of([](auto& r) { r.sampling.min_p = -0.1f; }), "min_p");
  EXPECT_EQ(field_of([](auto& r) { r.sampling.repetition_penalty = 0; }), "repetition_penalty");
  EXPECT_EQ(field_of([&](auto& r) { r.sampling.frequency_penalty = nan; }), "frequency_penalty");
  EXPECT_EQ(field_of([](auto& r) { r.sampling.min_tokens = -1; }), "min_tokens");
}

TEST(CheckRequest, HasTheLimitsOfTheSamplersTables) {
  GenerationRequest request = make_request({1}, 5);
  request.sampling.stop_ids.assign(ops::kMaxStopIds, 3);
  request.sampling.logit_bias.assign(ops::kMaxLogitBias, {3, 1.0f});
  request.sampling.num_logprobs = request.prompt_logprobs = ops::kMaxLogprobs;
  EXPECT_OK(check_request(request, small_limits()));
  GenerationRequest more = make_request({1}, 5);
  more.sampling.stop_ids.assign(ops::kMaxStopIds + 1, 3);
  EXPECT_EQ(refusal(more).field, "stop_token_ids");
  more.sampling.stop_ids.clear();
  more.sampling.logit_bias.assign(ops::kMaxLogitBias + 1, {3, 1.0f});
  EXPECT_EQ(refusal(more).field, "logit_bias");
  more.sampling.logit_bias.clear();
  more.sampling.num_logprobs = ops::kMaxLogprobs + 1;
  EXPECT_EQ(refusal(more).field, "logprobs");
  more.sampling.num_logprobs = -1;
  more.prompt_logprobs = ops::kMaxLogprobs + 1;
  EXPECT_EQ(refusal(more).field, "prompt_logprobs");
}

}  // namespace
}  // namespace quern::engine
