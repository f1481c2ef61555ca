#pragma once

#include <string_view>

#include "base/result.h"
#include "worker/plan.h"
#include "worker/processes.h"

namespace quern::worker {

/// The plan of all processes, each of which has one stage: options.device names its own devices, options.tp_size of them, and options.pp_size is the number of processes, or 1. Every process
/// calls this; all return the same plan, or each an error, which in process 0 says whatever differs: program (`build`), checkpoint, options, kinds of devices. `so_far`: an error keeps this
/// process from taking part, and with it all others.
Result<ExecutionPlan> make_common_plan(WorkerOptions options, Processes& processes, std::string_view build, const Result<void>& so_far = {});

}  // namespace quern::worker
