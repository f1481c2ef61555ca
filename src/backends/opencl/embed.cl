#define ITEMS PORTABLE_ITEMS(64, 256)
#include "backends/opencl/numeric.clh"
#include "backends/opencl/step.clh"
#include "backends/opencl/weight.clh"

// Token, index and position of one row, and its token.
int resolve_row(int row, bool writes, const __global run_t* runs, const __global int* row_runs, const __global int* given_tokens, const __global int* run_positions,
                const __global int* cursor, const __global int* last_token, const __global int* position_delta, const __global int* drafts, int drafts_stride,
                __global int* tokens, __global int* indices, __global int* positions) {
  const int run_number = row_runs[row];
  int token = 0, index = -1, position[3] = {0, 0, 0};
  if (run_number >= 0) {
    const run_t run = runs[run_number];
    const int i = row - run.first_row;
    index = cursor[run.slot] + i;
    token = given_tokens[row];
    if (token < 0) token = i == 0 ? last_token[run.slot] : drafts[(long)run.slot * drafts_stride + i - 1];
    const bool decode = (run.flags & RUN_IS_DECODE) != 0;
    for (int axis = 0; axis < 3; ++axis) position[axis] = decode ? index + position_delta[run.slot] : run_positions[run_number * 3 + axis] + i;
  }
  if (writes) {
    tokens[row] = token;
    indices[row] = index;
    for (int axis = 0; axis < 3; ++axis) positions[row * 3 + axis] = position[axis];
  }
  return token;
}

#define RESOLVE_PARAMETERS                                                                                                                                       \
  PLACE(const run_t, runs), PLACE(const int, row_runs), PLACE(const int, given_tokens), PLACE(const int, run_positions), PLACE(const int, cursor),               \
      PLACE(const int, last_token), PLACE(const int, position_delta), PLACE(const int, drafts), int drafts_stride, PLACE(int, tokens), PLACE(int, indices), PLACE(int, positions)
#define FIND_RESOLVE_PARAMETERS                                                                                                                      \
  FIND(const run_t, runs); FIND(const int, row_runs); FIND(const int, given_tokens); FIND(const int, run_positions); FIND(const int, cursor);        \
  FIND(const int, last_token); FIND(const int, position_delta); FIND(const int, drafts); FIND(int, tokens); FIND(int, indices); FIND(int, positions)

#ifdef SIMD16
// A table in bf16 for bf16 rows, 8 elements an item: x[row] = table[id - first_id], as lookup_rows below.
void copy_row(const __global ushort* table, long vocab_size, long first_id, long num_ids, int width, int id, __global ushort* x) {
  const long token = id - first_id;
  const bool known = token >= 0 && token < vocab_size;
  const ushort other = id >= 0 && id < num_ids ? 0 : 0x7fc0;
  for (int i = (int)get_local_id(0) * 8; i < width; i += ITEMS * 8) vstore8(known ? vload8(0, table + token * width + i) : (ushort8)(other), 0, x + i);
}
// A group a row.
PORTABLE __attribute__((reqd_work_group_size(ITEMS, 1, 1))) __kernel void embed_rows(PLACE(const ushort, table), long vocab_size, long first_id, long num_ids, int width,
                                                                                     PLACE(ushort, x), RESOLVE_PARAMETERS) {
  FIND(const ushort, table);
  FIND(ushort, x);
  FIND_RESOLVE_PARAMETERS;
  const int row = (int)get_group_id(0);
  const int token = resolve_row(row, get_local_id(0) == 0, runs, row_runs, given_tokens, run_positions, cursor, last_token, position_delta, drafts, drafts_stride, tokens, indices, positions);
  copy_row(table, vocab_size, first_id, num_ids, width, token, x + (long)row * width);
}
PORTABLE __attribute__((reqd_work_group_size(ITEMS, 1, 1))) __kernel void lookup_rows(PLACE(const ushort, table), long vocab_size, long first_id, long num_ids, int width,
                                                                                      PLACE(ushort, x), PLACE(const int, tokens)) {
  FIND(const ushort, table);
  FIND(ushort, x);
  FIND(const int, tokens);
  copy_row(table, vocab_size, first_id, num_ids, width, tokens[get_group_id(0)], x + (long)get_group_id(0) * width);
}
#else
// One item a row.
__kernel void resolve_rows(int num_rows, RESOLVE_PARAMETERS) {
  FIND_RESOLVE_PARAMETERS;
  const int row = (int)get_global_id(0);
  if (row < num_rows)
    resolve_row(row, true, runs, row_runs, given_tokens, run_positions, cursor, last_token, position_delta, drafts, drafts_stride, tokens, indices, positions);
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
#endif
