#include "worker/start.h"

#include <atomic>
#include <mutex>
#include <numeric>
#include <thread>

#include "backends/platforms.h"
#include "base/log.h"
#include "worker/rank_devices.h"
#include "worker/rank_group.h"
#include "worker/selftest.h"

namespace quern::worker {
namespace {

double gib(uint64_t bytes) { return static_cast<double>(bytes) / (1ull << 30); }

/// "rank 1 (cuda:1)"
std::string name_of(const ExecutionPlan& plan, size_t rank) { return fmt::format("rank {} ({})", rank, plan.ranks[rank].device); }

/// work(rank), each on a thread of its own; the error that came first, with the rank's name.
template <class Work>
Result<void> on_every_rank(const ExecutionPlan& plan, std::atomic<bool>& stop, const Work& work) {
  std::mutex mutex;
  Result<void> outcome;
  const auto run = [&](size_t rank) {
    const Result<void> done = work(rank);
    if (done) return;
    const std::lock_guard lock(mutex);
    if (!stop.exchange(true)) outcome = plan.ranks.size() == 1 ? done.error() : done.error().with_context(name_of(plan, rank));
  };
  std::vector<std::jthread> others;
  for (size_t rank = 1; rank < plan.ranks.size(); ++rank) others.emplace_back(run, rank);
  run(0);
  others.clear();
  return outcome;
}

Result<JoinedDevices> open_devices(const ExecutionPlan& plan) {
  JoinedDevices joined;
  std::vector<std::string> names;
  for (const RankPlan& rank : plan.ranks) names.push_back(rank.device);
  const backends::DeviceOptions options{
      .num_threads = plan.options.num_threads, .num_sharing = num_sharing_cpu(names), .quantizes_activations = plan.options.quantize_activations};
  for (const std::string& name : names) {
    ASSIGN_OR_RETURN(joined.devices.emplace_back(), backends::open_device(name, options));
  }
  RETURN_IF_ERROR(join_ranks(plan, joined));
  return joined;
}

/// Candidates that the self-test of any rank found wrong are used by none: ranks that share a layer have to compute alike.
Result<ops::SelectionRules> tested_rules(const ExecutionPlan& plan, const ops::KernelTable& table, const JoinedDevices& joined) {
  ops::SelectionRules rules;
  rules.forced = plan.options.kernels;
  std::vector<SelfTestReport> reports(plan.ranks.size());
  std::atomic<bool> stop = false;
  RETURN_IF_ERROR(on_every_rank(plan, stop, [&](size_t rank) -> Result<void> {
    ASSIGN_OR_RETURN(reports[rank], self_test(plan, plan.ranks[rank], table, rules, *joined.devices[rank]));
    return {};
  }));
  for (size_t rank = 0; rank < reports.size(); ++rank)
    for (const SelfTestReport::Fault& fault : reports[rank].faults) {
      log_error("self-test: {} {} failed on {} and is not used: {}", fault.op, fault.candidate, joined.devices[rank]->traits().name, fault.reason);
      rules.disabled.emplace(fmt::format("{} {}", fault.op, fault.candidate), fmt::format("its self-test failed: {}", fault.reason));
    }
  return rules;
}

/// What all ranks have loaded together.
class CommonProgress {
 public:
  CommonProgress(size_t num_ranks, const LoadProgress& progress) : shares_(num_ranks), progress_(progress) {}
  LoadProgress of(size_t rank) {
    if (!progress_) return {};
    return [this, rank](double share) {
      const std::lock_guard lock(mutex_);
      shares_[rank] = share;
      progress_(std::accumulate(shares_.begin(), shares_.end(), 0.0) / static_cast<double>(shares_.size()));
    };
  }

 private:
  std::mutex mutex_;
  std::vector<double> shares_;
  const LoadProgress& progress_;
};

}  // namespace

Result<std::unique_ptr<WorkerGroup>> start_workers(const ExecutionPlan& plan, const LoadProgress& progress, ActivationRanges* ranges, weights::WeightSource* source) {
  if (const std::string refusals = plan.refusals(); !refusals.empty()) return make_error(ErrorCode::kUnsupported, "{}", refusals);
  if (!plan.fits) return make_error(ErrorCode::kResourceExhausted, "{} {}", plan.config.name, plan.verdict);
  if (ranges != nullptr && plan.ranks.size() > 1) return make_error(ErrorCode::kUnsupported, "activation ranges are taken on one device: -tp 1 -pp 1");

  ASSIGN_OR_RETURN(JoinedDevices joined, open_devices(plan));
  const ops::KernelTable& table = backends::kernel_table(plan.traits.platform);
  ASSIGN_OR_RETURN(const ops::SelectionRules rules, tested_rules(plan, table, joined));
  std::unique_ptr<weights::WeightSource> own_source;
  if (source == nullptr) {
    ASSIGN_OR_RETURN(own_source, weights::open_weights(plan.options.model_dir, plan.config, plan.options.load));
    source = own_source.get();
  }

  std::vector<std::unique_ptr<ModelRunner>> runners(plan.ranks.size());
  CommonProgress common(plan.ranks.size(), progress);
  std::atomic<bool> stop = false;
  RETURN_IF_ERROR(on_every_rank(plan, stop, [&](size_t rank) -> Result<void> {
    ASSIGN_OR_RETURN(runners[rank], ModelRunner::create(plan, rank, *source,
                                                        {.table = table, .rules = rules, .device = *joined.devices[rank], .links = joined.links(rank), .progress = common.of(rank), .stop_loading = &stop}));
    return {};
  }));
  if (ranges != nullptr) {
    ASSIGN_OR_RETURN(const auto stream, joined.devices[0]->make_stream());
    RETURN_IF_ERROR(ranges->prepare(plan, *source, *joined.devices[0], *stream));
    runners[0]->observe(*ranges);
  }
  for (size_t rank = 0; rank < runners.size(); ++rank) {
    const MemoryPlan& memory = plan.ranks[rank].memory;
    const std::string name = plan.ranks.size() == 1 ? joined.devices[0]->traits().name : name_of(plan, rank);
    const auto used = joined.devices[rank]->used_bytes();
    log_info("{} loaded on {}: {:.3f} GiB of device memory, {:.3f} GiB planned{}", plan.config.name, name, gib(joined.devices[rank]->allocated_bytes()), gib(memory.planned_allocations()),
             used ? fmt::format("; {:.3f} GiB of {:.3f} GiB are in use, {:.3f} GiB may be", gib(*used), gib(memory.device_bytes), gib(memory.budget_bytes)) : std::string());
    if (used && *used > memory.budget_bytes)
      log_warning("{}: {:.3f} GiB are in use, over --gpu-memory-utilization {} by {:.3f} GiB; is another program on the device?", name, gib(*used), plan.options.memory_utilization,
                  gib(*used - memory.budget_bytes));
  }
  return std::unique_ptr<WorkerGroup>(std::make_unique<RankGroup>(plan, std::move(joined), std::move(runners)));
}

std::vector<std::string> describe_devices() { return backends::describe_devices(); }

}  // namespace quern::worker
