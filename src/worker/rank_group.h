#pragma once

#include <chrono>
#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <vector>

#include "base/bounded_queue.h"
#include "ops/collective.h"
#include "worker/device_worker.h"
#include "worker/plan.h"
#include "worker/remote_ranks.h"
#include "worker/worker_group.h"

namespace quern::worker {

/// Devices of this process's ranks and what joins them, in the order of ExecutionPlan::ranks.
struct JoinedDevices {
  std::vector<std::unique_ptr<ops::Device>> devices;
  std::vector<std::unique_ptr<ops::Collective>> stage, pipeline;  // null where a rank is alone in it
  std::vector<std::unique_ptr<StageLink>> processes;              // likewise, where every stage is a process
  [[nodiscard]] RankLinks links(size_t rank) const { return {stage[rank].get(), pipeline[rank].get(), processes[rank].get()}; }
};

/// Joins devices that are open: those of each stage, and those of each tp_rank along the pipeline, where `processes` says by way of the processes that have the stages.
Result<void> join_ranks(const ExecutionPlan& plan, JoinedDevices& joined, Processes* processes = nullptr);

/// All ranks: those in this process, one DeviceWorker each, and those of other processes. Every step goes to all of them; what the first rank of the last stage says of it counts. A rank that
/// fails fails all steps that are in flight or follow, at once: others may never come back, from a driver that does not return. Those that wait for it are woken. A member that is longer at a
/// step than ExecutionPlan::step_timeout fails so, too.
class RankGroup final : public WorkerGroup {
 public:
  /// `runners` are this process's, `others` one for each process behind it: none but in process 0.
  RankGroup(const ExecutionPlan& plan, JoinedDevices devices, std::vector<std::unique_ptr<ModelRunner>> runners, std::vector<std::unique_ptr<RemoteRanks>> others = {});
  ~RankGroup() override;

  /// As submit(StepPlan) of a plan that process 0's group has completed. From one thread, which may be another than that which takes results.
  void submit(RankStep step);

  [[nodiscard]] const WorkerLimits& limits() const override { return limits_; }
  void submit(StepPlan plan) override;
  void submit_masks(StepMasks masks) override;
  StepResult wait() override;
  std::optional<StepResult> wait_or_wake() override { return finished(results_.pop_or_wake()); }
  void wake() override { results_.wake(); }
  std::optional<StepResult> poll() override { return finished(results_.try_pop()); }

  /// From any thread: as if a rank had failed.
  void abort(const Error& error);

 private:
  using Clock = std::chrono::steady_clock;
  /// A step that not all members have done.
  struct Pending {
    size_t num_missing = 0;
    StepResult result;
    Clock::time_point begin;
  };
  /// Fails the group when a member is too long at a step: its driver may never come back.
  void watch(const std::stop_token& stop);
  /// The step that a member has been at for too long.
  struct Overdue {
    size_t member;
    uint64_t step;
  };
  [[nodiscard]] std::optional<Overdue> overdue() const;  // under mutex_
  void take(size_t member, StepResult result);
  void fail(size_t member, const Error& error);
  /// What the engine sees of a result.
  std::optional<StepResult> finished(std::optional<StepResult> result);

  static constexpr size_t kQueueLength = 72;  // more steps than an engine keeps in flight
  WorkerLimits limits_;
  size_t reporter_;                                        // the member whose result counts: the first rank of the last stage, its process, or this process's first rank
  std::vector<std::string> names_;                         // of the members; none where one is alone
  JoinedDevices devices_;                                  // outlive the members
  std::deque<std::shared_ptr<const StepPlan>> in_flight_;  // of a pipeline; the engine's thread alone uses it and slots_; none but where the engine is
  std::optional<SlotValues> slots_;                        // of a pipeline
  BoundedQueue<StepResult> results_{kQueueLength};         // of steps that all members have done
  std::mutex mutex_;                                       // of what follows
  std::deque<Pending> pending_;
  std::vector<size_t> num_done_;                           // of the pending steps, by each member
  std::vector<Clock::time_point> last_done_;               // when each member ended its last
  Clock::time_point resumed_;                              // when the process last went on after it was stopped
  std::optional<Error> failure_;                           // the first
  std::condition_variable_any ends_;
  const std::chrono::milliseconds step_timeout_;
  std::vector<std::unique_ptr<GroupMember>> members_;
  std::jthread watcher_;
};

}  // namespace quern::worker
