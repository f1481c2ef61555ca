#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>

#include "engine/engine.h"
#include "server/constraints.h"
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
  /// A request that ended by itself.
  struct Times {
    double seconds = 0;         // since it was submitted
    double queue_seconds = 0;   // of these: waiting
    double decode_seconds = 0;  // of these: behind the first token
  };
  void observe_finished(const OutputUsage& usage, const Times& times);
  /// Of the choices of one request, once all of them have ended.
  void observe_longest_output(int32_t num_tokens);
  /// A request with `n` choices a prompt, of max_tokens each.
  void observe_submitted(int32_t n, int32_t max_tokens);
  void count_http_response(int status);

  /// The exposition text; counters and gauges of the engine and of constrained output are those given.
  [[nodiscard]] std::string expose(const engine::EngineStats& stats, const ConstraintStats& constraints = {}, bool engine_failed = false) const;

 private:
  struct Families;
  std::unique_ptr<Families> families_;
};

}  // namespace quern::server
