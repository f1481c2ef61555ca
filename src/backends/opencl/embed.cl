#define ITEMS 64
#include "backends/opencl/numeric.clh"
#include "backends/opencl/step.clh"
#include "backends/opencl/weight.clh"

// Token, index and position of every row; one item a row.
__kernel void resolve_rows(int num_rows, PLACE(const run_t, runs), PLACE(const int, row_runs), PLACE(const int, given_tokens), PLACE(const int, run_positions),
                           PLACE(const int, cursor), PLACE(const int, last_token), PLACE(const int, position_delta), PLACE(const int, drafts), int drafts_stride,
                           PLACE(int, tokens), PLACE(int, indices), PLACE(int, positions)) {
  FIND(const run_t, runs);
  FIND(const int, row_runs);
  FIND(const int, given_tokens);
  FIND(const int, run_positions);
  FIND(const int, cursor);
  FIND(const int, last_token);
  FIND(const int, position_delta);
  FIND(const int, drafts);
  FIND(int, tokens);
  FIND(int, indices);
  FIND(int, positions);
  const int row = (int)get_global_id(0);
  if (row >= num_rows) return;
  const int run_number = row_runs[row];
  if (run_number < 0) {
    tokens[row] = 0;
    indices[row] = -1;
    for (int axis = 0; axis < 3; ++axis) positions[row * 3 + axis] = 0;
    return;
  }
  const run_t run = runs[run_number];
  const int i = row - run.first_row, index = cursor[run.slot] + i;
  int token = given_tokens[row];
  if (token < 0) token = i == 0 ? last_token[run.slot] : drafts[(long)run.slot * drafts_stride + i - 1];
  tokens[row] = token;
  indices[row] = index;
  const bool decode = (run.flags & RUN_IS_DECODE) != 0;
  for (int axis = 0; axis < 3; ++axis) positions[row * 3 + axis] = decode ? index + position_delta[run.slot] : run_positions[run_number * 3 + axis] + i;
}

// out[row] = table[tokens[row] - first_id], zeros for other ids below num_ids; one group a row. An id that no rank has gives NaN, which the sampler reports.
__kernel __attribute__((reqd_work_group_size(ITEMS, 1, 1))) void lookup_rows(PLACE(const uchar, table), int dtype, PLACE(const float, scale), PLACE(const long, offsets), int scales,
                                                                             long vocab_size, long first_id, long num_ids, int width, PLACE(const int, tokens), PLACE(activation_t, out)) {
  FIND(const uchar, table);
  FIND(const float, scale);
  FIND(const long, offsets);
  FIND(const int, tokens);
  FIND(activation_t, out);
  const long row = (long)get_group_id(0), id = tokens[row], token = id - first_id;
  const bool known = token >= 0 && token < vocab_size;
  for (int i = (int)get_local_id(0); i < width; i += ITEMS) {
    float x = id >= 0 && id < num_ids ? 0.0f : as_float(0x7fc00000u);
    if (known) {
      x = load_any(table, dtype, token * width + i);
      if (scales != SCALES_NONE) x *= scale_at(scales, scale, offsets, width, token, i);
    }
    out[row * width + i] = narrow(x);
  }
}
