#pragma once

#include <cstdint>

#include "engine/engine.h"
#include "worker/worker_group.h"

namespace quern::engine {

/// How much the scheduler may run at once: the user's wishes, brought within the limits of the workers.
/// max_num_batched_tokens >= 64 + max_num_seqs, so that a prompt advances by a chunk however many sequences decode.
struct Budget {
  int32_t max_num_seqs = 0;
  int32_t max_num_batched_tokens = 0;  // rows of one step
  int32_t max_prompt_rows = 0;         // of one sequence in a step, a multiple of 64; 0: as many as fit
  int32_t max_steps_in_flight = 2;
  int32_t num_micro_batches = 1;       // more than one: steps in flight have no sequence in common, and so many shall always be there (scheduler.h)
};

/// Every wish that cannot be met is logged with what is done instead.
Budget resolve_budget(const EngineOptions& options, const worker::WorkerLimits& limits);

}  // namespace quern::engine
