#include "engine/running_engine.h"

#include <algorithm>
#include <utility>

namespace quern::engine::testing {

std::vector<int32_t> make_prompt(int32_t num_tokens, uint64_t seed, int32_t vocab_size) {
  SplitMix64 random(seed);
  std::vector<int32_t> prompt(static_cast<size_t>(num_tokens));
  for (int32_t& token : prompt) token = static_cast<int32_t>(random.next() % static_cast<uint64_t>(vocab_size));
  return prompt;
}

GenerationRequest make_request(std::vector<int32_t> prompt, int32_t max_tokens) {
  GenerationRequest request;
  request.prompt = std::move(prompt);
  request.max_tokens = max_tokens;
  return request;
}

TokenEvent read_all(RequestStream& stream) {
  TokenEvent all;
  while (!all.finish) {
    TokenEvent event = stream.next();
    all.tokens.insert(all.tokens.end(), event.tokens.begin(), event.tokens.end());
    all.logprobs.insert(all.logprobs.end(), event.logprobs.begin(), event.logprobs.end());
    all.prompt_logprobs.insert(all.prompt_logprobs.end(), event.prompt_logprobs.begin(), event.prompt_logprobs.end());
    all.finish = std::move(event.finish);
  }
  return all;
}

void with_features(EngineSetup& setup, SpeculationMethod speculation, bool cached, bool host) {
  setup.options.speculation = {.method = speculation, .num_speculative_tokens = 4, .prompt_lookup_min = 1, .prompt_lookup_max = 3, .adaptive = false};
  if (speculation != SpeculationMethod::kNone) {
    setup.limits.k_max = 4;
    setup.limits.has_mtp = speculation == SpeculationMethod::kMtp;
  }
  if (cached) setup.limits.num_snapshots = 12;
  if (host) {
    setup.limits.num_host_snapshots = 6;
    setup.limits.num_host_blocks = 20;
  }
}

void with_stages(EngineSetup& setup, int32_t num_stages) {
  setup.limits.num_stages = num_stages;
  if (num_stages > 1) setup.workers.max_steps_in_flight = num_stages + 1;
}

RunningEngine::RunningEngine(const EngineSetup& setup)
    : model_(setup.limits.vocab_size),
      engine_(Engine::start(std::make_unique<FakeWorkers>(setup.limits, setup.workers, control_), setup.options)) {}

std::unique_ptr<RequestStream> RunningEngine::submit(GenerationRequest request) {
  Result<std::unique_ptr<RequestStream>> stream = engine_->submit(std::move(request));
  EXPECT_OK(stream);
  return std::move(stream).value();
}

void RunningEngine::expect_all_free() {
  control_->open();
  engine_->drain(int64_t{24} * 3600 * 1000);
  const EngineStats stats = engine_->stats();
  EXPECT_EQ(stats.num_running, 0);
  EXPECT_EQ(stats.num_waiting, 0);
  EXPECT_EQ(stats.num_free_blocks, stats.num_blocks);
  EXPECT_EQ(stats.num_free_slots, stats.num_slots);
  EXPECT_EQ(stats.unfinished_generation_tokens, 0u);
}

void RunningEngine::stop() {
  control_->open();
  engine_.reset();
  const std::vector<std::string> violations = control_->violations();
  EXPECT_TRUE(violations.empty()) << violations.size() << " violations, the first: " << violations.front();
}

}  // namespace quern::engine::testing
