#pragma once

#include <functional>
#include <memory>

#include "base/result.h"
#include "worker/activation_ranges.h"
#include "worker/plan.h"
#include "worker/worker_group.h"

namespace quern::worker {

/// Called from the loading thread with the share of the weights that is packed, 0 to 1.
using LoadProgress = std::function<void(double)>;

/// Opens the device of the plan, self-tests the chosen kernels, loads the weights and starts the worker threads. Fails with the plan's verdict before
/// loading when it does not fit or an op has no kernel. With `ranges`, which must outlive the workers, every step adds to them.
Result<std::unique_ptr<WorkerGroup>> start_workers(const ExecutionPlan& plan, const LoadProgress& progress = {}, ActivationRanges* ranges = nullptr);

/// What `doctor` prints of this machine's devices, one line each.
std::vector<std::string> describe_devices();

}  // namespace quern::worker
