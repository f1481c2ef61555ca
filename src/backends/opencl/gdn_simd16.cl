// The gated delta rule of gdn_mix.cl for heads of 128 x 128 on sub-groups of 16: the state of a head is read once into registers, whatever the number of rows, and written
// only when 64 rows are folded in. A sub-group holds 8 columns, a lane 8 elements of each. Sums over lanes are trees, always the same. Launches of a layer: gdn_keys,
// gdn_rows, gdn_keep; with -DSHORT_RUNS, for runs of up to 8 rows, gdn_rows makes q and k by itself, to the same bits.
#define ITEMS 256
#include "backends/opencl/numeric.clh"
#include "backends/opencl/step.clh"
#include "backends/opencl/gdn.clh"
#include "backends/opencl/lanes.clh"

#define D 128        // d_k and d_v
#define COLUMNS 8    // of a sub-group
#define GROUPS 16    // sub-groups
#define SHORT_RUN 8  // rows

float dot8(float8 a, float8 b, float sum) {
  sum = fma(a.s0, b.s0, sum);
  sum = fma(a.s1, b.s1, sum);
  sum = fma(a.s2, b.s2, sum);
  sum = fma(a.s3, b.s3, sum);
  sum = fma(a.s4, b.s4, sum);
  sum = fma(a.s5, b.s5, sum);
  sum = fma(a.s6, b.s6, sum);
  return fma(a.s7, b.s7, sum);
}

float8 widen8(const __global activation_t* p) {
#ifdef ACTIVATION_BF16
  return as_float8(convert_uint8(vload8(0, p)) << 16);
#else
  return vload8(0, p);
#endif
}
// raw of gdn.clh for 8 channels.
float8 raw8(const __global activation_t* qkv, const __global activation_t* window, int k_max, long channels, rows_t rows, long index, long channel) {
  if (index < 0) return 0.0f;
  const long length = 3 + k_max + 1;
  if (index >= rows.cursor) return widen8(qkv + (rows.first_row + index - rows.cursor) * channels + channel);
  return widen8(window + (rows.slot * length + index % length) * channels + channel);
}
// The lane's 8 elements of q (which 0) or k (1) of a row: convolved, l2-normalized, q also scaled by 128^-1/2, k rounded as the ring holds it. All lanes.
float8 key_pair_of(int which, int num_k_heads, int k_head, const __global float* taps, const __global activation_t* qkv, const __global activation_t* window, int k_max,
                   long channels, rows_t rows, long index, int lane) {
  const long channel = ((long)which * num_k_heads + k_head) * D + lane * 8;
  float8 y = 0.0f;
  for (int tap = 0; tap < 4; ++tap) y = fma(vload8(0, taps + tap * channels + channel), raw8(qkv, window, k_max, channels, rows, index - 3 + tap, channel), y);
  float x[8];
  vstore8(y, 0, x);
  for (int i = 0; i < 8; ++i) x[i] = round_activation(silu(x[i]));
  y = vload8(0, x);
  y *= 1.0f / sqrt(lanes_sum(dot8(y, y, 0.0f), lane) + 1e-6f) * (which == 0 ? 0.08838834764831845f : 1.0f);
  vstore8(y, 0, x);
  for (int i = 0; i < 8; ++i) x[i] = which == 0 ? x[i] : round_ring(x[i]);
  return vload8(0, x);
}

// Where row j from the boundary on stands in the rings of all slots, for j below a ring's length.
#define IN_RING(j) (rows.slot * length + wrapped(ring_start + (int)(j), (int)length))
int wrapped(int at, int length) { return at < length ? at : at - length; }
// The lane's 8 elements of the k of row j from the boundary on: of this step's rows, in `step`, or from the ring.
#ifdef SHORT_RUNS
#define KEY8_AT(j) key8_at(step_keys, ring_k, num_k_heads, k_head, (int)(boundary - rows.cursor) + (j), rows, IN_RING(j), lane)
float8 key8_at(const __local float* step, const __global ring_t* ring_k, int num_k_heads, int k_head, int in_step, rows_t rows, long in_ring, int lane) {
  if (in_step >= 0) return vload8(0, step + in_step * D + lane * 8);
#else
#define KEY8_AT(j) key8_at(keys, ring_k, num_k_heads, k_head, (int)(boundary - rows.cursor) + (j), rows, IN_RING(j), lane)
float8 key8_at(const __global float* step, const __global ring_t* ring_k, int num_k_heads, int k_head, int in_step, rows_t rows, long in_ring, int lane) {
  if (in_step >= 0) return vload8(0, step + (((rows.first_row + in_step) * num_k_heads + k_head) * 2 + 1) * D + lane * 8);
#endif
  const __global ring_t* k = ring_k + (in_ring * num_k_heads + k_head) * D + lane * 8;
#ifdef RING_BF16
  return as_float8(convert_uint8(vload8(0, k)) << 16);
#else
  return vload8(0, k);
#endif
}

#ifndef SHORT_RUNS
// q and k of every row: keys f32 [rows, num_k_heads, 2, 128], q first. A sub-group per row (axis 0) and of q or k of a head (axis 1).
__attribute__((intel_reqd_sub_group_size(16))) __attribute__((reqd_work_group_size(16, 1, 1))) __kernel void gdn_keys(
    int prompts_apart, int num_k_heads, int k_max, long channels, PLACE(const run_t, runs), PLACE(const int, row_runs), PLACE(const int, cursors), PLACE(const float, taps), PLACE(const activation_t, qkv),
    PLACE(const activation_t, window), PLACE(float, keys)) {
  FIND(const run_t, runs);
  FIND(const int, row_runs);
  FIND(const int, cursors);
  FIND(const float, taps);
  FIND(const activation_t, qkv);
  FIND(const activation_t, window);
  FIND(float, keys);
  const int lane = (int)get_sub_group_local_id(), head = (int)get_group_id(1) / 2, which = (int)get_group_id(1) % 2;
  const long row = (long)get_group_id(0);
  if (row_runs[row] < 0) return;
  const rows_t rows = rows_in_turn(runs[row_runs[row]], cursors, prompts_apart);
  if (rows.cursor == rows.end) return;
  const float8 x = key_pair_of(which, num_k_heads, head, taps, qkv, window, k_max, channels, rows, rows.cursor + row - rows.first_row, lane);
  vstore8(x, 0, keys + ((row * num_k_heads + head) * 2 + which) * D + lane * 8);
}

// After gdn_rows, and what gdn_prompt.cl computes. An item per run (axis 1) and channel (axis 0): k of the rows that the ring holds after the step, which a chunked prompt has kept,
// the columns before the boundary that a fold has been stored at, and the window.
__kernel void gdn_keep(int prompts_apart, int num_k_heads, int k_max, long channels, PLACE(const run_t, runs), PLACE(const int, cursors), PLACE(const int, boundaries), PLACE(const activation_t, qkv),
                       PLACE(const float, keys), PLACE(ring_t, ring_k), PLACE(activation_t, window), PLACE(activation_t, boundary_columns)) {
  FIND(const run_t, runs);
  FIND(const int, cursors);
  FIND(const int, boundaries);
  FIND(const activation_t, qkv);
  FIND(const float, keys);
  FIND(ring_t, ring_k);
  FIND(activation_t, window);
  FIND(activation_t, boundary_columns);
  const run_t run = runs[get_global_id(1)];
  const rows_t rows = rows_of(run, cursors);
  const long channel = (long)get_global_id(0);
  if (rows.cursor == rows.end || channel >= channels) return;
  const long width = (long)num_k_heads * D, in_k = channel - width;
  if (in_k >= 0 && in_k < width && !(prompts_apart && is_chunked(run))) {
    const long length = GRID + k_max + 1, head = in_k / D, i = in_k % D;
    for (long index = max(rows.end - length, rows.cursor); index < rows.end; ++index)
      ring_k[(rows.slot * length + index % length) * width + in_k] = ring_of(keys[(((rows.first_row + index - rows.cursor) * num_k_heads + head) * 2 + 1) * D + i]);
  }
  keep_columns(k_max, channels, rows, channel, boundaries, qkv, window, boundary_columns);
}
#endif

// The fold of a full chunk, in registers; all items.
#define FOLD()                                                                                                                               \
  barrier(CLK_LOCAL_MEM_FENCE | CLK_GLOBAL_MEM_FENCE);                                                                                       \
  if (item < GRID) factors[item] = exp(sums[GRID - 1] - sums[item]);                                                                         \
  barrier(CLK_LOCAL_MEM_FENCE);                                                                                                              \
  {                                                                                                                                          \
    const float folded_decay = exp(sums[GRID - 1]);                                                                                          \
    UNROLL for (int c = 0; c < COLUMNS; ++c) state[c] *= folded_decay;                                                                       \
    for (int j = 0; j < GRID; ++j) {                                                                                                         \
      const float8 key = KEY8_AT(j);                                                                                                         \
      const __global ring_t* u = ring_u + (IN_RING(j) * num_v_heads + head) * D + first_column;                                              \
      UNROLL for (int c = 0; c < COLUMNS; ++c) state[c] = fma((float8)(factors[j] * ring_to_f32(u[c])), key, state[c]);                      \
    }                                                                                                                                        \
  }                                                                                                                                          \
  barrier(CLK_LOCAL_MEM_FENCE | CLK_GLOBAL_MEM_FENCE)
#define STORE_STATE()                                                                                   \
  UNROLL for (int c = 0; c < COLUMNS; ++c) vstore8(state[c], 0, states_at + (first_column + c) * D + lane * 8)

// A group per run (axis 0) and value head (axis 1).
__attribute__((intel_reqd_sub_group_size(16))) __attribute__((reqd_work_group_size(ITEMS, 1, 1))) __kernel void gdn_rows(GDN_ROWS_PARAMETERS) {
  FIND_GDN_ROWS;
  __local float sums[MAX_CHUNK], along_k[MAX_CHUNK], along_q[MAX_CHUNK], factors[GRID], state_k[D], state_q[D], shared[ITEMS];
  const int item = (int)get_local_id(0), lane = (int)get_sub_group_local_id(), group = item / 16, first_column = group * COLUMNS;
  const int head = (int)get_group_id(1), k_head = k_heads[head];
  const rows_t rows = rows_in_turn(runs[get_group_id(0)], cursors, prompts_apart);
  const long length = GRID + k_max + 1, values_at = 2 * (long)num_k_heads * D;
  __global float* states_at = states + (rows.slot * num_v_heads + head) * (long)(D * D);
#ifdef SHORT_RUNS
  __local float step_keys[SHORT_RUN * D], row_query[D];
  bool is_first = true;  // of the value heads of its key head: gives k to gdn_keep
  for (int other = 0; other < head; ++other) is_first = is_first && k_heads[other] != k_head;
#endif
  float8 state[COLUMNS];
  UNROLL for (int c = 0; c < COLUMNS; ++c) state[c] = vload8(0, states_at + (first_column + c) * D + lane * 8);
  long boundary = rows.cursor == rows.end ? 0 : boundaries[rows.slot];
  int ring_start = (int)(boundary % length);
  const bool due = boundary + GRID <= rows.cursor;  // a fold that the steps before have left
  const int known = (int)(due ? GRID : rows.cursor - boundary);
  if (item < known) sums[item] = ring_g[IN_RING(item) * num_v_heads + head];
  if (due) {
    FOLD();
    STORE_STATE();
    boundary += GRID;
    ring_start = (int)(boundary % length);
    if (item < rows.cursor - boundary) sums[item] = ring_g[IN_RING(item) * num_v_heads + head];
  }
  barrier(CLK_LOCAL_MEM_FENCE);

  bool crossed = false;  // the row's boundary is one past the chunk's, whose fold is not stored
  for (long index = rows.cursor; index < rows.end; ++index) {
    if (index == boundary + GRID) {
      FOLD();
      if (rows.committed) {
        STORE_STATE();
        boundary += GRID;
        ring_start = (int)(boundary % length);
      } else {
        crossed = true;
      }
    }
    const long row = rows.first_row + index - rows.cursor;
    const int place = (int)(index - boundary), base = crossed ? GRID : 0;  // of the row, and of its chunk's first row
#ifdef SHORT_RUNS
    __local float* row_key = step_keys + (index - rows.cursor) * D;
    const float8 mine = key_pair_of(group & 1, num_k_heads, k_head, taps, qkv, window, k_max, channels, rows, index, lane);
    if (group < 2) vstore8(mine, 0, (group == 0 ? row_query : row_key) + lane * 8);
    if (group == 1 && is_first) vstore8(mine, 0, keys + ((row * num_k_heads + k_head) * 2 + 1) * D + lane * 8);
    barrier(CLK_LOCAL_MEM_FENCE);
    const float8 q = vload8(0, row_query + lane * 8), k = vload8(0, row_key + lane * 8);
#else
    const __global float* key_pair = keys + (row * num_k_heads + k_head) * 2 * D + lane * 8;
    const float8 q = vload8(0, key_pair), k = vload8(0, key_pair + D);
#endif
    const float beta = round_activation(sigmoid(widen(b[row * num_v_heads + head])));
    const float decay_log = decays[head] * softplus(widen(a[row * num_v_heads + head]) + dt_bias[head]);
    const float total = place > base ? sums[place - 1] + decay_log : decay_log, decay = exp(total);
    barrier(CLK_LOCAL_MEM_FENCE);
    if (item == 0) sums[place] = total;
    for (int first = base; first <= place; first += GROUPS) {  // a sub-group a row of the chunk; all take the same number of turns
      const int j = min(first + group, place);
      const float8 key = KEY8_AT(j);
      const float dot_k = lanes_sum(dot8(key, k, 0.0f), lane), dot_q = lanes_sum(dot8(key, q, 0.0f), lane);
      if (lane == 0 && first + group <= place) {
        const float factor = j < place ? exp(total - sums[j]) : 1.0f;
        along_k[j] = factor * dot_k;
        along_q[j] = factor * dot_q;
      }
    }
    UNROLL for (int c = 0; c < COLUMNS; ++c) {
      const float dot_k = lanes_sum(dot8(state[c], k, 0.0f), lane), dot_q = lanes_sum(dot8(state[c], q, 0.0f), lane);
      if (lane == 0) {
        state_k[first_column + c] = decay * dot_k;
        state_q[first_column + c] = decay * dot_q;
      }
    }
    barrier(CLK_LOCAL_MEM_FENCE);
    float o = 0.0f;
    if (item < D) {
      float predicted = state_k[item];
      o = state_q[item];
      for (int j = base; j < place; ++j) {
        const float u_j = ring_to_f32(ring_u[(IN_RING(j) * num_v_heads + head) * D + item]);
        predicted = fma(along_k[j], u_j, predicted);
        o = fma(along_q[j], u_j, o);
      }
      const float v = convolved(taps, qkv, window, k_max, channels, rows, index, values_at + (long)head * D + item);
      const float u = round_ring(beta * (v - predicted));
      o = fma(along_q[place], u, o);
      ring_u[(IN_RING(place) * num_v_heads + head) * D + item] = ring_of(u);
    }
    if (item == 0) ring_g[IN_RING(place) * num_v_heads + head] = total;
    const float scale = 1.0f / sqrt(group_sum(o * o, shared) / (float)D + eps);
    if (item < D) {
      const long at = (row * num_v_heads + head) * D + item;
      out[at] = narrow(o * scale * norm[item] * silu(widen(z[at])));
    }
    barrier(CLK_LOCAL_MEM_FENCE | CLK_GLOBAL_MEM_FENCE);
  }
  if (rows.committed && rows.cursor < rows.end && rows.end == boundary + GRID) {
    FOLD();
    STORE_STATE();
  }
}
