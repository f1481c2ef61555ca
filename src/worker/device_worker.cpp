#include "worker/device_worker.h"

#include <pthread.h>

namespace quern::worker {

DeviceWorker::DeviceWorker(const WorkerLimits& limits, std::unique_ptr<ops::Device> device, std::unique_ptr<ModelRunner> runner)
    : limits_(limits), device_(std::move(device)), runner_(std::move(runner)), thread_([this] { work(); }) {}

DeviceWorker::~DeviceWorker() {
  plans_.close();
  masks_.close();
  results_.close();
  thread_.join();
}

void DeviceWorker::submit(StepPlan plan) { CHECK(plans_.push(std::move(plan))); }
void DeviceWorker::submit_masks(StepMasks masks) { CHECK(masks_.push(std::move(masks))); }

StepResult DeviceWorker::wait() {
  std::optional<StepResult> result = results_.pop();
  CHECK(result.has_value());
  return std::move(*result);
}

std::optional<StepResult> DeviceWorker::poll() { return results_.try_pop(); }

void DeviceWorker::work() {
  pthread_setname_np(pthread_self(), "quern-worker");
  while (std::optional<StepPlan> plan = plans_.pop()) {
    const auto masks = [&] {
      std::optional<StepMasks> arrived = masks_.pop();
      while (arrived && arrived->step < plan->step) arrived = masks_.pop();  // of steps that failed before they asked
      if (!arrived) return StepMasks{plan->step, {}};                        // shutting down
      CHECK(arrived->step == plan->step);
      return std::move(*arrived);
    };
    if (!results_.push(runner_->run(*plan, masks))) return;
  }
}

}  // namespace quern::worker
