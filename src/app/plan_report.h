#pragma once

#include <string>

#include "base/json.h"
#include "worker/plan.h"

namespace quern::app {

/// The candidates chosen, those of fewer ops with their names: "cpu.avx2; cpu.plain for sample, state_copy".
std::string chosen_kernels(const worker::ExecutionPlan& plan);
/// Tokens per second of decode that may be expected, and the share of the read bandwidth that this is.
std::string expected_decode(const worker::ExecutionPlan& plan);
/// What `quern plan` prints: tensors per scheme, memory by purpose, limits, expected speed, verdict.
std::string plan_as_text(const worker::ExecutionPlan& plan);
/// The same for programs; docs/cli.md lists the fields.
Json plan_as_json(const worker::ExecutionPlan& plan);

}  // namespace quern::app
