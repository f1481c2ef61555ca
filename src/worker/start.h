#pragma once

#include <functional>
#include <memory>

#include "base/result.h"
#include "worker/activation_ranges.h"
#include "worker/plan.h"
#include "worker/processes.h"
#include "worker/worker_group.h"

namespace quern::worker {

/// Called from one loading thread at a time with the share of the weights that is packed, 0 to 1.
using LoadProgress = std::function<void(double)>;

/// Opens the devices of the plan, joins them, self-tests the chosen kernels, loads the weights on all ranks at once and starts the worker threads. Fails with the plan's verdict before
/// loading when it does not fit or an op has no kernel; where a rank fails, with its error alone, and everything is given back. With `ranges`, which must outlive the workers, every step
/// adds to them; the plan has one rank then. `source` takes the place of the checkpoint's. `processes`, which outlive the workers, are those of a plan for several (common_plan.h): here is
/// process 0, and waits until all have loaded.
Result<std::unique_ptr<WorkerGroup>> start_workers(const ExecutionPlan& plan, const LoadProgress& progress = {}, ActivationRanges* ranges = nullptr, weights::WeightSource* source = nullptr,
                                                   Processes* processes = nullptr);

/// What whoever follows process 0 may want to know.
struct FollowerEvents {
  std::function<void()> on_loaded, on_failure;  // once; on_failure from any thread, before the ranks are given back
};
/// What another process than 0 does with such a plan: its ranks load, and execute the steps that come from process 0 until it says that no more do. An error: why they stopped before.
Result<void> follow_process_0(const ExecutionPlan& plan, Processes& processes, const FollowerEvents& events = {}, weights::WeightSource* source = nullptr);

/// What `doctor` prints of this machine's devices, one line each.
std::vector<std::string> describe_devices();

}  // namespace quern::worker
