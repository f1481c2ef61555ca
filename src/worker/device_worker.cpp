#include "worker/device_worker.h"

#include <pthread.h>

namespace quern::worker {

DeviceWorker::DeviceWorker(std::unique_ptr<ModelRunner> runner, std::function<void(StepResult)> on_result)
    : runner_(std::move(runner)), on_result_(std::move(on_result)), collector_([this] { collect_results(); }), submitter_([this] { submit_steps(); }) {}

DeviceWorker::~DeviceWorker() {
  close();
  join();
}

void DeviceWorker::join() {
  if (!submitter_.joinable()) return;
  submitter_.join();
  in_flight_.close();
  collector_.join();
}

void DeviceWorker::close() {
  steps_.close();
  masks_.close();
}

void DeviceWorker::submit(RankStep step) { CHECK(steps_.push(std::move(step))); }
void DeviceWorker::submit_masks(StepMasks masks) { CHECK(masks_.push(std::move(masks))); }

void DeviceWorker::submit_steps() {
  pthread_setname_np(pthread_self(), "quern-worker");
  while (const std::optional<RankStep> step = steps_.pop()) {
    const StepPlan& plan = *step->plan;
    const auto masks = [&] {
      std::optional<StepMasks> arrived = masks_.pop();
      while (arrived && arrived->step < plan.step) arrived = masks_.pop();  // of steps that failed before they asked
      if (!arrived) return StepMasks{plan.step, {}};                        // shutting down
      CHECK(arrived->step == plan.step);
      return std::move(*arrived);
    };
    CHECK(in_flight_.push(runner_->submit(plan, masks, step->slots.get())));
  }
}

void DeviceWorker::collect_results() {
  pthread_setname_np(pthread_self(), "quern-results");
  // Every step is awaited, also when nobody asks any more, so that the device is at rest when it is given back.
  while (std::optional<ModelRunner::InFlight> step = in_flight_.pop()) on_result_(runner_->collect(std::move(*step)));
}

}  // namespace quern::worker
