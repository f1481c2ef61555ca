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

Result<void> join_ranks(const ExecutionPlan& plan, JoinedDevices& joined) {
  const ops::CollectiveOptions options = plan.collective_options();
  const auto tp_size = static_cast<size_t>(plan.options.tp_size), pp_size = static_cast<size_t>(plan.options.pp_size);
  joined.stage.resize(plan.ranks.size());
  joined.pipeline.resize(plan.ranks.size());
  if (tp_size > 1)
    for (size_t stage = 0; stage < pp_size; ++stage) RETURN_IF_ERROR(join(joined, options, stage * tp_size, tp_size, 1, joined.stage));
  if (pp_size > 1)
    for (size_t tp_rank = 0; tp_rank < tp_size; ++tp_rank) RETURN_IF_ERROR(join(joined, options, tp_rank, pp_size, tp_size, joined.pipeline));
  return {};
}

RankGroup::RankGroup(const ExecutionPlan& plan, JoinedDevices devices, std::vector<std::unique_ptr<ModelRunner>> runners)
    : limits_(plan.limits),
      first_of_last_stage_(runners.size() - static_cast<size_t>(plan.options.tp_size)),
      devices_(std::move(devices)),
      num_done_(runners.size()),
      last_done_(runners.size()),
      step_timeout_(plan.step_timeout()) {
  if (limits_.num_stages > 1) slots_.emplace(limits_.num_slots, limits_.k_max);
  for (const RankPlan& rank : plan.ranks) names_.push_back(rank.device);
  for (size_t rank = 0; rank < runners.size(); ++rank)
    workers_.push_back(std::make_unique<DeviceWorker>(std::move(runners[rank]), [this, rank](StepResult result) { take(rank, std::move(result)); }));
  watcher_ = std::jthread([this](const std::stop_token& stop) { watch(stop); });
}

RankGroup::~RankGroup() {
  watcher_.request_stop();
  watcher_.join();
  results_.close();
  for (const auto& worker : workers_) worker->close();  // all before any is waited for: they wait for each other
  for (const auto& worker : workers_) worker->join();   // all before any goes: one that fails tells the others
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
  {
    const std::lock_guard lock(mutex_);
    if (failure_) {
      CHECK(results_.push({.step = step.plan->step, .error = failure_}));
      return;
    }
    pending_.push_back({.num_missing = workers_.size(), .result = {.step = step.plan->step}, .begin = Clock::now()});
  }
  for (size_t rank = 0; rank < workers_.size(); ++rank) workers_[rank]->submit(rank < first_of_last_stage_ ? step : RankStep{.plan = step.plan});
}

void RankGroup::submit_masks(StepMasks masks) {
  for (size_t rank = first_of_last_stage_; rank < workers_.size(); ++rank) workers_[rank]->submit_masks(masks);
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

/// One result of all ranks' of a step.
void RankGroup::take(size_t rank, StepResult result) {
  if (result.error) fail(rank, *result.error);
  const std::lock_guard lock(mutex_);
  if (failure_) return;
  last_done_[rank] = Clock::now();
  Pending& step = pending_[num_done_[rank]++];
  if (rank == first_of_last_stage_) step.result = std::move(result);
  if (--step.num_missing > 0) return;
  // Ranks bring their results in order, so that what is complete is the oldest.
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
    fail(late->rank, make_error(ErrorCode::kInternal, "step {} has not ended after {:.1f} s (--step-timeout): the device, or its driver, does not answer", late->step,
                                std::chrono::duration<double>(step_timeout_).count()));
    lock.lock();
  }
}

std::optional<RankGroup::Overdue> RankGroup::overdue() const {
  const Clock::time_point now = Clock::now();
  for (size_t rank = 0; rank < num_done_.size(); ++rank) {
    if (num_done_[rank] == pending_.size()) continue;
    const Pending& step = pending_[num_done_[rank]];
    if (now - std::max({step.begin, last_done_[rank], resumed_}) > step_timeout_) return Overdue{rank, step.result.step};
  }
  return std::nullopt;
}

void RankGroup::fail(size_t rank, const Error& error) {
  Error first = names_.size() == 1 ? error : make_error(error.code, "rank {} ({}): {}", rank, names_[rank], error.message);
  {
    const std::lock_guard lock(mutex_);
    if (failure_) return;
    failure_ = first;
    for (Pending& step : pending_) static_cast<void>(results_.push({.step = step.result.step, .error = first}));
    pending_.clear();
  }
  if (names_.size() > 1) log_error("{}; the other ranks are told to give up", first.message);
  for (const auto& worker : workers_) worker->abort(first);
}

}  // namespace quern::worker
