#pragma once

#include <memory>
#include <thread>

#include "base/bounded_queue.h"
#include "worker/model_runner.h"
#include "worker/worker_group.h"

namespace quern::worker {

/// One device behind one thread: takes plans from a queue, runs them in order, puts the results into another.
class DeviceWorker final : public WorkerGroup {
 public:
  DeviceWorker(const WorkerLimits& limits, std::unique_ptr<ops::Device> device, std::unique_ptr<ModelRunner> runner);
  ~DeviceWorker() override;

  [[nodiscard]] const WorkerLimits& limits() const override { return limits_; }
  void submit(StepPlan plan) override;
  void submit_masks(StepMasks masks) override;
  StepResult wait() override;
  std::optional<StepResult> poll() override;

 private:
  void work();

  static constexpr size_t kQueueLength = 8;  // more steps than an engine keeps in flight
  WorkerLimits limits_;
  std::unique_ptr<ops::Device> device_;      // outlives the runner
  std::unique_ptr<ModelRunner> runner_;
  BoundedQueue<StepPlan> plans_{kQueueLength};
  BoundedQueue<StepMasks> masks_{kQueueLength};
  BoundedQueue<StepResult> results_{kQueueLength};
  std::jthread thread_;
};

}  // namespace quern::worker
