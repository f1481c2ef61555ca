#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>

#include "engine/engine.h"
#include "server/output.h"

namespace quern::server {

/// What /metrics tells Prometheus: names, labels and buckets of vLLM, so that its dashboards work, and `quern:` for what is ours.
/// Thread-safe.
class Metrics {
 public:
  /// max_model_len bounds the buckets of token counts.
  Metrics(const std::string& model_name, int32_t max_model_len);
  ~Metrics();
  Metrics(const Metrics&) = delete;
  Metrics& operator=(const Metrics&) = delete;

  void observe_time_to_first_token(double seconds);
  /// `num_tokens` arrived together, `seconds` after those before.
  void observe_inter_token_latency(double seconds, int32_t num_tokens);
  /// A request that ended by itself. `seconds`: since it was submitted; `decode_seconds`: since its first token.
  void observe_finished(const OutputUsage& usage, double seconds, double decode_seconds);
  void count_http_response(int status);

  /// The exposition text; counters and gauges of the engine are those of `stats`.
  [[nodiscard]] std::string expose(const engine::EngineStats& stats) const;

 private:
  struct Families;
  std::unique_ptr<Families> families_;
};

}  // namespace quern::server
