#pragma once

#include <algorithm>
#include <string>
#include <vector>

#include "backends/cuda/stream.h"
#include "base/json.h"
#include "bench_tensors.h"
#include "ops/select.h"

namespace quern {

/// A GPU with tensors on it, and the time that recorded launches take.
class Bench : public BenchTensors {
 public:
  using BenchTensors::BenchTensors;

  cuda::Stream& stream() { return cuda::cuda_stream(BenchTensors::stream()); }
  /// Median seconds of what `enqueue` enqueues.
  template <class Enqueue>
  double seconds(const Enqueue& enqueue) {
    stream().begin_recording();
    enqueue();
    const auto graph = stream().end_recording().value();
    auto begin = cuda::Event::create(stream().context(), true).value(), end = cuda::Event::create(stream().context(), true).value();
    std::vector<double> times;
    for (int i = 0; i < kRepeats + 2; ++i) {
      stream().record(begin);
      stream().replay(*graph);
      stream().record(end);
      const double time = stream().seconds_between(begin, end).value();
      if (i >= 2) times.push_back(time);
    }
    return median(std::move(times));
  }

 private:
  static constexpr int kRepeats = 7;
};

/// What is measured, of everything: of each list an empty one means all.
struct Selection {
  std::vector<std::string> ops;  // "linears", "gdn_mix", "attention", "sample"
  std::vector<int> rows;         // of linear layers, up to 256 in decode and more in prompts; and of the numbers that mixers are measured with, runs of decode rows or prompt rows
  DType ring = DType::kBF16;     // of gdn_mix; a model in bfloat16 has this unless it is told otherwise
  [[nodiscard]] bool has(std::string_view op) const { return ops.empty() || std::find(ops.begin(), ops.end(), op) != ops.end(); }
  [[nodiscard]] bool has(int count) const { return rows.empty() || std::find(rows.begin(), rows.end(), count) != rows.end(); }
};

/// attention, gdn_mix and sample of Qwen3.6-27B, decode and prompt rows, as `rules` choose their candidates; results are added to `results`.
void bench_mixers(Bench& bench, const Selection& selection, double read_limit, const ops::SelectionRules& rules, Json& results);

}  // namespace quern
