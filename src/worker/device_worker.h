#pragma once

#include <functional>
#include <memory>
#include <thread>

#include "base/bounded_queue.h"
#include "worker/model_runner.h"

namespace quern::worker {

/// A step as every rank gets it.
struct RankStep {
  std::shared_ptr<const StepPlan> plan;
  std::shared_ptr<const SlotValues> slots;  // null: the device has them, or gets them from nobody
};

/// One rank behind two threads: one takes steps from a queue and enqueues them in order, the other waits for the device and hands the results over.
/// So a step is enqueued while the one before it is computed, and its masks may depend on what that one brings.
class DeviceWorker {
 public:
  /// `on_result` is called with the result of every step, in order, from a thread of the worker.
  DeviceWorker(std::unique_ptr<ModelRunner> runner, std::function<void(StepResult)> on_result);
  ~DeviceWorker();

  void submit(RankStep step);
  void submit_masks(StepMasks masks);
  /// No more steps come; those submitted are still computed.
  void close();
  /// Waits until they are, after close().
  void join();
  /// From any thread: no wait for another rank goes on.
  void abort(const Error& error) { runner_->abort(error); }

 private:
  void submit_steps();
  void collect_results();

  static constexpr size_t kQueueLength = 72;  // more steps than an engine keeps in flight
  std::unique_ptr<ModelRunner> runner_;
  std::function<void(StepResult)> on_result_;
  BoundedQueue<RankStep> steps_{kQueueLength};
  BoundedQueue<StepMasks> masks_{kQueueLength};
  BoundedQueue<ModelRunner::InFlight> in_flight_{ModelRunner::kMaxInFlight - 2};  // beside the one that is submitted and the one that is awaited
  std::jthread collector_, submitter_;
};

}  // namespace quern::worker
