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
#include "worker/worker_group.h"

namespace quern::worker {

/// Devices of all ranks and what joins them, in the order of ExecutionPlan::ranks.
struct JoinedDevices {
  std::vector<std::unique_ptr<ops::Device>> devices;
  std::vector<std::unique_ptr<ops::Collective>> stage, pipeline;  // null where a rank is alone in it
  [[nodiscard]] RankLinks links(size_t rank) const { return {stage[rank].get(), pipeline[rank].get()}; }
};

/// Joins devices that are open: those of each stage, and those of each tp_rank along the pipeline.
Result<void> join_ranks(const ExecutionPlan& plan, JoinedDevices& joined);

/// All ranks in this process, one DeviceWorker each. Every step goes to all of them; what the first rank of the last stage says of it counts. A rank that fails fails all steps that are in
/// flight or follow, at once: others may never come back, from a driver that does not return. Those that wait for it are woken. A rank that is longer at a step than ExecutionPlan::step_timeout fails so, too.
class RankGroup final : public WorkerGroup {
 public:
  RankGroup(const ExecutionPlan& plan, JoinedDevices devices, std::vector<std::unique_ptr<ModelRunner>> runners);
  ~RankGroup() override;

  [[nodiscard]] const WorkerLimits& limits() const override { return limits_; }
  void submit(StepPlan plan) override;
  void submit_masks(StepMasks masks) override;
  StepResult wait() override;
  std::optional<StepResult> wait_or_wake() override { return finished(results_.pop_or_wake()); }
  void wake() override { results_.wake(); }
  std::optional<StepResult> poll() override { return finished(results_.try_pop()); }

 private:
  using Clock = std::chrono::steady_clock;
  /// A step that not all ranks have done.
  struct Pending {
    size_t num_missing = 0;
    StepResult result;
    Clock::time_point begin;
  };
  /// Fails the group when a rank is too long at a step: its driver may never come back.
  void watch(const std::stop_token& stop);
  /// The step that a rank has been at for too long.
  struct Overdue {
    size_t rank;
    uint64_t step;
  };
  [[nodiscard]] std::optional<Overdue> overdue() const;  // under mutex_
  void take(size_t rank, StepResult result);
  void fail(size_t rank, const Error& error);
  /// What the engine sees of a result.
  std::optional<StepResult> finished(std::optional<StepResult> result);

  static constexpr size_t kQueueLength = 72;  // more steps than an engine keeps in flight
  WorkerLimits limits_;
  size_t first_of_last_stage_;                             // the rank that reports
  std::vector<std::string> names_;                         // of the ranks' devices
  JoinedDevices devices_;                                  // outlive the workers
  std::deque<std::shared_ptr<const StepPlan>> in_flight_;  // of a pipeline; the engine's thread alone uses it and slots_
  std::optional<SlotValues> slots_;                        // of a pipeline
  BoundedQueue<StepResult> results_{kQueueLength};         // of steps that all ranks have done
  std::mutex mutex_;                                       // of what follows
  std::deque<Pending> pending_;
  std::vector<size_t> num_done_;                           // of the pending steps, by each rank
  std::vector<Clock::time_point> last_done_;               // when each rank ended its last
  Clock::time_point resumed_;                              // when the process last went on after it was stopped
  std::optional<Error> failure_;                           // the first
  std::condition_variable_any ends_;
  const std::chrono::milliseconds step_timeout_;
  std::vector<std::unique_ptr<DeviceWorker>> workers_;
  std::jthread watcher_;
};

}  // namespace quern::worker
