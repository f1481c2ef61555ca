#include <algorithm>
#include <chrono>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "engine/running_engine.h"

namespace quern::engine {
namespace {

using namespace testing;  // NOLINT(google-build-using-namespace): the fakes of this room

struct Live {
  std::unique_ptr<RequestStream> stream;
  std::vector<int32_t> prompt;
  std::vector<int32_t> expected;  // whole output
  std::vector<int32_t> tokens;
  std::optional<int32_t> stop;
  bool cancelled = false;
  std::optional<Finish> finish;
};

void read_events(Live& live, bool wait) {
  while (!live.finish) {
    std::optional<TokenEvent> event = wait ? live.stream->next() : live.stream->try_next();
    if (!event) return;
    live.tokens.insert(live.tokens.end(), event->tokens.begin(), event->tokens.end());
    live.finish = std::move(event->finish);
  }
}

/// What was read must be the model's output up to the end that the finish names.
void check(const Live& live) {
  ASSERT_LE(live.tokens.size(), live.expected.size());
  EXPECT_TRUE(std::equal(live.tokens.begin(), live.tokens.end(), live.expected.begin()));
  if (live.cancelled) return;
  EXPECT_NE(live.finish->reason, FinishReason::kCancelled);
  EXPECT_NE(live.finish->reason, FinishReason::kError);
  const size_t end = live.stop ? std::min(static_cast<size_t>(*live.stop), live.expected.size()) : live.expected.size();
  EXPECT_EQ(live.finish->usage.completion_tokens, static_cast<int32_t>(end));
  EXPECT_GE(live.tokens.size(), end);
}

void walk_at_random(uint64_t seed, int32_t num_ops, const EngineSetup& setup) {
  SCOPED_TRACE(fmt::format("seed {}", seed));
  SplitMix64 random(seed);
  const auto below = [&random](int32_t n) { return static_cast<int32_t>(random.next() % static_cast<uint64_t>(n)); };
  RunningEngine engine(setup);
  engine.control().hold();
  std::vector<Live> all;
  std::vector<size_t> unfinished;
  uint64_t num_refused = 0;
  for (int32_t op = 0; op < num_ops; ++op) {
    std::erase_if(unfinished, [&](size_t i) { return all[i].finish.has_value(); });
    const int32_t kind = below(8);
    if (kind < 3) {
      const int32_t max_rows = setup.limits.num_blocks * 64;
      std::vector<int32_t> prompt = make_prompt(1 + below(below(3) == 0 ? max_rows / 2 : 60), random.next());
      if (!all.empty() && below(2) == 0) {
        // Goes on from an earlier conversation, from some place in it.
        const Live& earlier = all[static_cast<size_t>(below(static_cast<int32_t>(all.size())))];
        std::vector<int32_t> whole = earlier.prompt;
        whole.insert(whole.end(), earlier.tokens.begin(), earlier.tokens.end());
        whole.resize(std::min(whole.size(), static_cast<size_t>(max_rows / 2 + below(max_rows / 4))));
        if (below(4) == 0) whole.resize(static_cast<size_t>(below(static_cast<int32_t>(whole.size() + 1))));
        prompt.resize(static_cast<size_t>(1 + below(30)), 1);
        prompt.insert(prompt.begin(), whole.begin(), whole.end());
      }
      const auto prompt_tokens = static_cast<int32_t>(prompt.size());
      const int32_t max_tokens = below(below(2) == 0 ? max_rows - prompt_tokens : std::min(100, max_rows - prompt_tokens));
      GenerationRequest request = make_request(std::move(prompt), max_tokens);
      if (below(2) == 0) request.cut_hints = {below(prompt_tokens + 1)};
      if (below(16) == 0) request.cache_salt = "salt";
      request.priority = below(3) - 1;
      request.sampling.seed = random.next();
      if (below(3) == 0) request.sampling.stop_ids = {below(211), below(211)};
      if (below(4) == 0) request.sampling.repetition_penalty = 1.1f;
      if (below(4) == 0) request.sampling.min_tokens = below(100);
      if (below(8) == 0) request.prompt_logprobs = below(3);
      Live live{.prompt = request.prompt, .expected = engine.expected(request.prompt, max_tokens, request.sampling)};
      Result<std::unique_ptr<RequestStream>> stream = engine->submit(std::move(request));
      if (!stream) {
        EXPECT_EQ(stream.error().code, ErrorCode::kResourceExhausted) << stream.error().message;
        ++num_refused;
        continue;
      }
      live.stream = std::move(stream).value();
      unfinished.push_back(all.size());
      all.push_back(std::move(live));
    } else if (kind == 3 && !unfinished.empty() && below(3) == 0) {
      Live& live = all[unfinished[static_cast<size_t>(below(static_cast<int32_t>(unfinished.size())))]];
      live.cancelled = true;
      live.stream->cancel();
    } else if (kind == 4 && !unfinished.empty() && below(3) == 0) {
      Live& live = all[unfinished[static_cast<size_t>(below(static_cast<int32_t>(unfinished.size())))]];
      const int32_t stop = std::max(0, static_cast<int32_t>(live.tokens.size()) + below(20) - 5);
      live.stop = std::min(live.stop.value_or(stop), stop);
      live.stream->stop_at(stop);
    } else {
      // Lets the engine use up the steps, unless it needs fewer.
      engine.control().release(1 + below(40));
      const auto running = [&all](size_t i) { return !all[i].finish; };
      while (engine.control().permits() > 0 && std::any_of(unfinished.begin(), unfinished.end(), running)) {
        for (const size_t i : unfinished) read_events(all[i], false);
        std::this_thread::sleep_for(std::chrono::microseconds(100));
      }
    }
  }
  engine.control().open();
  for (Live& live : all) {
    read_events(live, true);
    check(live);
  }
  engine.expect_all_free();
  const EngineStats stats = engine->stats();
  EXPECT_GT(stats.num_preemptions, 0u) << "the pool was meant to be tight";
  EXPECT_EQ(stats.requests_stop + stats.requests_length + stats.requests_cancelled, all.size());
  EXPECT_GT(all.size(), static_cast<size_t>(num_ops) / 10);
  if (setup.options.speculation.method == SpeculationMethod::kNone) {
    EXPECT_GT(num_refused, 0u) << "the queue was meant to be short";
  }
  if (setup.limits.num_snapshots > 0) {
    EXPECT_GT(stats.prefix_hit_tokens, 0u);
    EXPECT_GT(stats.prefix_evictions, 0u);
  }
  if (setup.limits.num_host_blocks > 0) {
    EXPECT_GT(stats.prefix_host_tokens, 0u);
    EXPECT_GT(stats.num_swapped, 0u);
  }
  if (setup.options.speculation.method != SpeculationMethod::kNone) {
    EXPECT_GT(stats.speculation.num_accepted_tokens, 0u);
    EXPECT_GT(stats.speculation.num_draft_tokens, stats.speculation.num_accepted_tokens) << "some drafts were meant to be wrong";
  }
}

EngineSetup tight(int32_t steps_in_flight, bool own_thread, SpeculationMethod speculation = SpeculationMethod::kNone, bool cached = false, bool host = false,
                  int32_t num_stages = 1) {
  EngineSetup setup;
  setup.limits = {.num_slots = 5, .num_blocks = 7, .max_model_len = 1024, .max_rows = 80, .vocab_size = 211};
  setup.options = {.max_queue_len = 12, .steps_in_flight = steps_in_flight};
  setup.workers = {.own_thread = own_thread, .max_delay_us = 5, .max_steps_in_flight = steps_in_flight};
  with_features(setup, speculation, cached, host);
  with_stages(setup, num_stages);
  return setup;
}

TEST(EngineStress, ARandomWalkLosesNothingWithSynchronousSteps) { walk_at_random(1, 2000, tight(1, false)); }
TEST(EngineStress, ARandomWalkLosesNothingWithTwoStepsInFlight) { walk_at_random(2, 2000, tight(2, false)); }
TEST(EngineStress, ARandomWalkLosesNothingWithWorkersOnAThread) { walk_at_random(3, 2000, tight(2, true)); }
TEST(EngineStress, ARandomWalkLosesNothingWithManyStepsInFlight) { walk_at_random(4, 2000, tight(5, true)); }
TEST(EngineStress, ARandomWalkLosesNothingWithAPrefixCache) { walk_at_random(5, 2000, tight(1, false, SpeculationMethod::kNone, true)); }
TEST(EngineStress, ARandomWalkLosesNothingWithAPrefixCacheAndManyStepsInFlight) { walk_at_random(6, 2000, tight(5, true, SpeculationMethod::kNone, true)); }
TEST(EngineStress, ARandomWalkLosesNothingWithDrafts) { walk_at_random(7, 2000, tight(2, false, SpeculationMethod::kMtp)); }
TEST(EngineStress, ARandomWalkLosesNothingWithDraftsAndAPrefixCache) { walk_at_random(8, 2000, tight(2, true, SpeculationMethod::kMtp, true)); }
TEST(EngineStress, ARandomWalkLosesNothingWithDraftsAndAPrefixCacheAndManyStepsInFlight) {
  walk_at_random(9, 2000, tight(5, true, SpeculationMethod::kMtp, true));
}
TEST(EngineStress, ARandomWalkLosesNothingWithHostMemory) { walk_at_random(11, 2000, tight(2, true, SpeculationMethod::kNone, true, true)); }
TEST(EngineStress, ARandomWalkLosesNothingWithHostMemoryAndDrafts) { walk_at_random(12, 2000, tight(3, true, SpeculationMethod::kMtp, true, true)); }
TEST(EngineStress, ARandomWalkLosesNothingWithNgramDraftsAndAPrefixCache) { walk_at_random(10, 2000, tight(2, true, SpeculationMethod::kNgram, true)); }
TEST(EngineStress, ARandomWalkLosesNothingInAPipelineOfTwo) { walk_at_random(13, 2000, tight(2, false, SpeculationMethod::kNone, false, false, 2)); }
TEST(EngineStress, ARandomWalkLosesNothingInAPipelineOfFour) { walk_at_random(14, 2000, tight(2, true, SpeculationMethod::kNone, false, false, 4)); }
TEST(EngineStress, ARandomWalkLosesNothingInAPipelineWithAPrefixCache) { walk_at_random(15, 2000, tight(2, true, SpeculationMethod::kNone, true, false, 4)); }
TEST(EngineStress, ARandomWalkLosesNothingInAPipelineWithHostMemory) { walk_at_random(16, 2000, tight(2, false, SpeculationMethod::kNone, true, true, 2)); }
TEST(EngineStress, ARandomWalkLosesNothingInAPipelineWithHostMemoryAndDrafts) { walk_at_random(17, 2000, tight(2, true, SpeculationMethod::kMtp, true, true, 4)); }
TEST(EngineStress, ARandomWalkLosesNothingInAPipelineWithDrafts) { walk_at_random(18, 2000, tight(2, false, SpeculationMethod::kMtp, true, false, 4)); }
TEST(EngineStress, ARandomWalkLosesNothingInAPipelineWithNgramDrafts) { walk_at_random(19, 2000, tight(2, true, SpeculationMethod::kNgram, true, false, 2)); }
TEST(EngineStress, ARandomWalkLosesNothingInAPipelineWithSynchronousSteps) { walk_at_random(20, 2000, tight(1, true, SpeculationMethod::kMtp, true, true, 2)); }

}  // namespace
}  // namespace quern::engine
