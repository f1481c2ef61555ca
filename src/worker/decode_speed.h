#pragma once

#include "worker/plan.h"

namespace quern::worker {

/// Tokens per second that one sequence at a context of 1024 decodes to, without speculation, with the chosen kernels: each weight at the share of the read bandwidth that its kernel was measured
/// to reach, and what a layer takes beside its weights. 0 where the device's bandwidth is unknown. Needs traits, choices, inventory and decode_bytes_per_token of the plan.
double expected_decode_speed(const ExecutionPlan& plan);

}  // namespace quern::worker
