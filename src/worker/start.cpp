#include "worker/start.h"

#include <atomic>
#include <mutex>
#include <numeric>
#include <optional>
#include <thread>

#include "backends/platforms.h"
#include "base/log.h"
#include "worker/rank_devices.h"
#include "worker/process_channel.h"
#include "worker/rank_group.h"
#include "worker/remote_ranks.h"
#include "worker/selftest.h"

namespace quern::worker {
namespace {

double gib(uint64_t bytes) { return static_cast<double>(bytes) / (1ull << 30); }

size_t first_local(const ExecutionPlan& plan) { return static_cast<size_t>(plan.local_ranks().begin); }
size_t num_local(const ExecutionPlan& plan) { return static_cast<size_t>(plan.local_ranks().size()); }

/// work(i) for each of the ranks of this process, on a thread of its own; the error that came first, with the rank's name.
template <class Work>
Result<void> on_every_rank(const ExecutionPlan& plan, std::atomic<bool>& stop, const Work& work) {
  std::mutex mutex;
  Result<void> outcome;
  const auto run = [&](size_t rank) {
    const Result<void> done = work(rank);
    if (done) return;
    const std::lock_guard lock(mutex);
    if (!stop.exchange(true)) outcome = plan.ranks.size() == 1 ? done.error() : done.error().with_context(plan.rank_name(first_local(plan) + rank));
  };
  std::vector<std::jthread> others;
  for (size_t rank = 1; rank < num_local(plan); ++rank) others.emplace_back(run, rank);
  run(0);
  others.clear();
  return outcome;
}

Result<JoinedDevices> open_devices(const ExecutionPlan& plan, Processes* processes) {
  JoinedDevices joined;
  std::vector<std::string> names;
  for (size_t rank = 0; rank < num_local(plan); ++rank) names.push_back(plan.ranks[first_local(plan) + rank].device);
  const int num_processes = processes != nullptr ? processes->num_on_host() : 1;
  const backends::DeviceOptions options{
      .num_threads = plan.options.num_threads, .num_sharing = num_sharing_cpu(names) * num_processes, .quantizes_activations = plan.options.quantize_activations};
  for (const std::string& name : names) {
    ASSIGN_OR_RETURN(joined.devices.emplace_back(), backends::open_device(name, options));
  }
  RETURN_IF_ERROR(join_ranks(plan, joined, processes));
  return joined;
}

/// Candidates that the self-test of any rank found wrong are used by none: ranks that share a layer have to compute alike.
Result<ops::SelectionRules> tested_rules(const ExecutionPlan& plan, const ops::KernelTable& table, const JoinedDevices& joined) {
  ops::SelectionRules rules;
  rules.forced = plan.options.kernels;
  std::vector<SelfTestReport> reports(num_local(plan));
  std::atomic<bool> stop = false;
  RETURN_IF_ERROR(on_every_rank(plan, stop, [&](size_t rank) -> Result<void> {
    ASSIGN_OR_RETURN(reports[rank], self_test(plan, plan.ranks[first_local(plan) + rank], table, rules, *joined.devices[rank]));
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

/// This process's ranks, loaded; `others` are those of the processes behind it. `stop` ends the loading; then the result is worth nothing.
Result<std::unique_ptr<RankGroup>> load_ranks(const ExecutionPlan& plan, CommonProgress& progress, ActivationRanges* ranges, weights::WeightSource* source, Processes* processes,
                                              std::vector<std::unique_ptr<RemoteRanks>>& others, std::atomic<bool>& stop) {
  ASSIGN_OR_RETURN(JoinedDevices joined, open_devices(plan, processes));
  const ops::KernelTable& table = backends::kernel_table(plan.traits.platform);
  ASSIGN_OR_RETURN(const ops::SelectionRules rules, tested_rules(plan, table, joined));
  std::unique_ptr<weights::WeightSource> own_source;
  if (source == nullptr) {
    ASSIGN_OR_RETURN(own_source, weights::open_weights(plan.options.model_dir, plan.config, plan.options.load));
    source = own_source.get();
  }
  std::vector<std::unique_ptr<ModelRunner>> runners(num_local(plan));
  RETURN_IF_ERROR(on_every_rank(plan, stop, [&](size_t rank) -> Result<void> {
    ASSIGN_OR_RETURN(runners[rank], ModelRunner::create(plan, first_local(plan) + rank, *source,
                                                        {.table = table, .rules = rules, .device = *joined.devices[rank], .links = joined.links(rank), .progress = progress.of(rank), .stop_loading = &stop}));
    return {};
  }));
  std::optional<Error> lost;  // where one is lost, nobody waits for the others
  for (const auto& other : others)
    if (const Result<void> loaded = other->wait_until_loaded(stop); !loaded && (!lost || lost->code == ErrorCode::kCancelled)) lost = loaded.error();
  if (lost) return *lost;
  if (stop) return make_error(ErrorCode::kCancelled, "loading was stopped");
  if (ranges != nullptr) {
    ASSIGN_OR_RETURN(const auto stream, joined.devices[0]->make_stream());
    RETURN_IF_ERROR(ranges->prepare(plan, *source, *joined.devices[0], *stream));
    runners[0]->observe(*ranges);
  }
  for (size_t i = 0; i < runners.size(); ++i) {
    const size_t rank = first_local(plan) + i;
    const MemoryPlan& memory = plan.ranks[rank].memory;
    const std::string name = plan.ranks.size() == 1 ? joined.devices[0]->traits().name : plan.rank_name(rank);
    const auto used = joined.devices[i]->used_bytes();
    log_info("{} loaded on {}: {:.3f} GiB of device memory, {:.3f} GiB planned{}", plan.config.name, name, gib(joined.devices[i]->allocated_bytes()), gib(memory.planned_allocations()),
             used ? fmt::format("; {:.3f} GiB of {:.3f} GiB are in use, {:.3f} GiB may be", gib(*used), gib(memory.device_bytes), gib(memory.budget_bytes)) : std::string());
    if (used && *used > memory.budget_bytes)
      log_warning("{}: {:.3f} GiB are in use, over --gpu-memory-utilization {} by {:.3f} GiB; is another program on the device?", name, gib(*used), plan.options.memory_utilization,
                  gib(*used - memory.budget_bytes));
  }
  return std::make_unique<RankGroup>(plan, std::move(joined), std::move(runners), std::move(others));
}

/// Another process than 0, from its loading to the end of steps.
class Follower {
 public:
  Follower(const ExecutionPlan& plan, Processes& processes, const FollowerEvents& events)
      : plan_(plan), processes_(processes), events_(events), progress_(num_local(plan), note_progress_), slots_(plan.limits.num_slots, plan.limits.k_max) {
    channel_.emplace(processes, 0, channel_settings(plan),
                     ProcessChannel::Callbacks{.on_message = [this](Message message) { handle(std::move(message)); },
                                               .on_failure = [this, transport = processes.transport()](const Error& error) {
                                                 fail(make_error(ErrorCode::kInternal, "process 0: {} (transport {})", error.message, transport));
                                               },
                                               .loaded = [this] { return loaded_share_.load(); }});
    channel_->open();
  }
  ~Follower() { channel_.reset(); }  // before what its threads use
  Follower(const Follower&) = delete;
  Follower& operator=(const Follower&) = delete;

  Result<void> run(weights::WeightSource* source) {
    std::vector<std::unique_ptr<RemoteRanks>> none;
    Result<std::unique_ptr<RankGroup>> loaded = load_ranks(plan_, progress_, nullptr, source, &processes_, none, stop_);
    if (const std::optional<Error> failure = this->failure()) return *failure;
    if (!loaded) {
      fail(loaded.error());
      return loaded.error();
    }
    {
      const std::lock_guard lock(mutex_);
      group_ = std::move(*loaded);
    }
    channel_->send(Started{});
    if (events_.on_loaded) events_.on_loaded();
    execute();
    std::unique_ptr<RankGroup> group;
    {
      const std::lock_guard lock(mutex_);
      group = std::move(group_);
    }
    group.reset();
    if (const std::optional<Error> failure = this->failure()) return *failure;
    channel_->send(Ended{});
    return {};
  }

 private:
  /// Hands results on, until all steps are done and no more come, or something has failed.
  void execute() {
    uint64_t num_done = 0;
    const auto goes_on = [&] {
      const std::lock_guard lock(mutex_);
      return !failure_ && !(ends_ && num_done == num_steps_);
    };
    while (goes_on()) {
      std::optional<StepResult> result = group_->wait_or_wake();
      if (!result) continue;
      ++num_done;
      if (result->error) fail(*result->error);
      else channel_->send(*std::move(result));
    }
  }

  void handle(Message message) {
    if (auto* step = std::get_if<SentStep>(&message)) return submit(std::move(*step));
    if (auto* abort = std::get_if<Abort>(&message)) return fail(abort->error.with_context("process 0 has given up"));
    if (std::holds_alternative<Alive>(message)) return;
    if (const auto* masks = std::get_if<StepMasks>(&message))
      if (const Result<void> sound = check_masks(*masks, plan_.limits); !sound) return fail(sound.error());
    {
      const std::lock_guard lock(mutex_);
      if (group_ == nullptr) return;  // failed meanwhile
      if (auto* masks = std::get_if<StepMasks>(&message)) return group_->submit_masks(std::move(*masks));
      if (std::holds_alternative<EndOfSteps>(message)) {
        ends_ = true;
        return group_->wake();
      }
    }
    fail(make_error(ErrorCode::kInternal, "process 0 has sent what it alone receives"));
  }

  void submit(SentStep sent) {
    if (const Result<void> sound = check_step(sent, plan_.limits); !sound) return fail(sound.error());
    RankStep step{.plan = std::make_shared<const StepPlan>(std::move(sent.plan))};
    if (!sent.slots.empty()) {
      set_slots(slots_, sent.slots);
      step.slots = std::make_shared<const SlotValues>(slots_);
    }
    const std::lock_guard lock(mutex_);
    if (group_ == nullptr) return;
    ++num_steps_;
    group_->submit(std::move(step));
  }

  /// The first failure ends everything: loading, steps, waits.
  void fail(const Error& error) {
    {
      const std::lock_guard lock(mutex_);
      if (failure_) return;
      failure_ = error;
      if (group_ != nullptr) {
        group_->abort(error);
        group_->wake();
      }
    }
    stop_ = true;
    if (events_.on_failure) events_.on_failure();
    channel_->send(Abort{error});
  }
  std::optional<Error> failure() {
    const std::lock_guard lock(mutex_);
    return failure_;
  }

  const ExecutionPlan& plan_;
  Processes& processes_;
  const FollowerEvents& events_;
  std::atomic<double> loaded_share_ = 0;
  const LoadProgress note_progress_ = [this](double share) { loaded_share_ = share; };
  CommonProgress progress_;
  SlotValues slots_;  // as they come; of the channel's thread
  std::atomic<bool> stop_ = false;
  std::mutex mutex_;
  // Under mutex_.
  std::optional<Error> failure_;
  bool ends_ = false;
  uint64_t num_steps_ = 0;
  std::unique_ptr<RankGroup> group_;
  std::optional<ProcessChannel> channel_;
};

}  // namespace

Result<std::unique_ptr<WorkerGroup>> start_workers(const ExecutionPlan& plan, const LoadProgress& progress, ActivationRanges* ranges, weights::WeightSource* source, Processes* processes) {
  if (const std::string refusals = plan.refusals(); !refusals.empty()) return make_error(ErrorCode::kUnsupported, "{}", refusals);
  if (!plan.fits) return make_error(ErrorCode::kResourceExhausted, "{} {}", plan.config.name, plan.verdict);
  if (ranges != nullptr && plan.ranks.size() > 1) return make_error(ErrorCode::kUnsupported, "activation ranges are taken on one device: -tp 1 -pp 1");
  CHECK(plan.process == 0 && (processes != nullptr) == !plan.hosts.empty());

  const size_t num_others = processes != nullptr ? static_cast<size_t>(processes->size() - 1) : 0;
  CommonProgress common(num_local(plan) + num_others, progress);
  std::atomic<bool> stop = false;
  std::vector<std::unique_ptr<RemoteRanks>> others;
  for (size_t i = 0; i < num_others; ++i)
    others.push_back(std::make_unique<RemoteRanks>(plan, *processes, static_cast<int32_t>(i + 1), RemoteRanks::Loading{.progress = common.of(num_local(plan) + i), .failed = [&stop] { stop = true; }}));
  Result<std::unique_ptr<RankGroup>> group = load_ranks(plan, common, ranges, source, processes, others, stop);
  if (group) return std::unique_ptr<WorkerGroup>(std::move(*group));
  const Error why = group.error();
  for (const auto& other : others) other->abort(why);
  return why;
}

Result<void> follow_process_0(const ExecutionPlan& plan, Processes& processes, const FollowerEvents& events, weights::WeightSource* source) {
  Follower follower(plan, processes, events);
  return follower.run(source);
}

std::vector<std::string> describe_devices() { return backends::describe_devices(); }

}  // namespace quern::worker
