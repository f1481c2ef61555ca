#include "worker/device_worker.h"

#include <pthread.h>

namespace quern::worker {

DeviceWorker::DeviceWorker(const WorkerLimits& limits, std::unique_ptr<ops::Device> device, std::unique_ptr<ModelRunner> runner)
    : limits_(limits), device_(std::move(device)), runner_(std::move(runner)), collector_([this] { collect_results(); }), submitter_([this] { submit_steps(); }) {}

DeviceWorker::~DeviceWorker() {
  plans_.close();
  masks_.close();
  results_.close();
  submitter_.join();
  in_flight_.close();
  collector_.join();
}

void DeviceWorker::submit(StepPlan plan) { CHECK(plans_.push(std::move(plan))); }
void DeviceWorker::submit_masks(StepMasks masks) { CHECK(masks_.push(std::move(masks))); }

StepResult DeviceWorker::wait() {
  std::optional<StepResult> result = results_.pop();
  CHECK(result.has_value());
  return std::move(*result);
}

std::optional<StepResult> DeviceWorker::wait_or_wake() { return results_.pop_or_wake(); }
void DeviceWorker::wake() { results_.wake(); }
std::optional<StepResult> DeviceWorker::poll() { return results_.try_pop(); }

void DeviceWorker::submit_steps() {
  pthread_setname_np(pthread_self(), "quern-worker");
  while (std::optional<StepPlan> plan = plans_.pop()) {
    const auto masks = [&] {
      std::optional<StepMasks> arrived = masks_.pop();
      while (arrived && arrived->step < plan->step) arrived = masks_.pop();  // of steps that failed before they asked
      if (!arrived) return StepMasks{plan->step, {}};                        // shutting down
      CHECK(arrived->step == plan->step);
      return std::move(*arrived);
    };
    CHECK(in_flight_.push(runner_->submit(*plan, masks)));
  }
}

void DeviceWorker::collect_results() {
  pthread_setname_np(pthread_self(), "quern-results");
  // A closed queue of results ends nothing here: every step is awaited, so that the device is at rest when it is given back.
  while (std::optional<ModelRunner::InFlight> step = in_flight_.pop()) static_cast<void>(results_.push(runner_->collect(std::move(*step))));
}

}  // namespace quern::worker
