#pragma once

#include "backends/cuda/linear_args.h"
#include "backends/cuda/step_tables.h"

namespace quern::cuda {

/// ops::DraftRun
struct DraftRecord {
  int32_t slot, fill, following_token, depth;
};

/// ops::DraftRows::Kernel::enqueue_first: the rows of the step, each with the token that follows.
struct DraftFirstArgs {
  StepTables step;
  int32_t k_max;
  const DraftRecord* drafts;  // [num_runs]
  const int32_t *sampled, *num_sampled, *non_finite;  // [num_runs, k_max + 1], [num_runs], [num_runs]
  int32_t *tokens, *indices, *positions;              // of the rows that are made
  int32_t* last_rows;                                 // [num_runs]
};

/// enqueue_next: one row per run that drafts on.
struct DraftNextArgs {
  int32_t num_runs, pass, k_max, drafts_stride, width;
  DType activation;
  const DraftRecord* drafts;
  const int32_t* ids;                                // [num_runs]
  const int32_t *before_indices, *before_positions;  // of the rows of the pass before
  const void* hidden;                                // [., width]
  int32_t *tokens, *indices, *positions;             // [num_runs]
  void* hidden_out;                                  // [num_runs, width]
  int32_t* last_rows;
  int32_t* slot_drafts;                              // [slots, drafts_stride]
  int32_t* proposed;                                 // [num_runs, k_max]
};

}  // namespace quern::cuda
