#pragma once

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <vector>

#include "engine/engine.h"

namespace quern::server {

struct ScriptedChannel;

/// What the engine shall answer to one request. Tokens are given until a stop id, max_tokens or the script's end.
struct Script {
  std::vector<int32_t> tokens;
  std::vector<size_t> events;            // how many tokens each event has; the rest follow one by one
  std::optional<Error> error_after_end;  // instead of a finish
  int32_t cached_tokens = 0;
};

/// An engine::Engine without a model: every request follows a script, on a thread of its own. Thread-safe.
class ScriptedEngine final : public engine::Engine {
 public:
  /// Called by submit().
  using Writer = std::function<Script(const engine::GenerationRequest&)>;
  /// The log-probability of a token and its rank-th alternative (0: the token itself).
  using Logprob = std::function<float(int32_t token, int32_t rank)>;

  explicit ScriptedEngine(Writer writer);
  ~ScriptedEngine() override;

  Result<std::unique_ptr<engine::RequestStream>> submit(engine::GenerationRequest request) override;
  [[nodiscard]] engine::EngineStats stats() const override;
  [[nodiscard]] const worker::WorkerLimits& limits() const override { return limits_; }
  void drain(int64_t timeout_ms) override;
  [[nodiscard]] std::optional<Error> failure() const override;

  // What tests set and look at.
  void set_writer(Writer writer);
  void set_logprob(Logprob logprob);
  void set_max_queue_len(size_t length);
  void set_failure(std::optional<Error> failure);
  /// While held no event is sent; each permit lets every running request send one.
  void hold();
  void permit(int64_t steps);
  void let_run();
  [[nodiscard]] worker::WorkerLimits& mutable_limits() { return limits_; }  // before the first request
  /// All requests so far, without their constraints.
  [[nodiscard]] std::vector<engine::GenerationRequest> submitted() const;
  /// Waits until no request runs; false after ten seconds.
  [[nodiscard]] bool wait_until_idle() const;

 private:
  void run(const std::stop_token& stop);
  void step(ScriptedChannel& channel);

  worker::WorkerLimits limits_;
  mutable std::mutex mutex_;
  mutable std::condition_variable_any changed_;
  Writer writer_;
  Logprob logprob_;
  std::vector<std::shared_ptr<ScriptedChannel>> running_;
  std::vector<engine::GenerationRequest> submitted_;
  engine::EngineStats stats_;
  std::optional<Error> failure_;
  size_t max_queue_len_ = 1024;
  int64_t permits_ = -1;  // -1: not held
  std::jthread thread_;
};

}  // namespace quern::server
