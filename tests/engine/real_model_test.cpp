// The engine over the real worker and a tiny checkpoint: a text does not depend on neighbours, on arrival, on asynchronous steps or on preemption.

#include <cstring>
#include <thread>

#include "base/hash.h"
#include "engine/engine.h"
#include "support/reference_checkpoint.h"
#include "support/test_support.h"
#include "worker/start.h"

namespace quern::engine {
namespace {

constexpr int32_t kRequests = 16;

struct Text {
  std::vector<int32_t> tokens;
  std::vector<float> logprobs;
  friend bool operator==(const Text& a, const Text& b) {
    return a.tokens == b.tokens && a.logprobs.size() == b.logprobs.size() &&
           std::memcmp(a.logprobs.data(), b.logprobs.data(), a.logprobs.size() * sizeof(float)) == 0;
  }
};

GenerationRequest request(int32_t i) {
  GenerationRequest r;
  SplitMix64 random(1000 + static_cast<uint64_t>(i));
  const int32_t length = 1 + i * 29 % 190;
  for (int32_t t = 0; t < length; ++t) r.prompt.push_back(static_cast<int32_t>(random.next() % 320));
  r.id = fmt::format("request-{}", i);
  r.max_tokens = 60 + i * 37 % 180;
  r.sampling.temperature = i % 2 == 0 ? 0.0f : 0.8f;
  r.sampling.top_k = i % 3 == 0 ? 20 : 0;
  r.sampling.presence_penalty = i % 4 == 1 ? 0.5f : 0.0f;
  r.sampling.seed = static_cast<uint64_t>(i);
  r.sampling.num_logprobs = 0;
  if (i % 2 == 0) r.sampling.stop_ids = {7};  // the others have their full length, so that a small cache is short of blocks whatever the texts are
  return r;
}

Text read(RequestStream& stream) {
  Text text;
  for (;;) {
    const TokenEvent event = stream.next();
    text.tokens.insert(text.tokens.end(), event.tokens.begin(), event.tokens.end());
    for (const TokenLogprobs& l : event.logprobs) text.logprobs.push_back(l.chosen);
    if (!event.finish) continue;
    EXPECT_FALSE(event.finish->error.has_value());
    EXPECT_EQ(event.finish->usage.completion_tokens, std::ssize(text.tokens));
    return text;
  }
}

class RealModel : public ::testing::Test {
 protected:
  static void SetUpTestSuite() { ASSERT_OK(quern::testing::tiny_reference(quern::testing::Scheme::kFp8Block, folder().path() / "tiny")); }
  static const quern::testing::TemporaryFolder& folder() {
    static const quern::testing::TemporaryFolder instance;
    return instance;
  }

  /// An engine whose KV cache holds `num_blocks` blocks.
  static std::unique_ptr<Engine> start(int64_t num_blocks, int32_t steps_in_flight) {
    worker::WorkerOptions options;
    options.model_dir = folder().path() / "tiny";
    options.load.with_mtp = false;
    options.max_num_seqs = kRequests;
    options.max_model_len = 448;
    options.num_threads = 2;
    auto plan = worker::make_plan(options);
    EXPECT_OK(plan);
    options.kv_cache_memory_bytes = plan->kv_bytes_for(num_blocks);
    plan = worker::make_plan(options);
    EXPECT_OK(plan);
    EXPECT_EQ(plan->limits.num_blocks, num_blocks);
    auto workers = worker::start_workers(*plan);
    EXPECT_OK(workers);
    return Engine::start(std::move(*workers), {.steps_in_flight = steps_in_flight});
  }

  static std::vector<Text> one_by_one() {
    const auto engine = start(64, 1);
    std::vector<Text> texts;
    for (int32_t i = 0; i < kRequests; ++i) texts.push_back(read(**engine->submit(request(i))));
    return texts;
  }
  static std::vector<Text> all_at_once(Engine& engine, int32_t stride) {
    std::vector<std::unique_ptr<RequestStream>> streams(kRequests);
    for (int32_t i = 0; i < kRequests; ++i) {
      const int32_t which = i * stride % kRequests;
      auto stream = engine.submit(request(which));
      EXPECT_OK(stream);
      streams[static_cast<size_t>(which)] = std::move(*stream);
    }
    std::vector<Text> texts;
    for (const auto& stream : streams) texts.push_back(read(*stream));
    return texts;
  }
};

TEST_F(RealModel, GivesTheSameBitsAloneTogetherAsynchronouslyAndAfterPreemption) {
  const std::vector<Text> alone = one_by_one();
  int32_t ended_early = 0;
  for (int32_t i = 0; i < kRequests; ++i) ended_early += std::ssize(alone[static_cast<size_t>(i)].tokens) < request(i).max_tokens;
  EXPECT_GT(ended_early, 0) << "no request met its stop id";

  for (const int32_t steps_in_flight : {1, 2}) {
    for (const int64_t num_blocks : {64, 9}) {
      const auto engine = start(num_blocks, steps_in_flight);
      for (const int32_t stride : {1, 7}) {
        SCOPED_TRACE(fmt::format("{} steps in flight, {} blocks, stride {}", steps_in_flight, num_blocks, stride));
        const std::vector<Text> together = all_at_once(*engine, stride);
        for (size_t i = 0; i < together.size(); ++i) EXPECT_TRUE(together[i] == alone[i]) << "request " << i;
      }
      // The last text is complete before the step that was already under way behind it.
      EngineStats stats = engine->stats();
      while (stats.num_free_slots != stats.num_slots) {
        std::this_thread::yield();
        stats = engine->stats();
      }
      EXPECT_EQ(stats.num_preemptions > 0, num_blocks == 9);
      EXPECT_EQ(stats.discarded_rows > 0, steps_in_flight == 2);
      EXPECT_EQ(stats.num_free_blocks, stats.num_blocks);
    }
  }
}

}  // namespace
}  // namespace quern::engine
