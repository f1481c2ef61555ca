#pragma once

#include <functional>
#include <memory>
#include <thread>

#include "base/bounded_queue.h"
#include "worker/group_member.h"
#include "worker/model_runner.h"

namespace quern::worker {

/// One rank behind two threads: one takes steps from a queue and enqueues them in order, the other waits for the device and hands the results over.
/// So a step is enqueued while the one before it is computed, and its masks may depend on what that one brings.
class DeviceWorker final : public GroupMember {
 public:
  /// `on_result` is called with the result of every step, in order, from a thread of the worker.
  DeviceWorker(std::unique_ptr<ModelRunner> runner, std::function<void(StepResult)> on_result);
  ~DeviceWorker() override;

  void submit(RankStep step) override;
  void submit_masks(StepMasks masks) override;
  void close() override;
  void join() override;
  void abort(const Error& error) override { runner_->abort(error); }

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
