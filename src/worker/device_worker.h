#pragma once

#include <memory>
#include <thread>

#include "base/bounded_queue.h"
#include "worker/model_runner.h"
#include "worker/worker_group.h"

namespace quern::worker {

/// One device behind two threads: one takes plans from a queue and enqueues them in order, the other waits for the device and puts the results into a queue.
/// So a step is enqueued while the one before it is computed, and its masks may depend on what that one brings.
class DeviceWorker final : public WorkerGroup {
 public:
  DeviceWorker(const WorkerLimits& limits, std::unique_ptr<ops::Device> device, std::unique_ptr<ModelRunner> runner);
  ~DeviceWorker() override;

  [[nodiscard]] const WorkerLimits& limits() const override { return limits_; }
  void submit(StepPlan plan) override;
  void submit_masks(StepMasks masks) override;
  StepResult wait() override;
  std::optional<StepResult> wait_or_wake() override;
  void wake() override;
  std::optional<StepResult> poll() override;

 private:
  void submit_steps();
  void collect_results();

  static constexpr size_t kQueueLength = 8;  // more steps than an engine keeps in flight
  WorkerLimits limits_;
  std::unique_ptr<ops::Device> device_;      // outlives the runner
  std::unique_ptr<ModelRunner> runner_;
  BoundedQueue<StepPlan> plans_{kQueueLength};
  BoundedQueue<StepMasks> masks_{kQueueLength};
  BoundedQueue<ModelRunner::InFlight> in_flight_{ModelRunner::kMaxInFlight - 2};  // beside the one that is submitted and the one that is awaited
  BoundedQueue<StepResult> results_{kQueueLength};
  std::jthread collector_, submitter_;
};

}  // namespace quern::worker
