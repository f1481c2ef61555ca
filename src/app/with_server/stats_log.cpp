#include "app/with_server/stats_log.h"

#include <algorithm>

#include "base/log.h"

namespace quern::app {

void StatsLog::update(const engine::EngineStats& stats, Clock::time_point now) {
  if (now - last_time_ < kInterval) return;
  const double seconds = std::chrono::duration<double>(now - last_time_).count();
  const auto generated = [](const engine::EngineStats& at) {
    return static_cast<double>(at.generation_tokens + at.unfinished_generation_tokens);
  };
  // A generated token is one row of a later step; all other rows are prompts'. Cancelled requests take their unfinished tokens with them:
  // never below 0.
  const double generated_tokens = std::max(0.0, generated(stats) - generated(last_));
  const double prompt_rows = std::max(0.0, static_cast<double>(stats.computed_rows - last_.computed_rows) - generated_tokens);
  const double kv_usage = stats.num_blocks > 0 ? 100.0 * (stats.num_blocks - stats.num_free_blocks) / stats.num_blocks : 0;
  if (stats.num_steps != last_.num_steps || stats.num_waiting > 0) {
    log_info("prompt {:.1f} tokens/s, generation {:.1f} tokens/s, running {}, waiting {}, KV {:.1f} %, preempted {}", prompt_rows / seconds,
             generated_tokens / seconds, stats.num_running, stats.num_waiting, kv_usage, stats.num_preemptions);
  }
  last_ = stats;
  last_time_ = now;
}

}  // namespace quern::app
