#pragma once

#include <string_view>

#include "worker/plan.h"

namespace quern::worker {

/// Tokens per second that one sequence at a context of 1024 decodes to, without speculation, with the chosen kernels: each weight at the share of the read bandwidth that its kernel was measured
/// to reach, and what a layer takes beside its weights, messages between ranks not counted; of cards whose machine code is known but whose speed nobody has measured, what card_speed.h models. 0 where a device's bandwidth is unknown. Needs ranks and choices of the plan.
double expected_decode_speed(const ExecutionPlan& plan);

/// The op that reads a linear weight, by canonical name, for every token; empty: none does (the embedding is looked up, the MTP head is not run).
std::string_view op_that_reads(std::string_view tensor, bool tied);

}  // namespace quern::worker
