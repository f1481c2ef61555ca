#include <fmt/format.h>

#include <charconv>
#include <chrono>
#include <fstream>
#include <vector>

#include "backends/cpu/cpu_info.h"
#include "backends/platforms.h"
#include "base/json.h"
#include "bench_tensors.h"
#include "ops/kernel_table.h"
#include "ops/select.h"

// Two layers of Qwen3.5-0.8B's shapes in block FP8 on the CPU, each candidate by itself: the head (254 MB, more than a cache holds) and mlp_in (7.3 MB) with 1 to 512 rows.
// Every repeat measures the read bandwidth, then the kernel, so that the share is one of the same moment; shares and times are medians.
//
//   bench_cpu [--threads N] [results.json]

namespace quern {
namespace {

using ops::TensorView, ops::WeightScheme;

constexpr int64_t kHidden = 1024, kWidth = 3584, kVocab = 248320, kMostRows = 512, kMostLogits = 8;
constexpr int kRepeats = 9;

/// The CPU with tensors on it.
class Bench : public BenchTensors {
 public:
  explicit Bench(int num_threads) : BenchTensors(backends::open_device("cpu", {.num_threads = num_threads}).value()), num_threads_(num_threads) {}

  /// Prints and adds to `results` what `enqueue` takes, which reads `bytes` of weights and computes `flops`.
  template <class Enqueue>
  void time(std::string_view what, std::string_view candidate, int64_t rows, double bytes, double flops, const Enqueue& enqueue, Json& results) {
    std::vector<double> times, shares;
    for (int i = 0; i < kRepeats + 1; ++i) {
      const double bandwidth = cpu::measure_read_bandwidth(num_threads_);
      const auto start = std::chrono::steady_clock::now();
      enqueue();
      const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
      if (i == 0) continue;  // the first one touches memory
      times.push_back(seconds);
      shares.push_back(bytes / seconds / bandwidth);
    }
    const double seconds = median(times);
    fmt::print("{:16} {:7} {:4} rows {:10.1f} us {:7.1f} GB/s, {:.2f} of the read bandwidth, {:7.1f} GFLOPS\n", candidate, what, rows, seconds * 1e6,
               bytes / seconds / 1e9, median(shares), flops / seconds / 1e9);
    results.push_back({{"what", what}, {"candidate", candidate}, {"rows", rows}, {"us", seconds * 1e6}, {"gb_s", bytes / seconds / 1e9},
                       {"share_of_read_bandwidth", median(shares)}, {"gflops", flops / seconds / 1e9}});
  }

 private:
  int num_threads_;
};

/// visit(name, kernel, packed weights) for every candidate of Op that this machine can run.
template <class Op, class Weights, class Visit>
void for_each_candidate(Bench& bench, const typename Op::Problem& problem, const Weights& weights, const Visit& visit) {
  for (const ops::Candidate<Op>& candidate : backends::kernel_table(ops::Platform::kCpu).list<Op>().candidates()) {
    if (const ops::Verdict verdict = candidate.accepts(problem, bench.device().traits()); !verdict.accepted) {
      fmt::print("{:16} {:7} {}\n", candidate.name, Op::kName, verdict.reason);
      continue;
    }
    const auto kernel = candidate.make(problem, bench.device()).value();
    const auto packed = bench.device().allocate(kernel->packed_bytes(), "weights").value();
    kernel->pack(weights, *packed, bench.stream());
    visit(candidate.name, *kernel, *packed);
  }
}

int run(int num_threads, const char* file) {
  if (num_threads == 0) num_threads = cpu::usable_cores();
  Bench bench(num_threads);
  const double read = cpu::measure_read_bandwidth(num_threads);
  Json results{{"device", bench.device().traits().name}, {"threads", num_threads}, {"read_gb_s", read / 1e9}, {"results", Json::array()}};
  fmt::print("{}: {} threads read {:.1f} GB/s\n", bench.device().traits().name, num_threads, read / 1e9);

  const auto weight = [&](int64_t out, int64_t in) { return bench.weight(out, in, WeightScheme::kFp8Block, 0x2020202020202020u); };
  const auto head = weight(kVocab, kHidden), gate = weight(kWidth, kHidden), up = weight(kWidth, kHidden);
  const TensorView x = bench.random(DType::kBF16, {kMostRows, kHidden}), norm = bench.filled({kHidden}, 0.1f), middle = bench.tensor(DType::kBF16, {kMostRows, kWidth});
  const TensorView hidden = bench.tensor(DType::kBF16, {kMostRows, kHidden}), logits = bench.tensor(DType::kF32, {kMostLogits, kVocab});
  const TensorView named = bench.tensor(DType::kI32, {kMostLogits});
  for (int32_t i = 0; i < kMostLogits; ++i) named.data<int32_t>()[i] = i;

  ops::RowRun row_run;
  ops::Rows rows;
  rows.runs = {&row_run, 1};
  const auto set_rows = [&](int64_t n) {
    row_run = {0, 0, static_cast<int32_t>(n), n > 64 ? ops::RowKind::kPrompt : ops::RowKind::kDecode, true};
    rows.num_rows = static_cast<int32_t>(n);
  };
  const double head_elements = static_cast<double>(kVocab * kHidden), mlp_elements = 2.0 * kWidth * kHidden;
  const auto time_head = [&](std::string_view name, const ops::Head::Kernel& kernel, const ops::Buffer& packed) {
    ops::Launch launch{bench.stream(), bench.tensor(DType::kU8, {static_cast<int64_t>(kernel.workspace_bytes(kMostRows))})};
    for (const int64_t n : {1, 2, 4, 8}) {
      set_rows(n);
      TensorView wanted = named;
      wanted.shape = {n};
      bench.time("head", name, n, head_elements, 2 * head_elements * static_cast<double>(n),
                 [&] { kernel.enqueue(rows, x, norm, wanted, packed, hidden, logits, launch); }, results["results"]);
    }
  };
  const auto time_mlp_in = [&](std::string_view name, const ops::MlpIn::Kernel& kernel, const ops::Buffer& packed) {
    ops::Launch launch{bench.stream(), bench.tensor(DType::kU8, {static_cast<int64_t>(kernel.workspace_bytes(kMostRows))})};
    for (const int64_t n : {1, 4, 16, 64, 512}) {
      set_rows(n);
      bench.time("mlp_in", name, n, mlp_elements, 2 * mlp_elements * static_cast<double>(n),
                 [&] { kernel.enqueue(rows, x, packed, {ops::ActivationLayout::kPlain, middle, {}}, launch); }, results["results"]);
    }
  };
  for_each_candidate<ops::Head>(bench, {kHidden, kVocab, head.shape}, head, time_head);
  for_each_candidate<ops::MlpIn>(bench, {kHidden, kWidth, gate.shape, up.shape}, ops::MlpIn::Weights{norm, gate, up}, time_mlp_in);
  if (file != nullptr) std::ofstream(file) << results.dump(1) << "\n";
  return 0;
}

}  // namespace
}  // namespace quern

int main(int argc, char** argv) {
  int num_threads = 0;
  const char* file = nullptr;
  for (int i = 1; i < argc; ++i) {
    const std::string_view argument = argv[i], value = i + 1 < argc ? argv[i + 1] : "";
    if (argument == "--threads" && std::from_chars(value.begin(), value.end(), num_threads).ec == std::errc() && num_threads > 0) {
      ++i;
    } else if (argument.starts_with("-") || file != nullptr) {
      fmt::print(stderr, "usage: bench_cpu [--threads N] [results.json]\n");
      return 2;
    } else {
      file = argv[i];
    }
  }
  return quern::run(num_threads, file);
}
