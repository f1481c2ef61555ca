#pragma once

#include <string>

#include "base/json.h"
#include "worker/plan.h"

namespace quern::app {

/// What `quern plan` prints: tensors per scheme, memory by purpose, limits, expected speed, verdict.
std::string plan_as_text(const worker::ExecutionPlan& plan);
/// The same for programs; docs/cli.md lists the fields.
Json plan_as_json(const worker::ExecutionPlan& plan);

}  // namespace quern::app
