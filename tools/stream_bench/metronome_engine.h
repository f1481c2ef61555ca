#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "engine/engine.h"
#include "token_times.h"

namespace quern::tools {

/// An engine whose model takes no time: it steps with a fixed beat, and every step gives each request one token, as a batch does. The
/// request's seed names its row in `times`. Thread-safe.
class MetronomeEngine final : public engine::Engine {
 public:
  MetronomeEngine(const TokenTimes& times, std::chrono::microseconds beat, int32_t vocab_size);
  ~MetronomeEngine() override;

  Result<std::unique_ptr<engine::RequestStream>> submit(engine::GenerationRequest request) override;
  [[nodiscard]] engine::EngineStats stats() const override;
  [[nodiscard]] const worker::WorkerLimits& limits() const override { return limits_; }
  void drain(int64_t) override {}
  [[nodiscard]] std::optional<Error> failure() const override { return std::nullopt; }

 private:
  struct Running;
  void run(const std::stop_token& stop);
  /// Gives it a token; false when that was its last.
  bool step(Running& running);

  const TokenTimes& times_;
  const std::chrono::microseconds beat_;
  worker::WorkerLimits limits_;
  mutable std::mutex mutex_;
  std::vector<std::shared_ptr<Running>> arrived_;  // under mutex_
  engine::EngineStats stats_;                      // under mutex_
  std::jthread thread_;
};

}  // namespace quern::tools
