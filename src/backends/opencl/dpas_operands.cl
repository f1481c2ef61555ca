// Rows for dpas.cl that are too many to be made where they are multiplied, and rows of prompts.
#define ITEMS 256
#include "backends/opencl/numeric.clh"
#include "backends/opencl/xe2.clh"
#include "backends/opencl/lanes.clh"
#include "backends/opencl/operands.clh"

#define SPLITS 8  // of dpas.cl

// What dpas_decode makes of up to 8 rows by itself, bit for bit: halves with scales f32 [in_features / 128, scales_stride] of the blocks, or bf16 copies; and the factor of
// each row. x_rows names the row of x of each row, -1: zeros. No norm: a null pointer. A group a row.
SUB_GROUP __attribute__((reqd_work_group_size(16 * SPLITS, 1, 1))) __kernel void decode_operands(PLACE(const ushort, x), PLACE(const int, x_rows), PLACE(const float, norm), float eps,
                                                                                                 int width, PLACE(ushort, halves), PLACE(float, scales), int scales_stride,
                                                                                                 PLACE(ushort, copies), PLACE(float, factors)) {
  FIND(const ushort, x);
  FIND(const int, x_rows);
  FIND(const float, norm);
  FIND(ushort, halves);
  FIND(float, scales);
  FIND(ushort, copies);
  FIND(float, factors);
  __local float shared[SPLITS];
  const int split = (int)get_local_id(0) / 16, lane = (int)get_sub_group_local_id(), row = (int)get_group_id(0), blocks = width / BLOCK;
  const int name = x_rows_memory == 0 ? row : x_rows[row];
  const bool has_norm = norm_memory != 0;
  const __global ushort* from = x + (long)max(name, 0) * width;
  float squares = 0.0f;
#ifdef EMULATED
  const int end = (blocks + SPLITS - 1) / SPLITS * SPLITS;  // all sub-groups take the same number of turns
#else
  const int end = blocks;
#endif
  for (int turn = split; turn < end; turn += SPLITS) {
    const int block = min(turn, blocks - 1);
    float8 v = load_activations(from + block * BLOCK);
    if (turn < blocks) squares = add_squares(v, squares);
    if (has_norm) v *= load_norm(norm + block * BLOCK);
    if (name < 0) v = 0.0f;
    const float inverse = block_inverse(v);
    float values[8];
    vstore8(v, 0, values);
    for (int i = 0; i < 8; ++i) {
      const long at = (long)row * width + block * BLOCK + i * 16 + lane;
      if (halves_memory != 0) halves[at] = half_of(values[i] * inverse);
      if (copies_memory != 0) copies[at] = bf16_of(values[i]);
    }
    if (halves_memory != 0 && lane == 0) scales[(long)block * scales_stride + row] = inverse_of(inverse);
  }
  squares = lanes_sum(squares, lane);
  if (lane == 0) shared[split] = squares;
  barrier(CLK_LOCAL_MEM_FENCE);
  if (get_local_id(0) != 0) return;
  float sum = 0.0f;
  for (int s = 0; s < SPLITS; ++s) sum += shared[s];
  factors[row] = has_norm ? norm_factor(sum, width, eps) : 1.0f;
}

// Rows of prompts: halves with one scale a row, the norm's factor in it, and bf16 copies with the factor apart. A group a row.
__kernel __attribute__((reqd_work_group_size(ITEMS, 1, 1))) void prompt_operands(PLACE(const ushort, x), PLACE(const int, x_rows), PLACE(const float, norm), float eps, int width,
                                                                                 PLACE(ushort, halves), PLACE(float, scales), PLACE(ushort, copies), PLACE(float, factors)) {
  FIND(const ushort, x);
  FIND(const int, x_rows);
  FIND(const float, norm);
  FIND(ushort, halves);
  FIND(float, scales);
  FIND(ushort, copies);
  FIND(float, factors);
  __local float shared[ITEMS];
  const int item = (int)get_local_id(0);
  const long row = (long)get_group_id(0), name = x_rows_memory == 0 ? row : x_rows[row];
  const bool has_norm = norm_memory != 0;
  const __global ushort* from = x + max(name, 0l) * width;
  float largest = 0.0f, squares = 0.0f;
  for (int i = item; i < width; i += ITEMS) {
    const float value = bf16_to_f32(from[i]);
    squares = fma(value, value, squares);
    largest = fmax(largest, fabs(has_norm ? value * norm[i] : value));
  }
  squares = group_sum(squares, shared);
  const float inverse = inverse_scale(group_max(largest, shared)), factor = name < 0 ? 0.0f : has_norm ? norm_factor(squares, width, eps) : 1.0f;
  if (item == 0) {
    if (halves_memory != 0) scales[row] = inverse_of(inverse) * factor;
    factors[row] = factor;
  }
  for (int i = item; i < width; i += ITEMS) {
    const float value = name < 0 ? 0.0f : bf16_to_f32(from[i]) * (has_norm ? norm[i] : 1.0f);
    if (halves_memory != 0) halves[row * width + i] = half_of(value * inverse);
    if (copies_memory != 0) copies[row * width + i] = bf16_of(value);
  }
}
