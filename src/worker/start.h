#pragma once

#include <functional>
#include <memory>

#include "base/result.h"
#include "worker/activation_ranges.h"
#include "worker/plan.h"
#include "worker/worker_group.h"

namespace quern::worker {

/// Called from one loading thread at a time with the share of the weights that is packed, 0 to 1.
using LoadProgress = std::function<void(double)>;

/// Opens the devices of the plan, joins them, self-tests the chosen kernels, loads the weights on all ranks at once and starts the worker threads. Fails with the plan's verdict before
/// loading when it does not fit or an op has no kernel; where a rank fails, with its error alone, and everything is given back. With `ranges`, which must outlive the workers, every step
/// adds to them; the plan has one rank then. `source` takes the place of the checkpoint's.
Result<std::unique_ptr<WorkerGroup>> start_workers(const ExecutionPlan& plan, const LoadProgress& progress = {}, ActivationRanges* ranges = nullptr, weights::WeightSource* source = nullptr);

/// What `doctor` prints of this machine's devices, one line each.
std::vector<std::string> describe_devices();

}  // namespace quern::worker
