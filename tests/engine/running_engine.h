#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "engine/engine.h"
#include "engine/fake_workers.h"
#include "support/test_support.h"

namespace quern::engine::testing {

/// Small enough that a few requests meet every limit.
inline worker::WorkerLimits small_limits() {
  return {.num_slots = 4, .num_blocks = 40, .max_model_len = 1024, .max_rows = 192, .vocab_size = 211};
}

/// `num_tokens` tokens that depend on `seed`.
std::vector<int32_t> make_prompt(int32_t num_tokens, uint64_t seed, int32_t vocab_size = small_limits().vocab_size);
GenerationRequest make_request(std::vector<int32_t> prompt, int32_t max_tokens);

/// All events of a request as one.
TokenEvent read_all(RequestStream& stream);

struct EngineSetup {
  worker::WorkerLimits limits = small_limits();
  EngineOptions options;
  FakeWorkersOptions workers;
};

/// Drafts of up to four tokens, always, snapshots for a prefix cache, and places in host memory.
void with_features(EngineSetup& setup, SpeculationMethod speculation, bool cached, bool host = false);

/// Workers that form a pipeline.
void with_stages(EngineSetup& setup, int32_t num_stages);

/// An engine with fake workers. When it goes, the test fails if a plan was wrong.
class RunningEngine {
 public:
  explicit RunningEngine(const EngineSetup& setup = {});
  RunningEngine(const RunningEngine&) = delete;
  RunningEngine& operator=(const RunningEngine&) = delete;
  ~RunningEngine() { stop(); }

  Engine& operator*() { return *engine_; }
  Engine* operator->() { return engine_.get(); }
  [[nodiscard]] FakeControl& control() { return *control_; }
  [[nodiscard]] const FakeModel& model() const { return model_; }
  /// A request that must be taken.
  std::unique_ptr<RequestStream> submit(GenerationRequest request);
  /// What the model says without any engine.
  [[nodiscard]] std::vector<int32_t> expected(const std::vector<int32_t>& prompt, int32_t max_tokens,
                                              const SamplingParams& sampling = {}) const {
    return model_.output(prompt, sampling, max_tokens);
  }
  /// Waits until all steps are over; then every slot and block must be free.
  void expect_all_free();
  /// Ends the engine.
  void stop();

 private:
  const FakeModel model_;
  const std::shared_ptr<FakeControl> control_ = std::make_shared<FakeControl>();
  std::unique_ptr<Engine> engine_;
};

}  // namespace quern::engine::testing
