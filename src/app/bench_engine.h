#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "app/model_options.h"
#include "base/json.h"
#include "engine/engine.h"
#include "worker/plan.h"

// What the benchmarks share that drive the engine in this process: no HTTP, no text, random token ids, ends of sequence ignored.

namespace quern::app {

/// A running engine, its plan, and what the results of a benchmark must say about it.
struct BenchEngine {
  worker::ExecutionPlan plan;
  std::unique_ptr<engine::Engine> engine;
};

/// Starts an engine that can run `num_seqs` sequences of `model_len` tokens together; limits that the user gave stay as they are, and an
/// error says which of them is too small.
Result<BenchEngine> start_bench_engine(ModelOptions options, int32_t num_seqs, int32_t model_len, bool seqs_must_fit);

struct BenchRequest {
  std::vector<int32_t> prompt;
  int32_t output_len = 0;
  uint64_t seed = 0;
};

/// Seconds since the requests were submitted.
struct BenchTimes {
  double first_token = 0, last_token = 0;
  int32_t num_tokens = 0;
  int32_t num_first = 0;  // tokens that came together with the first: more than one where drafts were accepted, or the reader was late

  /// Tokens per second after those that came first; none where none came later.
  [[nodiscard]] std::optional<double> decode_rate() const {
    if (num_tokens <= num_first) return std::nullopt;
    return (num_tokens - num_first) / (last_token - first_token);
  }
};

struct BenchRun {
  std::vector<BenchTimes> times;  // parallel to the requests
  /// While all of them decode, from the last first token to the first last token: nobody's prompt is computed then. 0 where there is no such time.
  double decode_phase_seconds = 0;
  int64_t decode_phase_tokens = 0;
};

/// Submits all requests and waits for the last: temperature 1, top_p 1, no end of sequence.
Result<BenchRun> run_requests(engine::Engine& engine, const std::vector<BenchRequest>& requests);

/// Program, model, device and limits, for the end of a result file.
Json bench_environment(const worker::ExecutionPlan& plan);
/// What the engine counted: steps and the host's share of their time, rows, and how many tokens a verify gave.
Json bench_counters(const engine::EngineStats& stats);
/// The same in a line or two.
std::string bench_counters_text(const engine::EngineStats& stats);
/// Writes `result` to `file` unless the name is empty.
Result<void> save_result(const std::string& file, const Json& result);

}  // namespace quern::app
