// Attention on the matrix units, for heads of 256. Of prompts, a sub-group has 8 rows of one query head and walks the keys 32 at a time, counted from the sequence's start, with
// a running maximum and sum per row; a key that a row may not see has no weight. So a row's bits depend on its own index alone: where its neighbours see more keys, nothing
// changes for it. Keys come as operands by transposing loads, values by loads that pair rows. The host defines KV_E4M3 where the cache is e4m3: codes become halves as
// weights do, and meet the query and the weights of the keys in half.
#include "backends/opencl/numeric.clh"
#include "backends/opencl/step.clh"
#include "backends/opencl/kv.clh"
#include "backends/opencl/attention.clh"
#include "backends/opencl/xe2.clh"
#include "backends/opencl/lanes.clh"

#define D 256
#define ROWS 8
#define KEYS 32    // of a turn
#define STEPS 16   // of 16 dimensions
#define LOG2_E 1.4426950408889634f

#ifdef KV_E4M3
#define MAD(a, b, c) MAD_F16(a, b, c)
#define ROW_BYTES D
#define VALUE_FACTOR OPERAND_FACTOR
ushort operand(float x) { return half_of(x); }
// Operands of four codes pair the first with the third: lane k has element k of this order.
int in_order(int k) { return (k & 12) | (k & 1) << 1 | (k & 2) >> 1; }
#else
#define MAD(a, b, c) MAD_BF16(a, b, c)
#define ROW_BYTES (D * 2)
#define VALUE_FACTOR 1.0f
ushort operand(float x) { return bf16_of(x); }
int in_order(int k) { return k; }
#endif

// A turn of the walk: the keys from `first` on, which are read from read_first on, up to last_index. Row m sees those from first_index to index[m].
void take_turn(int first, int read_first, int last_index, const __private int* index, int first_index, float score_scale, const __local ushort (*query)[16][ROWS], const __global kv_t* cache_k,
               const __global kv_t* cache_v, const __global int* block_table, int kv_head, int num_kv_heads, int lane, __private float8* totals, __private float8* sums,
               __private float8* largest EMULATION_PARAMETER) {
  const long page = ((long)block_table[read_first / GRID] * num_kv_heads + kv_head) * GRID * D;
  const int in_page = read_first % GRID, height = min(GRID, last_index + 1 - read_first / GRID * GRID);  // rows past it are read as zeros
  __global void* keys = (__global void*)(cache_k + page);
  __global void* values = (__global void*)(cache_v + page);
  float8 scores[2] = {0.0f, 0.0f};
#ifdef KV_E4M3
  UNROLL
  for (int step = 0; step < STEPS; step += 2) {
    const short8 a0 = as_short8(vload8(0, query[step][lane])), a1 = as_short8(vload8(0, query[step + 1][lane]));
    UNROLL
    for (int j = 0; j < 2; ++j) {
      uint8 words;
      intel_sub_group_2d_block_read_transpose_32b_16r8x1c(keys, ROW_BYTES, height, ROW_BYTES, (int2)(step * 4, in_page + j * 16), (__private uint*)&words);
      scores[j] = MAD(a0, operand_of(words.lo), scores[j]);
      scores[j] = MAD(a1, operand_of(words.hi), scores[j]);
    }
  }
#else
  UNROLL
  for (int step = 0; step < STEPS; ++step) {
    const short8 a = as_short8(vload8(0, query[step][lane]));
    UNROLL
    for (int j = 0; j < 2; ++j) {
      uint8 words;
      intel_sub_group_2d_block_read_transpose_32b_16r8x1c(keys, ROW_BYTES, height, ROW_BYTES, (int2)(step * 8, in_page + j * 16), (__private uint*)&words);
      scores[j] = MAD(a, as_int8(words), scores[j]);
    }
  }
#endif
  float score[2][ROWS], factor[ROWS], total[ROWS], most[ROWS];
  vstore8(scores[0], 0, score[0]);
  vstore8(scores[1], 0, score[1]);
  vstore8(*sums, 0, total);
  vstore8(*largest, 0, most);
  ushort weights[2][ROWS];
  UNROLL
  for (int m = 0; m < ROWS; ++m) {
    UNROLL
    for (int j = 0; j < 2; ++j) {
      const int key = first + j * 16 + lane;
      score[j][m] = key <= index[m] && key >= first_index ? score[j][m] * score_scale : -INFINITY;
    }
    const float now = fmax(most[m], sub_group_reduce_max(fmax(score[0][m], score[1][m])));
    const float base = now == -INFINITY ? 0.0f : now;  // a row without a key so far
    factor[m] = exp2(most[m] - base);
    most[m] = now;
    total[m] *= factor[m];
    UNROLL
    for (int j = 0; j < 2; ++j) {
      const float weight = exp2(score[j][m] - base);
      total[m] += weight;
      weights[j][m] = operand(weight);
    }
  }
  *sums = vload8(0, total);
  *largest = vload8(0, most);
#ifdef KV_E4M3
  UNROLL
  for (int j = 0; j < 2; ++j) {
    UNROLL
    for (int m = 0; m < ROWS; ++m) weights[j][m] = (ushort)FROM_LANE((int)weights[j][m], in_order(lane));
  }
#endif
  const short8 a0 = as_short8(vload8(0, weights[0])), a1 = as_short8(vload8(0, weights[1]));
  const float8 factors = vload8(0, factor);
  const bool hides = read_first == 0 && first_index > 0;  // the key of index 0, whose value may be anything
  UNROLL
  for (int t = 0; t < STEPS; ++t) {
    int8 b[2];
#ifdef KV_E4M3
    uint8 words;
    intel_sub_group_2d_block_read_transform_8b_32r16x1c(values, ROW_BYTES, height, ROW_BYTES, (int2)(t * 16, in_page), (__private uint*)&words);
    words.s0 &= hides ? 0xffffff00u : 0xffffffffu;
    b[0] = operand_of(words.lo);
    b[1] = operand_of(words.hi);
#else
    UNROLL
    for (int j = 0; j < 2; ++j) {
      uint8 words;
      intel_sub_group_2d_block_read_transform_16b_16r16x1c(values, ROW_BYTES, height, ROW_BYTES, (int2)(t * 16, in_page + j * 16), (__private uint*)&words);
      if (j == 0) words.s0 &= hides ? 0xffff0000u : 0xffffffffu;
      b[j] = as_int8(words);
    }
#endif
    totals[t] = MAD(a1, b[1], MAD(a0, b[0], totals[t] * factors));
  }
}

// A group per query head (axis 0) and 8 rows of the run of `num_rows` rows from first_row on (axis 1). kv_heads i32 [num_q_heads].
SUB_GROUP __attribute__((reqd_work_group_size(16, 1, 1))) __kernel void attention_prompt(
    int first_row, int num_rows, int num_q_heads, int num_kv_heads, int first_index, ATTENTION_PARAMETERS(ushort, kv_heads)) {
  FIND_ATTENTION(ushort, kv_heads);
  EMULATION_MEMORY(16);
  __local ushort query[STEPS][16][ROWS];
  const int lane = (int)get_sub_group_local_id(), head = (int)get_group_id(0), kv_head = kv_heads[head];
  const int row0 = first_row + (int)get_group_id(1) * ROWS, last_row = first_row + num_rows - 1;
  const __global int* block_table = block_tables + (long)runs[row_runs[row0]].slot * block_tables_stride;
  const int last_index = indices[min(row0 + ROWS - 1, last_row)];
  int index[ROWS];
  UNROLL
  for (int m = 0; m < ROWS; ++m) {
    const int row = min(row0 + m, last_row);
    index[m] = indices[row];
    const __global ushort* from = query_rows + ((long)row * num_q_heads + head) * D;
    for (int step = 0; step < STEPS; ++step) query[step][lane][m] = operand(bf16_to_f32(from[step * 16 + in_order(lane)]));
  }
  barrier(CLK_LOCAL_MEM_FENCE);
  const float score_scale = scale_of_head(k_scale_memory == 0 ? 0 : k_scale, kv_head) * (0.0625f * LOG2_E * VALUE_FACTOR);  // 256^-1/2

  float8 totals[STEPS], sums = 0.0f, largest = -INFINITY;
  UNROLL
  for (int t = 0; t < STEPS; ++t) totals[t] = 0.0f;
#pragma unroll 1
  for (int first = 0; first <= last_index; first += KEYS)
    take_turn(first, first, last_index, index, first_index, score_scale, query, cache_k, cache_v, block_table, kv_head, num_kv_heads, lane, totals, &sums, &largest EMULATION);
  float total[ROWS], value[ROWS];
  vstore8(sums, 0, total);
  const float value_scale = scale_of_head(v_scale_memory == 0 ? 0 : v_scale, kv_head) * VALUE_FACTOR;
  UNROLL
  for (int m = 0; m < ROWS; ++m) {
    const float sum = lanes_sum(total[m], lane);
    total[m] = sum > 0.0f ? value_scale / sum : sum;  // no key at all: 0; NaN stays NaN
  }
  UNROLL
  for (int t = 0; t < STEPS; ++t) {
    vstore8(totals[t], 0, value);
    UNROLL
    for (int m = 0; m < ROWS; ++m) {
      if (row0 + m > last_row) continue;
      const long at = ((long)(row0 + m) * num_q_heads + head) * D + t * 16 + lane;
      out[at] = narrow(round_activation(value[m] * total[m]) * round_activation(sigmoid(widen(gate[at]))));
    }
  }
}

// Decode rows: the rows of an operand are the query heads of a kv head, up to 8, and the keys of a row, 32 at a time, are shared by SPLITS sub-groups of each of num_shares groups: turn t is
// sub-group t % SPLITS's, of group t / SPLITS % num_shares. What they find is merged in this order: of a group in local memory, of all groups by the last one to come.
// A group per row from first_row on (axis 0), kv head (axis 1) and share (axis 2). shares f32 [rows, num_kv_heads, num_shares, 258, 8 heads]: values, largest score and sum. arrivals i32
// [rows, num_kv_heads] counts from zero to zero. first_heads i32 [num_kv_heads + 1].
#define SPLITS 4
#define MAX_SHARES 16
#define SPLIT_STEPS (STEPS / SPLITS)  // of 16 dimensions, that a sub-group merges
#ifdef EMULATED
#define NEEDED(condition) true  // all sub-groups take the same turns; one past the last key sees none
#else
#define NEEDED(condition) (condition)
#endif
float factor_to(float largest, float most) { return exp2(largest - (most == -INFINITY ? 0.0f : most)); }
SUB_GROUP __attribute__((reqd_work_group_size(16 * SPLITS, 1, 1))) __kernel void attention_decode(
    int first_row, int num_q_heads, int num_kv_heads, int first_index, ATTENTION_PARAMETERS(ushort, first_heads), PLACE(float, shares), PLACE(atomic_int, arrivals)) {
  FIND_ATTENTION(ushort, first_heads);
  FIND(float, shares);
  FIND(atomic_int, arrivals);
  EMULATION_MEMORY(16 * SPLITS);
  __local ushort query[STEPS][16][ROWS];
  __local float8 parts[SPLITS][STEPS][16];
  __local float largest_of[SPLITS][ROWS], sum_of[SPLITS][ROWS], factors[MAX_SHARES][ROWS], inverse[ROWS];
  __local int arrived;
  const int item = (int)get_local_id(0), lane = (int)get_sub_group_local_id(), split = item / 16;
  const int local_row = (int)get_group_id(0), row = first_row + local_row, kv_head = (int)get_group_id(1), share = (int)get_group_id(2), num_shares = (int)get_num_groups(2);
  const int head0 = first_heads[kv_head], num_heads = first_heads[kv_head + 1] - head0, index = indices[row];
  const __global int* block_table = block_tables + (index < 0 ? 0 : (long)runs[row_runs[row]].slot * block_tables_stride);
  const __global ushort* queries = query_rows + (row * num_q_heads + head0) * D;
#ifdef KV_E4M3
  UNROLL
  for (int m = 0; m < ROWS; ++m)
    for (int step = split; step < STEPS; step += SPLITS) query[step][lane][m] = operand(bf16_to_f32(queries[min(m, num_heads - 1) * D + step * 16 + in_order(lane)]));
#else
  UNROLL
  for (int step = 0; step < SPLIT_STEPS; ++step) {
    ushort8 rows;
    intel_sub_group_2d_block_read_16b_8r16x1c((__global void*)queries, D * 2, num_heads, D * 2, (int2)((split * SPLIT_STEPS + step) * 16, 0), (__private ushort*)&rows);
    vstore8(rows, 0, query[split * SPLIT_STEPS + step][lane]);
  }
#endif
  barrier(CLK_LOCAL_MEM_FENCE);
  const float score_scale = scale_of_head(k_scale_memory == 0 ? 0 : k_scale, kv_head) * (0.0625f * LOG2_E * VALUE_FACTOR);  // 256^-1/2
  float8 totals[STEPS], sums = 0.0f, largest = -INFINITY;
  UNROLL
  for (int t = 0; t < STEPS; ++t) totals[t] = 0.0f;
  int visible[ROWS];
  UNROLL
  for (int m = 0; m < ROWS; ++m) visible[m] = index;
#pragma unroll 1
  for (int turn = share * SPLITS; turn * KEYS <= index; turn += num_shares * SPLITS) {
    const int first = (turn + split) * KEYS;
    if (NEEDED(first <= index))
      take_turn(first, min(first, index & -KEYS), index, visible, first_index, score_scale, query, cache_k, cache_v, block_table, kv_head, num_kv_heads, lane, totals, &sums,
                &largest EMULATION);
  }

  float values[ROWS];
  vstore8(sums, 0, values);
  UNROLL
  for (int m = 0; m < ROWS; ++m) values[m] = sub_group_reduce_add(values[m]);
  if (lane == 0) {
    vstore8(vload8(0, values), 0, sum_of[split]);
    vstore8(largest, 0, largest_of[split]);
  }
  UNROLL
  for (int t = 0; t < STEPS; ++t) parts[split][t][lane] = totals[t];
  barrier(CLK_LOCAL_MEM_FENCE);
  const int num_used = min(num_shares, index / (KEYS * SPLITS) + 1);  // groups that have a key
  __global float* shares_at = shares + (local_row * num_kv_heads + kv_head) * num_shares * (D + 2) * ROWS;
  if (item < ROWS) {
    float most = -INFINITY, sum = 0.0f;
    UNROLL
    for (int s = 0; s < SPLITS; ++s) most = fmax(most, largest_of[s][item]);
    UNROLL
    for (int s = 0; s < SPLITS; ++s) {
      factors[s][item] = factor_to(largest_of[s][item], most);
      sum = fma(factors[s][item], sum_of[s][item], sum);
    }
    shares_at[(share * (D + 2) + D) * ROWS + item] = most;
    shares_at[(share * (D + 2) + D + 1) * ROWS + item] = sum;
  }
  barrier(CLK_LOCAL_MEM_FENCE);
  UNROLL
  for (int i = 0; i < SPLIT_STEPS; ++i) {
    const int t = split * SPLIT_STEPS + i;
    float8 total = 0.0f;
    UNROLL
    for (int s = 0; s < SPLITS; ++s) total = fma(vload8(0, factors[s]), parts[s][t][lane], total);
    vstore8(total, share * (D + 2) + t * 16 + lane, shares_at);
  }

  atomic_work_item_fence(CLK_GLOBAL_MEM_FENCE, memory_order_release, memory_scope_device);  // the item's part of the shares is seen before its group is counted
  barrier(CLK_LOCAL_MEM_FENCE | CLK_GLOBAL_MEM_FENCE);
  __global atomic_int* count = arrivals + local_row * num_kv_heads + kv_head;
  if (item == 0) arrived = atomic_fetch_add_explicit(count, 1, memory_order_acq_rel, memory_scope_device);
  barrier(CLK_LOCAL_MEM_FENCE | CLK_GLOBAL_MEM_FENCE);
  if (arrived != num_shares - 1) return;
  atomic_work_item_fence(CLK_GLOBAL_MEM_FENCE, memory_order_acquire, memory_scope_device);
  if (item == 0) atomic_store_explicit(count, 0, memory_order_relaxed, memory_scope_device);
  const float value_scale = scale_of_head(v_scale_memory == 0 ? 0 : v_scale, kv_head) * VALUE_FACTOR;
  if (item < ROWS) {
    float most = -INFINITY, sum = 0.0f;
#pragma unroll 1
    for (int z = 0; z < num_used; ++z) most = fmax(most, shares_at[(z * (D + 2) + D) * ROWS + item]);
#pragma unroll 1
    for (int z = 0; z < num_used; ++z) {
      factors[z][item] = factor_to(shares_at[(z * (D + 2) + D) * ROWS + item], most);
      sum = fma(factors[z][item], shares_at[(z * (D + 2) + D + 1) * ROWS + item], sum);
    }
    inverse[item] = sum > 0.0f ? value_scale / sum : sum;  // no key at all: 0; NaN stays NaN
  }
  barrier(CLK_LOCAL_MEM_FENCE);
  float8 merged[SPLIT_STEPS];
  UNROLL
  for (int i = 0; i < SPLIT_STEPS; ++i) merged[i] = 0.0f;
#pragma unroll 1
  for (int z = 0; z < num_used; ++z) {
    UNROLL
    for (int i = 0; i < SPLIT_STEPS; ++i) merged[i] = fma(vload8(0, factors[z]), vload8(z * (D + 2) + (split * SPLIT_STEPS + i) * 16 + lane, shares_at), merged[i]);
  }
  // Rows of gates and outputs are as far apart as heads; there is nothing past the last one.
  const __global ushort* gates = gate + (row * num_q_heads + head0) * D;
  __global ushort* to = out + (row * num_q_heads + head0) * D;
  UNROLL
  for (int i = 0; i < SPLIT_STEPS; ++i) {
    const int2 at = (int2)((split * SPLIT_STEPS + i) * 16, 0);
    ushort8 gate_rows;
    intel_sub_group_2d_block_read_16b_8r16x1c((__global void*)gates, D * 2, num_heads, D * 2, at, (__private ushort*)&gate_rows);
    float result[ROWS];
    ushort opened[ROWS];
    vstore8(merged[i] * vload8(0, inverse), 0, result);
    vstore8(gate_rows, 0, opened);
    UNROLL
    for (int m = 0; m < ROWS; ++m) {
      const float share_of_gate = bf16_to_f32(bf16_of(native_recip(1.0f + native_exp(-bf16_to_f32(opened[m])))));
      opened[m] = bf16_of(bf16_to_f32(bf16_of(result[m])) * share_of_gate);
    }
    ushort8 rows = vload8(0, opened);
    if (index < 0) rows = 0;
    intel_sub_group_2d_block_write_16b_8r16x1c((__global void*)to, D * 2, num_heads, D * 2, at, (__private ushort*)&rows);
  }
}
