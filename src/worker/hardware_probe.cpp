#include "worker/hardware_probe.h"

#include <unistd.h>

#include <chrono>
#include <fstream>

#include "backends/platforms.h"
#include "worker/plan.h"
#include "worker/selftest_trial.h"

namespace quern::worker {
namespace {

using Clock = std::chrono::steady_clock;
using selftest::Trial;

constexpr uint64_t kMiB = 1 << 20;

double seconds_since(Clock::time_point begin) { return std::chrono::duration<double>(Clock::now() - begin).count(); }

/// Seconds of one call of `enqueue`, from as many as fill `at_least` seconds, after one that does not count.
template <class Enqueue>
Result<double> seconds_each(ops::Stream& stream, double at_least, const Enqueue& enqueue) {
  enqueue();
  RETURN_IF_ERROR(stream.finish());
  for (int64_t count = 1;; count *= 2) {
    const Clock::time_point begin = Clock::now();
    for (int64_t i = 0; i < count; ++i) enqueue();
    RETURN_IF_ERROR(stream.finish());
    const double elapsed = seconds_since(begin);
    constexpr int64_t kMost = 1 << 16;
    if (elapsed >= at_least || count >= kMost) return elapsed / static_cast<double>(count);
  }
}

class Probe {
 public:
  Probe(ops::Device& device, ops::Stream& stream, const ProbeOptions& options) : device_(device), stream_(stream), options_(options) {}

  Result<void> run() {
    RETURN_IF_ERROR(read_weights());
    RETURN_IF_ERROR(copy_memory());
    RETURN_IF_ERROR(launch());
    RETURN_IF_ERROR(mirror_memory());
    return half_subnormals();
  }
  std::vector<Measurement> take() { return std::move(found_); }

 private:
  [[nodiscard]] double at_least() const { return options_.quick ? 0.01 : 0.3; }
  void add(std::string name, double value, std::string unit, std::string remark) { found_.push_back({std::move(name), value, std::move(unit), std::move(remark), true}); }
  void skip(std::string name, std::string why) { found_.push_back({std::move(name), 0, "", std::move(why), false}); }

  /// The kernel of down_proj on the model's shape: what decode does most of the time.
  Result<void> read_weights() {
    ops::DownResidual::Problem problem;
    problem.linear = {.out_features = options_.quick ? 512 : 5120, .in_features = options_.quick ? 1024 : 17408, .scheme = ops::WeightScheme::kFp8Block};
    const auto choice = ops::select(backends::kernel_table(device_.traits().platform).list<ops::DownResidual>(), problem, device_.traits(), {});
    if (choice.chosen == nullptr) {
      skip("decode_read_bandwidth", fmt::format("no kernel for down_residual: {}", choice.answers.empty() ? std::string(choice.why_absent) : choice.answers.back().verdict.reason));
      return {};
    }
    ASSIGN_OR_RETURN(const auto kernel, choice.chosen->make(problem, device_));
    Trial trial(device_, stream_);
    ASSIGN_OR_RETURN(const ops::LinearSource weight, trial.linear(problem.linear));
    constexpr size_t kCopies = 2;  // in turns, so that no cache holds what comes next
    const ops::Buffer* packed[kCopies];
    for (auto& buffer : packed) {
      ASSIGN_OR_RETURN(buffer, trial.pack(*kernel, [&](ops::Buffer& memory) { kernel->pack(weight, memory, stream_); }));
    }
    for (const int32_t rows : {1, 8, 16}) {
      ASSIGN_OR_RETURN(const selftest::Step step, trial.step({{.slot = 0, .num_rows = rows, .kind = ops::RowKind::kDecode}}, {}));
      ASSIGN_OR_RETURN(const ops::TensorView in, trial.uniform(problem.activation, {rows, problem.linear.in_features}, -1, 1));
      ASSIGN_OR_RETURN(const ops::TensorView x, trial.uniform(problem.activation, {rows, problem.linear.out_features}, -1, 1));
      ASSIGN_OR_RETURN(ops::Launch launch, trial.launch(*kernel, rows));
      size_t turn = 0;
      ASSIGN_OR_RETURN(const double seconds, seconds_each(stream_, at_least(), [&] { kernel->enqueue(step.rows, {ops::ActivationLayout::kPlain, in, {}}, *packed[turn++ % kCopies], x, launch); }));
      const auto bytes = static_cast<double>(problem.linear.packed_bytes());
      add(rows == 1 ? "decode_read_bandwidth" : fmt::format("decode_read_bandwidth_{}_rows", rows), bytes / seconds, "bytes/s",
          fmt::format("{} of down_residual [{}, {}], block fp8, {} row{}: {:.1f} us", choice.chosen->name, problem.linear.out_features, problem.linear.in_features, rows, rows == 1 ? "" : "s", seconds * 1e6));
    }
    return {};
  }

  Result<void> copy_memory() {
    const auto size = static_cast<int64_t>(options_.quick ? 4 * kMiB : 256 * kMiB);
    ASSIGN_OR_RETURN(const auto from, device_.allocate(static_cast<size_t>(size), "probe"));
    ASSIGN_OR_RETURN(const auto to, device_.allocate(static_cast<size_t>(size), "probe"));
    ASSIGN_OR_RETURN(const auto host, device_.allocate_host(static_cast<size_t>(size), "probe"));
    const ops::TensorView source{from.get(), 0, DType::kU8, {size}}, destination{to.get(), 0, DType::kU8, {size}};
    const std::string remark = fmt::format("{} MiB at a time", size / static_cast<int64_t>(kMiB));
    ASSIGN_OR_RETURN(const double inside, seconds_each(stream_, at_least(), [&] { stream_.copy(source, destination); }));
    add("device_copy_bandwidth", 2 * static_cast<double>(size) / inside, "bytes/s", remark + ", reading and writing");
    ASSIGN_OR_RETURN(const double up, seconds_each(stream_, at_least(), [&] { stream_.copy_to_device(host->address(), destination); }));
    add("host_to_device_bandwidth", static_cast<double>(size) / up, "bytes/s", remark + ", page-locked");
    ASSIGN_OR_RETURN(const double down, seconds_each(stream_, at_least(), [&] { stream_.copy_to_host(source, host->address()); }));
    add("device_to_host_bandwidth", static_cast<double>(size) / down, "bytes/s", remark + ", page-locked");
    constexpr int64_t kRow = 10240;  // a row of the model
    ASSIGN_OR_RETURN(const double small_up, seconds_each(stream_, at_least(), [&] { stream_.copy_to_device(host->address(), destination.first(kRow)); }));
    add("host_to_device_row", small_up, "s", "10 KiB, one after the other");
    ASSIGN_OR_RETURN(const double small_down, seconds_each(stream_, at_least(), [&] { stream_.copy_to_host(source.first(kRow), host->address()); }));
    add("device_to_host_row", small_down, "s", "10 KiB, one after the other");
    return {};
  }

  /// The smallest kernel there is, again and again on the same memory.
  Result<void> launch() {
    const ops::Combine::Problem problem{.hidden = 128, .num_ranks = 1};
    const auto choice = ops::select(backends::kernel_table(device_.traits().platform).list<ops::Combine>(), problem, device_.traits(), {});
    if (choice.chosen == nullptr) {
      skip("launch_interval", "no kernel for combine");
      return {};
    }
    ASSIGN_OR_RETURN(const auto kernel, choice.chosen->make(problem, device_));
    Trial trial(device_, stream_);
    ASSIGN_OR_RETURN(const ops::TensorView partial, trial.uniform(problem.activation, {1, problem.hidden}, -1, 1));
    ASSIGN_OR_RETURN(const ops::TensorView x, trial.uniform(problem.activation, {1, problem.hidden}, -1, 1));
    ASSIGN_OR_RETURN(ops::Launch go, trial.launch(*kernel, 1));
    const auto enqueue = [&] { kernel->enqueue({&partial, 1}, x, go); };
    ASSIGN_OR_RETURN(const double interval, seconds_each(stream_, at_least(), enqueue));
    add("launch_interval", interval, "s", fmt::format("{} of one row, each waiting for the last", choice.chosen->name));
    const int64_t count = options_.quick ? 64 : 1024;
    Clock::time_point begin = Clock::now();
    for (int64_t i = 0; i < count; ++i) enqueue();
    const double enqueued = seconds_since(begin);
    RETURN_IF_ERROR(stream_.finish());
    add("enqueue", enqueued / static_cast<double>(count), "s", "of host time for such a launch");
    begin = Clock::now();
    for (int64_t i = 0; i < count; ++i) {
      enqueue();
      RETURN_IF_ERROR(stream_.finish());
    }
    add("launch_and_wait", seconds_since(begin) / static_cast<double>(count), "s", "launched, awaited, and again");
    return {};
  }

  /// Whether device memory is kept in host memory as well (a context of several cards did that).
  Result<void> mirror_memory() {
    if (device_.reads_host_memory()) {
      skip("host_mirror", "its memory is the host's");
      return {};
    }
    constexpr int64_t kPiece = 4 * static_cast<int64_t>(kMiB);
    const auto size = static_cast<int64_t>(options_.quick ? 32 * kMiB : std::min<uint64_t>(2048 * kMiB, device_.traits().memory_bytes / 8)) / kPiece * kPiece;
    ASSIGN_OR_RETURN(const auto host, device_.allocate_host(static_cast<size_t>(kPiece), "probe"));
    std::fill_n(host->address(), kPiece, std::byte{1});
    const double resident = resident_bytes(), available = available_bytes();
    ASSIGN_OR_RETURN(const auto memory, device_.allocate(static_cast<size_t>(size), "probe"));
    const ops::TensorView all{memory.get(), 0, DType::kU8, {size}};
    for (int64_t at = 0; at < size; at += kPiece) stream_.copy_to_device(host->address(), all.part(at, kPiece));
    RETURN_IF_ERROR(stream_.finish());
    const auto bytes = static_cast<double>(size);
    add("host_mirror", (resident_bytes() - resident) / bytes, "of the buffer", fmt::format("growth of this process while {} MiB of device memory were written", size / static_cast<int64_t>(kMiB)));
    add("host_mirror_system", (available - available_bytes()) / bytes, "of the buffer", "the same as MemAvailable has it");
    return {};
  }
  static double resident_bytes() {
    std::ifstream file("/proc/self/statm");
    double pages = 0;
    file >> pages >> pages;
    return pages * static_cast<double>(sysconf(_SC_PAGESIZE));
  }
  static double available_bytes() {
    std::ifstream file("/proc/meminfo");
    for (std::string word; file >> word;)
      if (word == "MemAvailable:") {
        double kib = 0;
        file >> kib;
        return kib * 1024;
      }
    return 0;
  }

  Result<void> half_subnormals() {
    ASSIGN_OR_RETURN(const std::optional<bool> flushed, backends::flushes_half_subnormals(device_));
    if (!flushed) skip("half_subnormals", "no matrix units that this build has kernels of half operands for");
    else add("half_subnormals", *flushed ? 0 : 1, "", *flushed ? "the matrix units take them for zeros: weights are scaled first" : "the matrix units keep them");
    return {};
  }

  ops::Device& device_;
  ops::Stream& stream_;
  const ProbeOptions& options_;
  std::vector<Measurement> found_;
};

/// Row counts of the self-test and around the edges of tiles, in lists that fit its sequences.
std::vector<std::vector<int32_t>> row_counts(bool quick) {
  if (quick) return {{1, 3, 65, 193}};
  return {{1, 3, 65, 193}, {2, 4, 5, 7, 8}, {9, 15, 16, 17}, {31, 32, 33}, {63, 64, 128}};
}

}  // namespace

Result<HardwareProbe> probe_hardware(const std::string& name, const ProbeOptions& options) {
  HardwareProbe probe;
  probe.device = name;
  ASSIGN_OR_RETURN(const auto device, backends::open_device(name, {.num_threads = options.num_threads}));
  probe.name = device->traits().name;
  ASSIGN_OR_RETURN(const auto stream, device->make_stream());

  ASSIGN_OR_RETURN(const ExecutionPlan plan, plan_reference_model(name));
  const Clock::time_point begin = Clock::now();
  ASSIGN_OR_RETURN(const SelfTestReport tested, self_test(plan, plan.ranks[0], backends::kernel_table(device->traits().platform), {}, *device, row_counts(options.quick)));
  probe.op_test_seconds = seconds_since(begin);
  probe.num_op_tests = tested.num_tested;
  probe.op_faults = tested.faults;

  Probe measuring(*device, *stream, options);
  RETURN_IF_ERROR(measuring.run());
  probe.measurements = measuring.take();
  return probe;
}

}  // namespace quern::worker
