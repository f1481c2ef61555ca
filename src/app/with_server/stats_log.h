#pragma once

#include <chrono>

#include "engine/engine.h"

namespace quern::app {

/// The log line about throughput and load that operators know from vLLM; silent while nothing happens.
class StatsLog {
 public:
  using Clock = std::chrono::steady_clock;
  static constexpr std::chrono::seconds kInterval{10};

  /// Logs when the interval has passed and something happened in it.
  void update(const engine::EngineStats& stats, Clock::time_point now);

 private:
  Clock::time_point last_time_ = Clock::now();
  engine::EngineStats last_;
};

}  // namespace quern::app
