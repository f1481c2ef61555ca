// What the engine resumes from, told by the workers' count of computed rows.

#include "engine/prefix_cache.h"

#include <string>
#include <utility>
#include <vector>

#include "engine/running_engine.h"

namespace quern::engine {
namespace {

using namespace testing;  // NOLINT(google-build-using-namespace): the fakes of this room

EngineSetup cached_setup(int32_t steps_in_flight = 2, int32_t num_snapshots = 12) {
  EngineSetup setup;
  setup.limits.num_snapshots = num_snapshots;
  setup.options.steps_in_flight = steps_in_flight;
  setup.workers.max_steps_in_flight = steps_in_flight;
  return setup;
}

struct Answer {
  std::vector<int32_t> whole;  // prompt and output
  int32_t cached = 0;
  int64_t computed = 0;  // rows
};

/// One request after the other; every text is checked.
class Conversation {
 public:
  explicit Conversation(const EngineSetup& setup = cached_setup()) : engine_(setup) {}

  Answer ask(std::vector<int32_t> prompt, int32_t max_tokens, std::vector<int32_t> hints = {}, std::string salt = {}) {
    GenerationRequest request = make_request(std::move(prompt), max_tokens);
    request.cut_hints = std::move(hints);
    request.cache_salt = std::move(salt);
    return ask(std::move(request));
  }
  Answer ask(GenerationRequest request) {
    const std::vector<int32_t> prompt = request.prompt, expected = engine_.expected(prompt, request.max_tokens, request.sampling);
    const uint64_t before = settled().computed_rows;
    const TokenEvent all = read_all(*engine_.submit(std::move(request)));
    EXPECT_EQ(all.tokens, expected);
    Answer answer{.whole = prompt, .cached = all.finish->usage.cached_tokens};
    answer.whole.insert(answer.whole.end(), all.tokens.begin(), all.tokens.end());
    const EngineStats stats = settled();
    answer.computed = static_cast<int64_t>(stats.computed_rows - stats.discarded_rows - (before - discarded_));
    discarded_ = stats.discarded_rows;
    return answer;
  }
  /// Once no step is under way any more.
  EngineStats settled() {
    EngineStats stats = engine_->stats();
    while (stats.num_free_slots != stats.num_slots) stats = engine_->stats();
    return stats;
  }
  RunningEngine& engine() { return engine_; }

 private:
  RunningEngine engine_;
  uint64_t discarded_ = 0;
};

std::vector<int32_t> operator+(std::vector<int32_t> a, const std::vector<int32_t>& b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}

TEST(PrefixCache, AConversationComputesOnlyWhatIsNew) {
  for (const int32_t steps_in_flight : {1, 2, 4}) {
    SCOPED_TRACE(steps_in_flight);
    Conversation chat(cached_setup(steps_in_flight));
    std::vector<int32_t> history;
    for (uint64_t turn = 0; turn < 8; ++turn) {
      const std::vector<int32_t> prompt = history + make_prompt(20 + static_cast<int32_t>(turn * 7), turn);
      const Answer answer = chat.ask(prompt, 37);
      const auto fresh = static_cast<int32_t>(prompt.size() - history.size());
      EXPECT_LE(static_cast<int32_t>(prompt.size()) - answer.cached, fresh + 64) << "turn " << turn;
      EXPECT_EQ(answer.computed, static_cast<int64_t>(prompt.size()) - answer.cached + 36) << "cached_tokens is what was not computed";
      history = answer.whole;
    }
    const EngineStats stats = chat.settled();
    EXPECT_GT(stats.prefix_hit_tokens, stats.prefix_queried_tokens / 2);
  }
}

TEST(PrefixCache, TheSamePromptOnceMoreComputesItsLastBlock) {
  for (const int32_t length : {1, 63, 64, 65, 128, 561}) {
    SCOPED_TRACE(length);
    Conversation chat;
    const std::vector<int32_t> prompt = make_prompt(length, 5);
    EXPECT_EQ(chat.ask(prompt, 3).cached, 0);
    EXPECT_EQ(chat.ask(prompt, 3).cached, (length - 1) / 64 * 64);
    EXPECT_EQ(chat.ask(prompt + make_prompt(100, 6), 3).cached, length / 64 * 64) << "and goes on from there";
  }
}

TEST(PrefixCache, KeepsTheStateBeforeEachCutHint) {
  Conversation chat;
  const std::vector<int32_t> system = make_prompt(200, 1);
  chat.ask(system + make_prompt(300, 2), 3, {200});
  EXPECT_EQ(chat.ask(system + make_prompt(300, 3), 3).cached, 192);
}

TEST(PrefixCache, LearnsWhereConversationsBranch) {
  Conversation chat;
  const std::vector<int32_t> common = make_prompt(400, 1);
  chat.ask(common + make_prompt(300, 2), 3);
  EXPECT_EQ(chat.ask(common + make_prompt(300, 3), 3).cached, 0) << "no state was kept in the middle";
  EXPECT_EQ(chat.ask(common + make_prompt(300, 4), 3).cached, 384) << "now there is one where the second left the first";
}

TEST(PrefixCache, KeepsStatesInTheMiddleOfLongPrompts) {
  EngineSetup setup = cached_setup();
  setup.options.prefix_cache.snapshot_interval = 100;  // becomes 128
  Conversation chat(setup);
  const std::vector<int32_t> common = make_prompt(400, 1);
  chat.ask(common + make_prompt(200, 2), 100);
  EXPECT_EQ(chat.ask(common + make_prompt(200, 3), 3).cached, 384);
}

// CANCEL-76
TEST(PrefixCache, AnInterruptedOutputKeepsItsPrefix) {
  for (int32_t num_tokens = 20; num_tokens < 100; ++num_tokens) {
    SCOPED_TRACE(num_tokens);
    Conversation chat;
    FakeControl& control = chat.engine().control();
    control.hold();
    const std::vector<int32_t> prompt = make_prompt(100, 1);
    std::vector<int32_t> read;
    {
      const auto stream = chat.engine().submit(make_request(prompt, 500));
      control.release(num_tokens);  // the prompt is one step
      while (static_cast<int32_t>(read.size()) < num_tokens) read = read + stream->next().tokens;
    }
    control.open();
    chat.settled();
    const auto known = static_cast<int32_t>(prompt.size() + read.size());
    EXPECT_GE(chat.ask(prompt + read + make_prompt(70, 2), 3).cached, (known - 1) / 64 * 64);
  }
}

TEST(PrefixCache, FollowUpsThatComeAtOnceFindWhatIsJustBeingKept) {
  EngineSetup setup = cached_setup();
  setup.workers = {.own_thread = true, .max_delay_us = 2000, .max_steps_in_flight = 2};
  RunningEngine engine(setup);
  GenerationRequest first = make_request(make_prompt(300, 1), 64);
  first.sampling.stop_ids = {engine.expected(first.prompt, 64)[40]};  // so that a step is under way behind the end
  std::vector<int32_t> history = first.prompt;
  history = history + read_all(*engine.submit(std::move(first))).tokens;
  const TokenEvent next = read_all(*engine.submit(make_request(history + make_prompt(10, 2), 3)));
  EXPECT_EQ(next.finish->usage.cached_tokens, static_cast<int32_t>(history.size() - 1) / 64 * 64);
}

TEST(PrefixCache, ChoicesOfOnePromptComputeItOnce) {
  RunningEngine engine(cached_setup());
  std::vector<std::unique_ptr<RequestStream>> streams;
  const std::vector<int32_t> prompt = make_prompt(500, 1);
  for (uint64_t i = 0; i < 4; ++i) {
    GenerationRequest request = make_request(prompt, 5);
    request.sampling.seed = i;
    streams.push_back(engine.submit(std::move(request)));
  }
  int32_t cached = 0;
  for (const auto& stream : streams) cached += read_all(*stream).finish->usage.cached_tokens;
  EXPECT_EQ(cached, 3 * 448);
  engine.expect_all_free();
}

TEST(PrefixCache, SharesNothingBetweenSalts) {
  Conversation chat;
  const std::vector<int32_t> prompt = make_prompt(300, 1);
  chat.ask(prompt, 3, {}, "a");
  EXPECT_EQ(chat.ask(prompt, 3, {}, "b").cached, 0);
  EXPECT_EQ(chat.ask(prompt, 3).cached, 0);
  EXPECT_EQ(chat.ask(prompt, 3, {}, "a").cached, 256);
}

TEST(PrefixCache, ReusesOnlyPromptsWhereThatIsAsked) {
  EngineSetup setup = cached_setup();
  setup.options.prefix_cache.reuse_outputs = false;
  Conversation chat(setup);
  const Answer answer = chat.ask(make_prompt(200, 1), 200);
  EXPECT_EQ(chat.ask(answer.whole, 3).cached, 192);
  EXPECT_EQ(chat.ask(answer.whole, 3).cached, 384) << "as a prompt it was computed since";
}

TEST(PrefixCache, ComputesAllRowsOfAPromptWhoseLogprobsAreWanted) {
  Conversation chat;
  chat.ask(make_prompt(300, 1), 3);
  GenerationRequest request = make_request(make_prompt(300, 1), 3);
  request.prompt_logprobs = 1;
  EXPECT_EQ(chat.ask(std::move(request)).cached, 0);
}

TEST(PrefixCache, KeepsNothingOfARequestThatFailed) {
  EngineSetup setup = cached_setup();
  const std::vector<int32_t> prompt = make_prompt(300, 1);
  setup.workers.non_finite = {prompt[0], 100};
  Conversation chat(setup);
  const TokenEvent failed = read_all(*chat.engine().submit(make_request(prompt, 200)));
  ASSERT_EQ(failed.finish->reason, FinishReason::kError);
  EXPECT_EQ(chat.settled().num_cached_blocks, 0);
  EXPECT_EQ(chat.ask(prompt, 3).cached, 0);
}

TEST(PrefixCache, GivesWayToRunningSequences) {
  EngineSetup setup = cached_setup();
  setup.limits.num_blocks = 10;
  Conversation chat(setup);
  for (uint64_t i = 0; i < 20; ++i) chat.ask(make_prompt(400, i), 200);
  const EngineStats stats = chat.settled();
  EXPECT_EQ(stats.num_preemptions, 0u);
  EXPECT_GT(stats.prefix_evictions, 10u);
  EXPECT_EQ(stats.num_free_blocks, 10);
}

TEST(PrefixCache, BringsBackFromHostMemoryWhatTheDeviceHadNoRoomFor) {
  EngineSetup setup = cached_setup(2, 8);
  setup.limits.num_blocks = 16;
  setup.limits.num_host_blocks = 40;
  setup.limits.num_host_snapshots = 12;
  Conversation chat(setup);
  for (uint64_t i = 0; i < 4; ++i) chat.ask(make_prompt(500, i), 5);
  for (uint64_t i = 0; i < 4; ++i) EXPECT_EQ(chat.ask(make_prompt(500, i) + make_prompt(20, 9), 5).cached, 448) << i;
  const EngineStats stats = chat.settled();
  EXPECT_GT(stats.prefix_host_tokens, 448u);
  EXPECT_GT(stats.num_host_blocks_used, 0);
  EXPECT_EQ(stats.num_free_blocks, 16);
}

TEST(PrefixCache, APreemptedSequenceGoesOnFromHostMemory) {
  EngineSetup setup = cached_setup(2, 8);
  setup.limits.num_blocks = 8;
  setup.limits.num_host_blocks = 40;
  setup.limits.num_host_snapshots = 12;
  RunningEngine engine(setup);
  std::vector<std::unique_ptr<RequestStream>> streams;
  for (uint64_t i = 0; i < 3; ++i) streams.push_back(engine.submit(make_request(make_prompt(90, i), 250)));
  for (uint64_t i = 0; i < 3; ++i) EXPECT_EQ(read_all(*streams[i]).tokens, engine.expected(make_prompt(90, i), 250));
  engine.expect_all_free();
  EXPECT_GT(engine->stats().num_preemptions, 0u);
  EXPECT_GT(engine->stats().num_swapped, 0u);
}

TEST(PrefixCache, ChangesNothingWhenItIsOff) {
  EngineSetup setup = cached_setup();
  setup.options.prefix_cache.enabled = false;
  Conversation chat(setup);
  chat.ask(make_prompt(300, 1), 3);
  EXPECT_EQ(chat.ask(make_prompt(300, 1), 3).cached, 0);
  EXPECT_EQ(chat.settled().num_cached_blocks, 0);
}

}  // namespace
}  // namespace quern::engine
