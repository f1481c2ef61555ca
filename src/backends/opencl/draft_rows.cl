#define ITEMS PORTABLE_ITEMS(64, 256)
#include "backends/opencl/numeric.clh"
#include "backends/opencl/step.clh"

// ops::DraftRun
typedef struct {
  int slot, fill, following_token, depth;
} draft_t;

// ops::DraftRows::Kernel::enqueue_first. Every row is padding at first; a launch of its own, so that the next one may place the runs' rows side by side.
PORTABLE __kernel void clear_rows(int num_rows, PLACE(int, tokens), PLACE(int, indices), PLACE(int, positions)) {
  FIND(int, tokens);
  FIND(int, indices);
  FIND(int, positions);
  const int row = (int)get_global_id(0);
  if (row >= num_rows) return;
  tokens[row] = 0;
  indices[row] = -1;
  for (int axis = 0; axis < 3; ++axis) positions[3 * row + axis] = 0;
}

// The rows of the step, each with the token that follows; one group a run.
PORTABLE __attribute__((reqd_work_group_size(ITEMS, 1, 1))) __kernel void draft_first(int k_max, PLACE(const draft_t, drafts), PLACE(const run_t, runs), PLACE(const int, sampled),
                                                                             PLACE(const int, num_sampled), PLACE(const int, non_finite), PLACE(const int, step_tokens),
                                                                             PLACE(const int, step_indices), PLACE(const int, step_positions), PLACE(int, tokens),
                                                                             PLACE(int, indices), PLACE(int, positions), PLACE(int, last_rows)) {
  FIND(const draft_t, drafts);
  FIND(const run_t, runs);
  FIND(const int, sampled);
  FIND(const int, num_sampled);
  FIND(const int, non_finite);
  FIND(const int, step_tokens);
  FIND(const int, step_indices);
  FIND(const int, step_positions);
  FIND(int, tokens);
  FIND(int, indices);
  FIND(int, positions);
  FIND(int, last_rows);
  const int r = (int)get_group_id(0), item = (int)get_local_id(0);
  const draft_t draft = drafts[r];
  const run_t run = runs[r];
  int last_row = -1;
  if (draft.slot >= 0 && draft.fill != 0 && non_finite[r] == 0) {
    const __global int* drawn = sampled + (long)r * (k_max + 1);
    const int num_tokens = num_sampled[r];
    const bool verify = (run.flags & RUN_IS_COMMITTED) == 0;
    const int num_committed = verify ? num_tokens : run.num_rows;
    const int after = num_tokens > 0 ? drawn[num_tokens - 1] : draft.following_token;
    const int num_pairs = after >= 0 ? num_committed : num_committed - 1;
    for (int p = item; p < num_pairs; p += ITEMS) {
      const int row = run.first_row + p;
      int token = after;
      if (p + 1 < num_committed) token = verify ? drawn[p] : step_tokens[row + 1];
      tokens[row] = token;
      indices[row] = step_indices[row] + 1;
      for (int axis = 0; axis < 3; ++axis) positions[3 * row + axis] = step_positions[3 * row + axis] + 1;
    }
    if (draft.depth > 0 && num_pairs > 0) last_row = run.first_row + num_pairs - 1;
  }
  if (item == 0) last_rows[r] = last_row;
}

// enqueue_next: one row per run that drafts on; one group a run.
PORTABLE __attribute__((reqd_work_group_size(ITEMS, 1, 1))) __kernel void draft_next(int pass, int k_max, int drafts_stride, int width, PLACE(const draft_t, drafts), PLACE(const int, ids),
                                                                            PLACE(const int, before_indices), PLACE(const int, before_positions),
                                                                            PLACE(const activation_t, hidden), PLACE(int, tokens), PLACE(int, indices), PLACE(int, positions),
                                                                            PLACE(activation_t, hidden_out), PLACE(int, last_rows), PLACE(int, slot_drafts), PLACE(int, proposed)) {
  FIND(const draft_t, drafts);
  FIND(const int, ids);
  FIND(const int, before_indices);
  FIND(const int, before_positions);
  FIND(const activation_t, hidden);
  FIND(int, tokens);
  FIND(int, indices);
  FIND(int, positions);
  FIND(activation_t, hidden_out);
  FIND(int, last_rows);
  FIND(int, slot_drafts);
  FIND(int, proposed);
  const int r = (int)get_group_id(0), item = (int)get_local_id(0);
  const draft_t draft = drafts[r];
  const int row = last_rows[r];
  const bool goes_on = row >= 0 && draft.depth > pass + 1;
  for (int i = item; i < width; i += ITEMS) hidden_out[(long)r * width + i] = goes_on ? hidden[(long)row * width + i] : narrow(0.0f);
  barrier(CLK_GLOBAL_MEM_FENCE);  // every item has read last_rows
  if (item != 0) return;
  const int id = ids[r];
  if (row >= 0) {
    slot_drafts[(long)draft.slot * drafts_stride + pass] = id;
    proposed[(long)r * k_max + pass] = id;
  }
  last_rows[r] = goes_on ? r : -1;
  tokens[r] = goes_on ? id : 0;
  indices[r] = goes_on ? before_indices[row] + 1 : -1;
  for (int axis = 0; axis < 3; ++axis) positions[3 * r + axis] = goes_on ? before_positions[3 * row + axis] + 1 : 0;
}
