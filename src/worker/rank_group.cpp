#include "worker/rank_group.h"

#include <pthread.h>

#include <algorithm>

#include "backends/platforms.h"
#include "base/log.h"

namespace quern::worker {
namespace {

/// Joins ranks first, first + stride, ... first + (count - 1) stride; `ends` gets their ends.
Result<void> join(const JoinedDevices& joined, const ops::CollectiveOptions& options, size_t first, size_t count, size_t stride,
                  std::vector<std::unique_ptr<ops::Collective>>& ends) {
  std::vector<ops::Device*> devices;
  for (size_t i = 0; i < count; ++i) devices.push_back(joined.devices[first + i * stride].get());
  ASSIGN_OR_RETURN(auto group, backends::connect(devices, options));
  for (size_t i = 0; i < count; ++i) ends[first + i * stride] = std::move(group[i]);
  return {};
}

}  // namespace

Result<void> join_ranks(const ExecutionPlan& plan, JoinedDevices& joined, Processes* processes) {
  const ops::CollectiveOptions options = plan.collective_options();
  const auto tp_size = static_cast<size_t>(plan.options.tp_size), num_here = joined.devices.size();
  CHECK(num_here == static_cast<size_t>(plan.local_ranks().size()) && num_here % tp_size == 0);
  joined.stage.resize(num_here);
  joined.pipeline.resize(num_here);
  joined.processes.resize(num_here);
  const size_t stages_here = num_here / tp_size;
  if (tp_size > 1)
    for (size_t stage = 0; stage < stages_here; ++stage) RETURN_IF_ERROR(join(joined, options, stage * tp_size, tp_size, 1, joined.stage));
  for (size_t tp_rank = 0; tp_rank < tp_size; ++tp_rank) {
    if (stages_here > 1) RETURN_IF_ERROR(join(joined, options, tp_rank, stages_here, tp_size, joined.pipeline));
    if (processes == nullptr) continue;
    const Shard& shard = plan.ranks[static_cast<size_t>(plan.local_ranks().begin) + tp_rank].shard;
    joined.processes[tp_rank] = std::make_unique<StageLink>(
        *processes, StageLink::Place{.rank = shard.rank(), .tp_rank = shard.tp_rank, .stage = shard.pp_rank, .tp_size = shard.tp_size}, options.deadline);
  }
  return {};
}

RankGroup::RankGroup(const ExecutionPlan& plan, JoinedDevices devices, std::vector<std::unique_ptr<ModelRunner>> runners, std::vector<std::unique_ptr<RemoteRanks>> others)
    : limits_(plan.limits),
      devices_(std::move(devices)),
      num_done_(runners.size() + others.size()),
      last_done_(runners.size() + others.size()),
      step_timeout_(plan.step_timeout()) {
  if (limits_.num_stages > 1 && plan.process == 0) slots_.emplace(limits_.num_slots, limits_.k_max);
  for (size_t i = 0; i < runners.size(); ++i) names_.push_back(plan.rank_name(static_cast<size_t>(plan.local_ranks().begin) + i));
  for (const auto& other : others) names_.push_back(other->name());
  if (plan.ranks.size() == 1) names_.clear();
  reporter_ = others.empty() ? runners.size() - static_cast<size_t>(plan.options.tp_size) : runners.size() + others.size() - 1;
  const auto reports_as = [this](size_t member) { return [this, member](StepResult result) { take(member, std::move(result)); }; };
  for (auto& runner : runners) members_.push_back(std::make_unique<DeviceWorker>(std::move(runner), reports_as(members_.size())));
  std::vector<RemoteRanks*> remote;
  for (auto& other : others) {
    remote.push_back(other.get());
    members_.push_back(std::move(other));
  }
  // All members are there before one may fail.
  for (size_t i = 0; i < remote.size(); ++i) remote[i]->report_to(reports_as(runners.size() + i));
  watcher_ = std::jthread([this](const std::stop_token& stop) { watch(stop); });
}

RankGroup::~RankGroup() {
  watcher_.request_stop();
  watcher_.join();
  results_.close();
  for (const auto& member : members_) member->close();  // all before any is waited for: they wait for each other
  for (const auto& member : members_) member->join();   // all before any goes: one that fails tells the others
}

void RankGroup::submit(StepPlan plan) {
  RankStep step{.plan = std::make_shared<const StepPlan>(std::move(plan))};
  if (slots_) {
    for (const auto& other : in_flight_)
      for (const StepRun& run : step.plan->runs)
        CHECK_MSG(std::none_of(other->runs.begin(), other->runs.end(), [&](const StepRun& earlier) { return earlier.slot == run.slot; }), "a sequence has one step in flight in a pipeline");
    slots_->apply(step.plan->state_ops);
    in_flight_.push_back(step.plan);
    step.slots = std::make_shared<const SlotValues>(*slots_);
  }
  submit(std::move(step));
}

void RankGroup::submit(RankStep step) {
  {
    const std::lock_guard lock(mutex_);
    if (failure_) {
      CHECK(results_.push({.step = step.plan->step, .error = failure_}));
      return;
    }
    pending_.push_back({.num_missing = members_.size(), .result = {.step = step.plan->step}, .begin = Clock::now()});
  }
  // Where the values are kept, the stage that samples is left out: it has them already.
  for (size_t member = 0; member < members_.size(); ++member) members_[member]->submit(member < reporter_ || !slots_ ? step : RankStep{.plan = step.plan});
}

void RankGroup::submit_masks(StepMasks masks) {
  for (size_t member = reporter_; member < members_.size(); ++member) members_[member]->submit_masks(masks);
}

StepResult RankGroup::wait() {
  std::optional<StepResult> result = finished(results_.pop());
  CHECK(result.has_value());
  return std::move(*result);
}

std::optional<StepResult> RankGroup::finished(std::optional<StepResult> result) {
  if (!result || !slots_) return result;
  slots_->advance(*in_flight_.front(), *result);
  in_flight_.pop_front();
  return result;
}

/// One result of all members' of a step.
void RankGroup::take(size_t member, StepResult result) {
  if (result.error) fail(member, *result.error);
  const std::lock_guard lock(mutex_);
  if (failure_) return;
  last_done_[member] = Clock::now();
  Pending& step = pending_[num_done_[member]++];
  if (member == reporter_) step.result = std::move(result);
  if (--step.num_missing > 0) return;
  // Members bring their results in order, so that what is complete is the oldest.
  static_cast<void>(results_.push(std::move(step.result)));
  pending_.pop_front();
  for (size_t& done : num_done_) --done;
}

void RankGroup::watch(const std::stop_token& stop) {
  pthread_setname_np(pthread_self(), "quern-watch");
  std::unique_lock lock(mutex_);
  Clock::time_point looked = Clock::now();
  while (!failure_ && !ends_.wait_for(lock, stop, step_timeout_ / 8, [] { return false; })) {
    if (stop.stop_requested()) return;
    const Clock::time_point now = Clock::now();
    if (now - looked > step_timeout_ / 2) resumed_ = now;  // this process has not run, so nobody has waited
    looked = now;
    const std::optional<Overdue> late = overdue();
    if (!late) continue;
    lock.unlock();
    fail(late->member, make_error(ErrorCode::kInternal, "step {} has not ended after {:.1f} s (--step-timeout): the device, or its driver, does not answer", late->step,
                                  std::chrono::duration<double>(step_timeout_).count()));
    lock.lock();
  }
}

std::optional<RankGroup::Overdue> RankGroup::overdue() const {
  const Clock::time_point now = Clock::now();
  for (size_t member = 0; member < num_done_.size(); ++member) {
    if (num_done_[member] == pending_.size()) continue;
    const Pending& step = pending_[num_done_[member]];
    if (now - std::max({step.begin, last_done_[member], resumed_}) > step_timeout_) return Overdue{member, step.result.step};
  }
  return std::nullopt;
}

void RankGroup::fail(size_t member, const Error& error) { abort(names_.empty() ? error : error.with_context(names_[member])); }

void RankGroup::abort(const Error& first) {
  {
    const std::lock_guard lock(mutex_);
    if (failure_) return;
    failure_ = first;
    for (Pending& step : pending_) static_cast<void>(results_.push({.step = step.result.step, .error = first}));
    pending_.clear();
  }
  if (!names_.empty()) log_error("{}; the other ranks are told to give up", first.message);
  for (const auto& other : members_) other->abort(first);
}

}  // namespace quern::worker
