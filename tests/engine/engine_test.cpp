#include "engine/engine.h"

#include <algorithm>
#include <atomic>
#include <memory>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "engine/running_engine.h"

namespace quern::engine {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using namespace testing;  // NOLINT(google-build-using-namespace): the fakes of this room

struct Mode {
  const char* name;
  int32_t steps_in_flight;
  bool own_thread;
  SpeculationMethod speculation = SpeculationMethod::kNone;
  bool cached = false;
  int32_t num_stages = 1;
};

/// Each test runs with synchronous steps, with two in flight, with workers on a thread of their own, and in pipelines; with and without prefix cache and
/// speculation.
class EngineWith : public ::testing::TestWithParam<Mode> {
 protected:
  /// Of one sequence.
  static int32_t steps_in_flight() { return GetParam().num_stages > 1 ? 1 : GetParam().steps_in_flight; }
  static EngineSetup setup() {
    EngineSetup setup;
    setup.options.steps_in_flight = GetParam().steps_in_flight;
    setup.workers = {.own_thread = GetParam().own_thread, .max_delay_us = 20, .max_steps_in_flight = GetParam().steps_in_flight};
    with_features(setup, GetParam().speculation, GetParam().cached);
    with_stages(setup, GetParam().num_stages);
    return setup;
  }
};
INSTANTIATE_TEST_SUITE_P(Modes, EngineWith,
                         ::testing::Values(Mode{"OneStepAtATime", 1, false}, Mode{"TwoStepsInFlight", 2, false},
                                           Mode{"TwoStepsOnAThread", 2, true}, Mode{"FourStepsOnAThread", 4, true},
                                           Mode{"CachedOneStepAtATime", 1, false, SpeculationMethod::kNone, true},
                                           Mode{"MtpTwoStepsInFlight", 2, false, SpeculationMethod::kMtp, true},
                                           Mode{"MtpFourStepsOnAThread", 4, true, SpeculationMethod::kMtp, true},
                                           Mode{"NgramTwoStepsInFlight", 2, false, SpeculationMethod::kNgram, true},
                                           Mode{"PipelineOfTwo", 2, false, SpeculationMethod::kNone, false, 2},
                                           Mode{"CachedPipelineOfFourOnThreads", 2, true, SpeculationMethod::kNone, true, 4},
                                           Mode{"MtpPipelineOfFour", 2, false, SpeculationMethod::kMtp, true, 4},
                                           Mode{"NgramPipelineOfTwoOnThreads", 2, true, SpeculationMethod::kNgram, true, 2}),
                         [](const auto& mode) { return mode.param.name; });

TEST_P(EngineWith, GivesTheModelsTokensExactlyUpToMaxTokens) {
  RunningEngine engine(setup());
  for (const int32_t prompt_tokens : {1, 2, 63, 64, 65, 127, 128, 129, 200, 500})
    for (const int32_t max_tokens : {1, 2, 70}) {
      SCOPED_TRACE(fmt::format("{} + {}", prompt_tokens, max_tokens));
      const std::vector<int32_t> prompt = make_prompt(prompt_tokens, 3);
      const TokenEvent all = read_all(*engine.submit(make_request(prompt, max_tokens)));
      EXPECT_EQ(all.tokens, engine.expected(prompt, max_tokens));
      EXPECT_EQ(all.finish->reason, FinishReason::kLength);
      EXPECT_EQ(all.finish->usage.prompt_tokens, prompt_tokens);
      EXPECT_EQ(all.finish->usage.completion_tokens, max_tokens);
      if (!GetParam().cached) {
        EXPECT_EQ(all.finish->usage.cached_tokens, 0);
      }
    }
  engine.expect_all_free();
  EXPECT_EQ(engine->stats().discarded_rows, 0u) << "max_tokens is known in advance";
}

TEST_P(EngineWith, ComputesOnlyThePromptWhenMaxTokensIsZero) {
  RunningEngine engine(setup());
  const TokenEvent all = read_all(*engine.submit(make_request(make_prompt(150, 1), 0)));
  EXPECT_THAT(all.tokens, IsEmpty());
  EXPECT_EQ(all.finish->reason, FinishReason::kLength);
  EXPECT_EQ(all.finish->usage.completion_tokens, 0);
  EXPECT_EQ(engine->stats().computed_rows, 150u);
}

TEST_P(EngineWith, TellsHowLongARequestWaitedAndHowManyRowsItsStepsHad) {
  EngineSetup one_at_a_time = setup();
  one_at_a_time.options.max_num_seqs = 1;
  RunningEngine engine(one_at_a_time);
  const auto first = engine.submit(make_request(make_prompt(100, 1), 60)), second = engine.submit(make_request(make_prompt(100, 2), 5));
  const TokenEvent end_of_first = read_all(*first), end_of_second = read_all(*second);
  EXPECT_GE(end_of_first.finish->queue_seconds, 0);
  EXPECT_GT(end_of_second.finish->queue_seconds, end_of_first.finish->queue_seconds) << "it waited for all steps of the first";
  const EngineStats stats = engine->stats();
  EXPECT_EQ(std::accumulate(stats.steps_by_rows.begin(), stats.steps_by_rows.end(), uint64_t{0}), stats.num_steps);
  EXPECT_GE(stats.steps_by_rows[5], 1u) << "the prompts: 65 to 128 rows";
}

// SAMP-64: neighbours with other seeds, or none, change nothing.
TEST_P(EngineWith, GivesEachRequestTheSameTextAloneAndInAnyCompanyAndOrder) {
  struct Case {
    std::vector<int32_t> prompt;
    SamplingParams sampling;
    int32_t max_tokens;
  };
  std::vector<Case> cases;
  for (uint64_t i = 0; i < 12; ++i) {
    Case c{make_prompt(static_cast<int32_t>(1 + i * 37 % 300), i), {}, static_cast<int32_t>(20 + i * 7)};
    c.sampling.seed = i;
    if (i % 3 == 0) c.sampling.frequency_penalty = 0.5f;
    if (i % 4 == 0) c.sampling.stop_ids = {static_cast<int32_t>(i), 100, 101, 102};
    if (i % 5 == 0) c.sampling.min_tokens = 15;
    cases.push_back(std::move(c));
  }
  RunningEngine engine(setup());
  std::vector<size_t> order(cases.size());
  for (size_t i = 0; i < order.size(); ++i) order[i] = i;
  for (int round = 0; round < 4; ++round) {
    std::vector<std::unique_ptr<RequestStream>> streams(cases.size());
    for (const size_t i : order) {
      GenerationRequest request = make_request(cases[i].prompt, cases[i].max_tokens);
      request.sampling = cases[i].sampling;
      streams[i] = engine.submit(std::move(request));
    }
    for (size_t i = 0; i < cases.size(); ++i)
      EXPECT_EQ(read_all(*streams[i]).tokens, engine.expected(cases[i].prompt, cases[i].max_tokens, cases[i].sampling))
          << "round " << round << ", case " << i;
    std::rotate(order.begin(), order.begin() + 5, order.end());
    std::reverse(order.begin(), order.begin() + 7);
  }
  engine.expect_all_free();
}

TEST_P(EngineWith, GivesTheSameTextWhetherOrNotRequestsWerePreempted) {
  EngineSetup tight = setup();
  tight.limits.num_blocks = 9;
  RunningEngine engine(tight);
  std::vector<std::unique_ptr<RequestStream>> streams;
  for (uint64_t i = 0; i < 8; ++i) {
    GenerationRequest request = make_request(make_prompt(static_cast<int32_t>(40 + 11 * i), i), 300);
    request.sampling.seed = i;
    if (i % 2 == 0) request.sampling.presence_penalty = 1.0f;
    if (i % 3 == 0) request.sampling.min_tokens = 290;
    if (i % 3 == 0) request.sampling.stop_ids = {1, 2, 3, 4, 5, 6, 7, 8};
    streams.push_back(engine.submit(std::move(request)));
  }
  for (uint64_t i = 0; i < 8; ++i) {
    SamplingParams sampling{.seed = i};
    if (i % 2 == 0) sampling.presence_penalty = 1.0f;
    if (i % 3 == 0) sampling.min_tokens = 290;
    if (i % 3 == 0) sampling.stop_ids = {1, 2, 3, 4, 5, 6, 7, 8};
    EXPECT_EQ(read_all(*streams[i]).tokens, engine.expected(make_prompt(static_cast<int32_t>(40 + 11 * i), i), 300, sampling)) << i;
  }
  engine.expect_all_free();
  EXPECT_GT(engine->stats().num_preemptions, 0u);
}

TEST_P(EngineWith, GoesOnWhenTheLargestRequestFillsAllBlocks) {
  EngineSetup tiny = setup();
  tiny.limits.num_blocks = 3;
  RunningEngine engine(tiny);
  std::vector<std::unique_ptr<RequestStream>> streams;
  for (uint64_t i = 0; i < 6; ++i) streams.push_back(engine.submit(make_request(make_prompt(10, i), 183)));
  for (uint64_t i = 0; i < 6; ++i) EXPECT_EQ(read_all(*streams[i]).tokens, engine.expected(make_prompt(10, i), 183)) << i;
  engine.expect_all_free();
}

// USAGE-70
TEST_P(EngineWith, EndsWithTheStopIdAndReportsNothingBehindIt) {
  RunningEngine engine(setup());
  const std::vector<int32_t> prompt = make_prompt(50, 8);
  const std::vector<int32_t> free_run = engine.expected(prompt, 60);
  GenerationRequest request = make_request(prompt, 60);
  request.sampling.stop_ids = {free_run[20]};
  const std::vector<int32_t> expected = engine.expected(prompt, 60, request.sampling);
  ASSERT_LT(expected.size(), 60u);
  const TokenEvent all = read_all(*engine.submit(std::move(request)));
  EXPECT_EQ(all.tokens, expected);
  EXPECT_EQ(all.finish->reason, FinishReason::kStop);
  EXPECT_EQ(all.finish->stop_token, free_run[20]);
  EXPECT_EQ(all.finish->usage.completion_tokens, static_cast<int32_t>(expected.size()));
  engine.expect_all_free();
  const EngineStats stats = engine->stats();
  EXPECT_EQ(stats.generation_tokens, expected.size());
  EXPECT_EQ(stats.requests_stop, 1u);
  if (GetParam().speculation != SpeculationMethod::kNone) return;  // how many rows a step has depends on the drafts
  EXPECT_EQ(stats.discarded_rows, static_cast<uint64_t>(steps_in_flight() - 1))
      << "rows that were enqueued before the end was known";
  EXPECT_EQ(stats.computed_rows, 50 + expected.size() - 1 + stats.discarded_rows);
}

TEST_P(EngineWith, PrefersTheStopIdToTheLengthWhenBothEndAtTheSameToken) {
  RunningEngine engine(setup());
  const std::vector<int32_t> prompt = make_prompt(50, 8);
  GenerationRequest request = make_request(prompt, 5);
  request.sampling.stop_ids = {engine.expected(prompt, 5)[4]};
  EXPECT_EQ(read_all(*engine.submit(std::move(request))).finish->reason, FinishReason::kStop);
}

TEST_P(EngineWith, CancelsARequestThatWaits) {
  EngineSetup one = setup();
  one.limits.num_slots = 1;
  RunningEngine engine(one);
  engine.control().hold();
  const auto runs = engine.submit(make_request(make_prompt(10, 1), 5));
  const auto waits = engine.submit(make_request(make_prompt(10, 2), 5));
  waits->cancel();
  engine.control().open();
  EXPECT_EQ(read_all(*waits).finish->reason, FinishReason::kCancelled);
  EXPECT_EQ(read_all(*runs).tokens, engine.expected(make_prompt(10, 1), 5));
  engine.expect_all_free();
  EXPECT_EQ(engine->stats().requests_cancelled, 1u);
}

TEST_P(EngineWith, CancelsARequestDuringItsPromptWithoutHarmToOthers) {
  RunningEngine engine(setup());
  engine.control().hold();
  const auto cancelled = engine.submit(make_request(make_prompt(900, 1), 5));
  engine.control().wait_for_submitted(1);
  const auto other = engine.submit(make_request(make_prompt(300, 2), 80));
  cancelled->cancel();
  engine.control().open();
  const TokenEvent end = read_all(*cancelled);
  EXPECT_EQ(end.finish->reason, FinishReason::kCancelled);
  EXPECT_THAT(end.tokens, IsEmpty());
  EXPECT_EQ(read_all(*other).tokens, engine.expected(make_prompt(300, 2), 80));
  engine.expect_all_free();
  EXPECT_LT(engine->stats().computed_rows, 900u + 380u) << "the rest of the prompt was not computed";
}

// CANCEL-74
TEST_P(EngineWith, CancelsARequestThatDecodes) {
  RunningEngine engine(setup());
  engine.control().hold();
  engine.control().release(3);
  const auto stream = engine.submit(make_request(make_prompt(10, 1), 1000));
  stream->next();
  stream->cancel();
  engine.control().open();
  const TokenEvent end = read_all(*stream);
  EXPECT_EQ(end.finish->reason, FinishReason::kCancelled);
  EXPECT_THAT(end.tokens, IsEmpty());
  EXPECT_EQ(read_all(*engine.submit(make_request(make_prompt(10, 2), 30))).tokens, engine.expected(make_prompt(10, 2), 30));
  engine.expect_all_free();
}

TEST_P(EngineWith, CancelsWhenTheStreamIsDestroyed) {
  RunningEngine engine(setup());
  engine.control().hold();
  for (uint64_t i = 0; i < 10; ++i) engine.submit(make_request(make_prompt(100, i), 500)).reset();
  engine.control().open();
  EXPECT_EQ(read_all(*engine.submit(make_request(make_prompt(10, 2), 30))).tokens, engine.expected(make_prompt(10, 2), 30));
  engine.expect_all_free();
  EXPECT_EQ(engine->stats().requests_cancelled, 10u);
}

// CANCEL-77
TEST_P(EngineWith, IgnoresNewsOfRequestsThatAreGone) {
  RunningEngine engine(setup());
  const auto stream = engine.submit(make_request(make_prompt(10, 1), 2));
  read_all(*stream);
  stream->cancel();
  stream->stop_at(1);
  EXPECT_EQ(read_all(*engine.submit(make_request(make_prompt(10, 2), 3))).tokens.size(), 3u);
}

// USAGE-70
TEST_P(EngineWith, EndsWhereAStopStringMatchedAndCountsUsageToThere) {
  RunningEngine engine(setup());
  engine.control().hold();
  engine.control().release(7);  // the prompt and six tokens more: the request is far from its end when the match is told
  const std::vector<int32_t> prompt = make_prompt(30, 4);
  const auto stream = engine.submit(make_request(prompt, 900));
  std::vector<int32_t> tokens;
  while (tokens.size() < 7) {
    const TokenEvent event = stream->next();
    tokens.insert(tokens.end(), event.tokens.begin(), event.tokens.end());
  }
  stream->stop_at(5);
  engine.control().open();
  const TokenEvent end = read_all(*stream);
  EXPECT_THAT(end.tokens, IsEmpty());
  EXPECT_EQ(end.finish->reason, FinishReason::kStop);
  EXPECT_EQ(end.finish->usage.completion_tokens, 5);
  engine.expect_all_free();
  EXPECT_EQ(engine->stats().generation_tokens, 5u);
}

TEST_P(EngineWith, EndsAtAStopThatIsStillAhead) {
  RunningEngine engine(setup());
  engine.control().hold();
  const std::vector<int32_t> prompt = make_prompt(30, 4);
  const auto stream = engine.submit(make_request(prompt, 900));
  stream->stop_at(9);
  engine.control().open();
  const TokenEvent all = read_all(*stream);
  EXPECT_EQ(all.tokens, engine.expected(prompt, 9));
  EXPECT_EQ(all.finish->reason, FinishReason::kStop);
  EXPECT_EQ(all.finish->usage.completion_tokens, 9);
}

TEST_P(EngineWith, FailsOnlyTheRequestWhoseLogitsAreNotFinite) {
  EngineSetup broken = setup();
  std::vector<int32_t> sick = make_prompt(30, 4), healthy = make_prompt(30, 5);
  sick[0] = 77;
  healthy[0] = 78;
  broken.workers.non_finite = {77, 6};
  RunningEngine engine(broken);
  const auto first = engine.submit(make_request(sick, 50));
  const auto second = engine.submit(make_request(healthy, 50));
  const TokenEvent all = read_all(*first);
  const std::vector<int32_t> before = engine.expected(sick, 6);
  if (GetParam().speculation == SpeculationMethod::kNone) {
    EXPECT_EQ(all.tokens, before);
  } else {  // tokens of the verify that failed are not told
    ASSERT_LE(all.tokens.size(), before.size());
    EXPECT_TRUE(std::equal(all.tokens.begin(), all.tokens.end(), before.begin()));
  }
  ASSERT_EQ(all.finish->reason, FinishReason::kError);
  EXPECT_EQ(all.finish->error->code, ErrorCode::kInternal);
  EXPECT_THAT(all.finish->error->message, HasSubstr(fmt::format("non-finite logits at token {}", all.tokens.size() + 1)));
  EXPECT_EQ(read_all(*second).tokens, engine.expected(healthy, 50));
  EXPECT_FALSE(engine->failure().has_value());
  engine.expect_all_free();
  EXPECT_EQ(engine->stats().requests_error, 1u);
}

TEST_P(EngineWith, TellsEveryRequestWhenTheDeviceFailsAndTakesNoMore) {
  EngineSetup broken = setup();
  broken.workers.failing_step = 5;
  RunningEngine engine(broken);
  engine.control().hold();
  std::vector<std::unique_ptr<RequestStream>> streams;
  for (uint64_t i = 0; i < 6; ++i) streams.push_back(engine.submit(make_request(make_prompt(100, i), 100)));  // two of them wait
  engine.control().open();
  for (const auto& stream : streams) {
    const TokenEvent all = read_all(*stream);
    ASSERT_EQ(all.finish->reason, FinishReason::kError);
    EXPECT_EQ(all.finish->error->message, "the device fell off the bus");
  }
  ASSERT_TRUE(engine->failure().has_value());
  EXPECT_EQ(engine->failure()->message, "the device fell off the bus");
  const auto refused = engine->submit(make_request(make_prompt(10, 1), 5));
  ASSERT_FALSE(refused.has_value());
  EXPECT_EQ(refused.error().code, ErrorCode::kUnavailable);
  engine.expect_all_free();
}

TEST_P(EngineWith, RefusesWhatCanNeverRun) {
  RunningEngine engine(setup());
  const auto refused = engine->submit(make_request(make_prompt(1024, 1), 1));
  ASSERT_FALSE(refused.has_value());
  EXPECT_EQ(refused.error().code, ErrorCode::kInvalidArgument);
  EXPECT_EQ(engine->stats().num_steps, 0u);
}

TEST_P(EngineWith, RefusesRequestsBeyondTheQueue) {
  EngineSetup small = setup();
  small.limits.num_slots = 2;
  small.options.max_queue_len = 3;
  RunningEngine engine(small);
  engine.control().hold();
  std::vector<std::unique_ptr<RequestStream>> streams;
  for (uint64_t i = 0; i < 5; ++i) streams.push_back(engine.submit(make_request(make_prompt(10, i), 5)));
  const auto refused = engine->submit(make_request(make_prompt(10, 9), 5));
  ASSERT_FALSE(refused.has_value());
  EXPECT_EQ(refused.error().code, ErrorCode::kResourceExhausted);
  engine.control().open();
  for (uint64_t i = 0; i < 5; ++i) EXPECT_EQ(read_all(*streams[i]).tokens, engine.expected(make_prompt(10, i), 5));
  EXPECT_OK(engine->submit(make_request(make_prompt(10, 9), 5)));
}

TEST_P(EngineWith, FinishesWhatRunsWhenItDrains) {
  RunningEngine engine(setup());
  std::vector<std::unique_ptr<RequestStream>> streams;
  for (uint64_t i = 0; i < 6; ++i) streams.push_back(engine.submit(make_request(make_prompt(100, i), 50)));
  engine->drain(int64_t{3600} * 1000);
  EXPECT_EQ(engine->submit(make_request(make_prompt(10, 1), 5)).error().code, ErrorCode::kUnavailable);
  for (uint64_t i = 0; i < 6; ++i) {
    const std::optional<TokenEvent> all = streams[i]->try_next();
    ASSERT_TRUE(all.has_value());
    EXPECT_EQ(all->tokens, engine.expected(make_prompt(100, i), 50));
  }
}

TEST_P(EngineWith, CancelsWhatIsLeftWhenTheTimeToDrainIsOver) {
  EngineSetup long_window = setup();
  long_window.limits.max_model_len = 20000;
  long_window.limits.num_blocks = 320;
  RunningEngine engine(long_window);
  engine.control().hold();
  const auto stream = engine.submit(make_request(make_prompt(100, 1), 19000));
  engine.control().wait_for_submitted(1);
  std::jthread drain([&] { engine->drain(0); });
  while (engine->submit(make_request(make_prompt(10, 1), 5)).has_value()) {
  }  // until it drains
  engine.control().open();
  drain.join();
  EXPECT_EQ(read_all(*stream).finish->reason, FinishReason::kCancelled);
  engine.expect_all_free();
}

TEST_P(EngineWith, CancelsRunningRequestsWhenItEndsAndStreamsLiveOn) {
  EngineSetup large = setup();
  large.limits.max_model_len = 100000;  // none is near its end when the engine goes
  large.limits.num_blocks = 2000;
  RunningEngine engine(large);
  std::vector<std::unique_ptr<RequestStream>> streams;
  for (uint64_t i = 0; i < 6; ++i) streams.push_back(engine.submit(make_request(make_prompt(100, i), 90000)));
  streams[0]->next();
  engine.stop();
  for (const auto& stream : streams) EXPECT_EQ(read_all(*stream).finish->reason, FinishReason::kCancelled);
  streams[0]->cancel();
  streams[1]->stop_at(3);
}

TEST_P(EngineWith, ReturnsLogprobsOfPromptAndOutputEachWithItsOwnNumber) {
  RunningEngine engine(setup());
  const std::vector<int32_t> prompt = make_prompt(150, 6);
  GenerationRequest request = make_request(prompt, 5);
  request.sampling.num_logprobs = 2;
  request.prompt_logprobs = 4;
  const TokenEvent all = read_all(*engine.submit(std::move(request)));
  ASSERT_EQ(all.tokens, engine.expected(prompt, 5));
  ASSERT_EQ(all.prompt_logprobs.size(), 149u);
  ASSERT_EQ(all.logprobs.size(), 5u);
  uint64_t state = FakeModel::kEmptyState;
  for (size_t i = 0; i < prompt.size(); ++i) {
    state = FakeModel::grow(state, prompt[i]);
    if (i + 1 == prompt.size()) break;
    const TokenLogprobs expected = engine.model().logprobs(state, prompt[i + 1], 4);
    EXPECT_EQ(all.prompt_logprobs[i].chosen, expected.chosen) << i;
    EXPECT_EQ(all.prompt_logprobs[i].top, expected.top) << i;
  }
  for (size_t i = 0; i < 5; ++i) {
    const TokenLogprobs expected = engine.model().logprobs(state, all.tokens[i], 2);
    EXPECT_EQ(all.logprobs[i].chosen, expected.chosen) << i;
    EXPECT_EQ(all.logprobs[i].top, expected.top) << i;
    state = FakeModel::grow(state, all.tokens[i]);
  }
}

TEST_P(EngineWith, ReturnsPromptLogprobsWithoutAnyOutput) {
  RunningEngine engine(setup());
  GenerationRequest request = make_request(make_prompt(150, 6), 0);
  request.prompt_logprobs = 0;
  const TokenEvent all = read_all(*engine.submit(std::move(request)));
  EXPECT_EQ(all.prompt_logprobs.size(), 149u);
  EXPECT_THAT(all.logprobs, IsEmpty());
  EXPECT_EQ(all.finish->reason, FinishReason::kLength);
}

/// Allows tokens t with (t + number of tokens so far) % 3 == 0 or, every fifth time, all; complete after `length` tokens.
class EveryThird final : public TokenConstraint {
 public:
  EveryThird(int32_t vocab_size, int32_t length) : vocab_size_(vocab_size), length_(length) {}
  static bool allows(int32_t token, int32_t num_tokens) { return num_tokens % 5 == 4 || (token + num_tokens) % 3 == 0; }
  bool fill_mask(std::span<uint32_t> mask) override {
    if (num_tokens_ % 5 == 4) return false;
    for (int32_t t = 0; t < vocab_size_; ++t)
      if (allows(t, num_tokens_)) mask[static_cast<size_t>(t / 32)] |= 1u << (t % 32);
    return true;
  }
  bool accept(int32_t token) override { return allows(token, num_tokens_++); }
  void rollback(int32_t num_tokens) override { num_tokens_ -= num_tokens; }
  [[nodiscard]] bool finished() const override { return num_tokens_ == length_; }

 private:
  const int32_t vocab_size_, length_;
  int32_t num_tokens_ = 0;
};

TEST_P(EngineWith, DrawsEachTokenUnderTheMaskThatTheTokensBeforeItLeave) {
  EngineSetup tight = setup();
  tight.limits.num_blocks = 10;
  RunningEngine engine(tight);
  std::vector<std::unique_ptr<RequestStream>> streams;
  for (uint64_t i = 0; i < 6; ++i) {
    GenerationRequest request = make_request(make_prompt(60, i), 200);
    if (i % 2 == 0) request.constraint = std::make_unique<EveryThird>(engine.model().vocab_size(), i == 0 ? 40 : 1000);
    streams.push_back(engine.submit(std::move(request)));
  }
  for (uint64_t i = 0; i < 6; ++i) {
    const TokenEvent all = read_all(*streams[i]);
    EXPECT_EQ(all.finish->reason, i == 0 ? FinishReason::kStop : FinishReason::kLength) << i;
    ASSERT_EQ(all.tokens.size(), i == 0 ? 40u : 200u) << i;
    if (i % 2 == 1) {
      EXPECT_EQ(all.tokens, engine.expected(make_prompt(60, i), 200)) << i;
      continue;
    }
    uint64_t state = FakeModel::kEmptyState;
    for (const int32_t token : make_prompt(60, i)) state = FakeModel::grow(state, token);
    std::vector<int32_t> expected;
    for (int32_t n = 0; n < static_cast<int32_t>(all.tokens.size()); ++n) {
      expected.push_back(engine.model().next(state, {SamplingParams{}, {}, expected}, [n](int32_t t) { return EveryThird::allows(t, n); }));
      state = FakeModel::grow(state, expected.back());
    }
    EXPECT_EQ(all.tokens, expected) << i;
  }
  engine.expect_all_free();
  EXPECT_GT(engine->stats().num_preemptions, 0u);
}

/// Allows every token, but does not take `stop`, which ends the output. Counts what it holds.
class TakesAllButTheStop final : public TokenConstraint {
 public:
  TakesAllButTheStop(int32_t stop, std::shared_ptr<std::atomic<int32_t>> held) : stop_(stop), held_(std::move(held)) {}
  bool fill_mask(std::span<uint32_t>) override { return false; }
  bool accept(int32_t token) override {
    if (token == stop_) return false;
    ++*held_;
    return true;
  }
  void rollback(int32_t num_tokens) override { *held_ -= num_tokens; }
  [[nodiscard]] bool finished() const override { return false; }

 private:
  const int32_t stop_;
  const std::shared_ptr<std::atomic<int32_t>> held_;
};

TEST_P(EngineWith, TakesBackOnlyTheDraftsThatAConstraintTook) {
  RunningEngine engine(setup());
  for (uint64_t seed = 0; seed < 6; ++seed) {
    const std::vector<int32_t> prompt = make_prompt(60, seed), expected = engine.expected(prompt, 150);
    size_t end = 100;
    while (std::find(expected.begin(), expected.begin() + static_cast<std::ptrdiff_t>(end), expected[end]) != expected.begin() + static_cast<std::ptrdiff_t>(end)) --end;
    const auto held = std::make_shared<std::atomic<int32_t>>(0);
    GenerationRequest request = make_request(prompt, 150);
    request.sampling.stop_ids = {expected[end]};
    request.constraint = std::make_unique<TakesAllButTheStop>(expected[end], held);
    const TokenEvent all = read_all(*engine.submit(std::move(request)));
    EXPECT_EQ(all.finish->reason, FinishReason::kStop);
    EXPECT_EQ(all.tokens.size(), end + 1);
    EXPECT_EQ(*held, static_cast<int32_t>(end));
  }
  engine.expect_all_free();
}

TEST_P(EngineWith, CancelsARequestWhoseMaskIsAwaited) {
  RunningEngine engine(setup());
  engine.control().hold();
  GenerationRequest request = make_request(make_prompt(60, 1), 200);
  request.constraint = std::make_unique<EveryThird>(engine.model().vocab_size(), 1000);
  const auto stream = engine.submit(std::move(request));
  const bool one_step = GetParam().speculation == SpeculationMethod::kNgram;  // its next step waits for tokens
  engine.control().wait_for_submitted(one_step ? 1 : static_cast<uint64_t>(steps_in_flight()));
  stream->cancel();
  engine.control().open();
  EXPECT_EQ(read_all(*stream).finish->reason, FinishReason::kCancelled);
  engine.expect_all_free();
}

TEST_P(EngineWith, CountsAFinishBeforeItsEventArrives) {
  RunningEngine engine(setup());
  for (uint64_t i = 1; i <= 20; ++i) {
    read_all(*engine.submit(make_request(make_prompt(10, i), 3)));
    const EngineStats stats = engine->stats();
    EXPECT_EQ(stats.requests_length, i);
    EXPECT_EQ(stats.prompt_tokens, 10 * i);
    EXPECT_EQ(stats.generation_tokens, 3 * i);
    EXPECT_EQ(stats.num_running, 0);
  }
}

TEST_P(EngineWith, WakesTheConsumerForEveryEvent) {
  RunningEngine engine(setup());
  const std::vector<int32_t> prompt = make_prompt(10, 1);
  engine.control().hold();
  const auto stream = engine.submit(make_request(prompt, 40));
  std::vector<int32_t> tokens;
  std::atomic<bool> finished = false;
  stream->on_event([&] {
    while (const auto event = stream->try_next()) {
      tokens.insert(tokens.end(), event->tokens.begin(), event->tokens.end());
      if (event->finish) finished = true;
    }
    finished.notify_all();
  });
  engine.control().open();
  finished.wait(false);
  EXPECT_EQ(tokens, engine.expected(prompt, 40));
}

TEST(Engine, EnqueuesTheNextStepBeforeTheLastOnesTokensArrive) {
  EngineSetup setup;
  setup.workers.own_thread = true;
  RunningEngine engine(setup);
  engine.control().hold();
  const auto stream = engine.submit(make_request(make_prompt(10, 1), 5));
  engine.control().wait_for_submitted(2);  // would wait for ever otherwise
  const std::vector<worker::StepPlan> plans = engine.control().plans();
  EXPECT_THAT(plans[1].runs[0].tokens, IsEmpty());
  EXPECT_FALSE(stream->try_next().has_value());
}

TEST(Engine, LetsARequestIntoAPipelineWhoseFirstStageIsFree) {
  EngineSetup setup;
  setup.workers.own_thread = true;
  with_stages(setup, 2);
  RunningEngine engine(setup);
  engine.control().hold();
  const auto first = engine.submit(make_request(make_prompt(10, 1), 5));
  engine.control().wait_for_submitted(1);
  const auto second = engine.submit(make_request(make_prompt(10, 2), 5));
  engine.control().wait_for_submitted(2);  // would wait for ever otherwise: the first step is not over
  engine.control().open();
  EXPECT_EQ(read_all(*first).tokens, engine.expected(make_prompt(10, 1), 5));
  EXPECT_EQ(read_all(*second).tokens, engine.expected(make_prompt(10, 2), 5));
}

TEST(Engine, PreemptsAndResumesWhileStepsAreInFlight) {
  EngineSetup setup;
  setup.limits.num_blocks = 6;
  setup.workers.own_thread = true;
  RunningEngine engine(setup);
  const auto first = engine.submit(make_request(make_prompt(60, 1), 250));
  const auto second = engine.submit(make_request(make_prompt(60, 2), 250));
  EXPECT_EQ(read_all(*first).tokens, engine.expected(make_prompt(60, 1), 250));
  EXPECT_EQ(read_all(*second).tokens, engine.expected(make_prompt(60, 2), 250));
  EXPECT_GT(engine->stats().num_preemptions, 0u);
  int num_replays = 0;
  for (const worker::StepPlan& plan : engine.control().plans())
    for (const worker::StepRun& run : plan.runs) num_replays += run.kind == worker::RowKind::kDecode && !run.tokens.empty();
  EXPECT_GE(num_replays, 2) << "one up to the boundary and one behind it";
  engine.expect_all_free();
}

TEST(Engine, LowersMaxNumSeqsToTheSlotsAndServes) {
  EngineSetup setup;
  setup.options.max_num_seqs = 1024;
  RunningEngine engine(setup);
  EXPECT_EQ(read_all(*engine.submit(make_request(make_prompt(10, 1), 5))).tokens.size(), 5u);
}

TEST(Engine, RunsNoMoreSequencesThanAsked) {
  EngineSetup setup;
  setup.options.max_num_seqs = 2;
  RunningEngine engine(setup);
  std::vector<std::unique_ptr<RequestStream>> streams;
  for (uint64_t i = 0; i < 8; ++i) streams.push_back(engine.submit(make_request(make_prompt(20, i), 10)));
  for (const auto& stream : streams) read_all(*stream);
  for (const worker::StepPlan& plan : engine.control().plans()) EXPECT_LE(plan.runs.size(), 2u);
}

TEST(Engine, SleepsWhenNothingIsAsked) {
  RunningEngine engine;
  read_all(*engine.submit(make_request(make_prompt(20, 1), 10)));
  engine.expect_all_free();
  const EngineStats before = engine->stats();
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  EXPECT_EQ(engine->stats().num_steps, before.num_steps);
  EXPECT_EQ(engine->stats().host_seconds, before.host_seconds);
}

}  // namespace
}  // namespace quern::engine
