// The gated delta rule (ops/gdn_mix.h). Rows are computed one after the other, prompt or not, against the state of the last boundary, so that any cut gives the same
// bits. Launches of a layer: gdn_keys makes q and k of all rows, gdn_rows computes and keeps the state, G and u, gdn_keep then writes the k that the ring holds, and
// gdn_window the raw columns, which the other kernels have read until then. The host defines the activation dtype and RING_BF16 or RING_F32.
#define ITEMS 64
#include "backends/opencl/numeric.clh"
#include "backends/opencl/step.clh"
#include "backends/opencl/gdn.clh"

// q and k of every row, l2-normalized, q also scaled by d_k^-1/2, k rounded as the ring holds it: keys f32 [rows, num_k_heads, 2, d_k], q first.
// A group per row (axis 0) and k head (axis 1).
__kernel __attribute__((reqd_work_group_size(ITEMS, 1, 1))) void gdn_keys(int num_k_heads, int d_k, int k_max, long channels, PLACE(const run_t, runs), PLACE(const int, row_runs),
                                                                          PLACE(const int, cursors), PLACE(const float, taps), PLACE(const activation_t, qkv),
                                                                          PLACE(const activation_t, window), PLACE(float, keys)) {
  FIND(const run_t, runs);
  FIND(const int, row_runs);
  FIND(const int, cursors);
  FIND(const float, taps);
  FIND(const activation_t, qkv);
  FIND(const activation_t, window);
  FIND(float, keys);
  __local float values[2][MAX_DIM], shared[ITEMS];
  const int item = (int)get_local_id(0), head = (int)get_group_id(1);
  const long row = (long)get_group_id(0);
  const bool padding = row_runs[row] < 0;
  const rows_t rows = rows_of(runs[padding ? 0 : row_runs[row]], cursors);
  const long index = rows.cursor + row - rows.first_row;
  for (int which = 0; which < 2; ++which) {
    float sum = 0.0f;
    for (int i = item; i < d_k && !padding; i += ITEMS) {
      const float x = convolved(taps, qkv, window, k_max, channels, rows, index, ((long)which * num_k_heads + head) * d_k + i);
      values[which][i] = x;
      sum = fma(x, x, sum);
    }
    const float factor = 1.0f / sqrt(group_sum(sum, shared) + 1e-6f) * (which == 0 ? 1.0f / sqrt((float)d_k) : 1.0f);
    for (int i = item; i < d_k && !padding; i += ITEMS) {
      const float x = values[which][i] * factor;
      keys[((row * num_k_heads + head) * 2 + which) * d_k + i] = which == 0 ? x : round_ring(x);
    }
  }
}

// Element (column, i) of e^G64 S + sum_j e^(G64 - Gj) uj kj^T, where factors[j] = e^(G64 - Gj).
#define FOLDED(column, i, x)                                                                                                                    \
  float x = folded_decay * state[(column) * d_k + (i)];                                                                                         \
  for (int j_ = 0; j_ < GRID; ++j_)                                                                                                             \
    x = fma(factors[j_] * ring_to_f32(ring_u[((rows.slot * length + (boundary + j_) % length) * num_v_heads + head) * d_v + (column)]),         \
            key_at(keys, ring_k, num_k_heads, k_head, d_k, k_max, rows, boundary + j_, i), x)

// The factors of the fold of a full chunk; all items.
#define PREPARE_FOLD()                                                                             \
  barrier(CLK_LOCAL_MEM_FENCE | CLK_GLOBAL_MEM_FENCE);                                             \
  for (int j_ = item; j_ < GRID; j_ += ITEMS) factors[j_] = exp(sums[GRID - 1] - sums[j_]);        \
  barrier(CLK_LOCAL_MEM_FENCE);                                                                    \
  folded_decay = exp(sums[GRID - 1])
#define STORE_FOLD()                                                       \
  PREPARE_FOLD();                                                          \
  for (int element_ = item; element_ < d_k * d_v; element_ += ITEMS) {     \
    FOLDED(element_ / d_k, element_ % d_k, folded_);                       \
    state[element_] = folded_;                                             \
  }                                                                        \
  barrier(CLK_LOCAL_MEM_FENCE | CLK_GLOBAL_MEM_FENCE)

// A group per run (axis 0) and value head (axis 1). u goes to the ring as it is made: the ring is as long as the rows that one of them needs.
__kernel __attribute__((reqd_work_group_size(ITEMS, 1, 1))) void gdn_rows(GDN_ROWS_PARAMETERS) {
  FIND_GDN_ROWS;
  __local float k[MAX_DIM], q[MAX_DIM], outputs[MAX_DIM], sums[MAX_CHUNK], along_k[MAX_CHUNK], along_q[MAX_CHUNK], factors[GRID], shared[ITEMS];
  const int item = (int)get_local_id(0), head = (int)get_group_id(1), k_head = k_heads[head];
  const rows_t rows = rows_in_turn(runs[get_group_id(0)], cursors, prompts_apart);
  const long length = GRID + k_max + 1, values_at = 2 * (long)num_k_heads * d_k;
  __global float* state = states + (rows.slot * num_v_heads + head) * (long)d_k * d_v;
  float folded_decay = 1.0f;
  long boundary = rows.cursor == rows.end ? 0 : boundaries[rows.slot];
  const bool due = boundary + GRID <= rows.cursor;  // a fold that the steps before have left
  const int known = (int)(due ? GRID : rows.cursor - boundary);
  for (int j = item; j < known; j += ITEMS) sums[j] = ring_g[(rows.slot * length + (boundary + j) % length) * num_v_heads + head];
  if (due) {
    STORE_FOLD();
    boundary += GRID;
    for (int j = item; j < rows.cursor - boundary; j += ITEMS) sums[j] = ring_g[(rows.slot * length + (boundary + j) % length) * num_v_heads + head];
  }
  barrier(CLK_LOCAL_MEM_FENCE);

  bool crossed = false;  // the row's boundary is one past the chunk's, whose fold is not stored
  for (long index = rows.cursor; index < rows.end; ++index) {
    if (index == boundary + GRID) {
      if (rows.committed) {
        STORE_FOLD();
        boundary += GRID;
      } else {
        PREPARE_FOLD();
        crossed = true;
      }
    }
    const long row = rows.first_row + index - rows.cursor;
    const int place = (int)(index - boundary), base = crossed ? GRID : 0;  // of the row, and of its chunk's first row
    for (int i = item; i < d_k; i += ITEMS) {
      q[i] = keys[((row * num_k_heads + k_head) * 2) * d_k + i];
      k[i] = keys[((row * num_k_heads + k_head) * 2 + 1) * d_k + i];
    }
    const float beta = round_activation(sigmoid(widen(b[row * num_v_heads + head])));
    const float decay_log = decays[head] * softplus(widen(a[row * num_v_heads + head]) + dt_bias[head]);
    const float total = place > base ? sums[place - 1] + decay_log : decay_log, decay = exp(total);
    barrier(CLK_LOCAL_MEM_FENCE);
    if (item == 0) sums[place] = total;
    for (int j = base + item; j <= place; j += ITEMS) {
      float dot_k = 0.0f, dot_q = 0.0f;
      for (int i = 0; i < d_k; ++i) {
        const float key = key_at(keys, ring_k, num_k_heads, k_head, d_k, k_max, rows, boundary + j, i);
        dot_k = fma(key, k[i], dot_k);
        dot_q = fma(key, q[i], dot_q);
      }
      const float factor = j < place ? exp(total - sums[j]) : 1.0f;
      along_k[j] = factor * dot_k;
      along_q[j] = factor * dot_q;
    }
    barrier(CLK_LOCAL_MEM_FENCE);
    float squares = 0.0f;
    for (int column = item; column < d_v; column += ITEMS) {
      float dot_k = 0.0f, dot_q = 0.0f;
      if (crossed) {
        for (int i = 0; i < d_k; ++i) {
          FOLDED(column, i, s);
          dot_k = fma(s, k[i], dot_k);
          dot_q = fma(s, q[i], dot_q);
        }
      } else {
        for (int i = 0; i < d_k; ++i) {
          dot_k = fma(state[(long)column * d_k + i], k[i], dot_k);
          dot_q = fma(state[(long)column * d_k + i], q[i], dot_q);
        }
      }
      float predicted = decay * dot_k, o = decay * dot_q;
      for (int j = base; j < place; ++j) {
        const float u_j = ring_to_f32(ring_u[((rows.slot * length + (boundary + j) % length) * num_v_heads + head) * d_v + column]);
        predicted = fma(along_k[j], u_j, predicted);
        o = fma(along_q[j], u_j, o);
      }
      const float v = convolved(taps, qkv, window, k_max, channels, rows, index, values_at + (long)head * d_v + column);
      const float u = round_ring(beta * (v - predicted));
      o = fma(along_q[place], u, o);
      ring_u[((rows.slot * length + index % length) * num_v_heads + head) * d_v + column] = ring_of(u);
      outputs[column] = o;
      squares = fma(o, o, squares);
    }
    if (item == 0) ring_g[(rows.slot * length + index % length) * num_v_heads + head] = total;
    const float scale = 1.0f / sqrt(group_sum(squares, shared) / (float)d_v + eps);
    for (int column = item; column < d_v; column += ITEMS) {
      const long at = (row * num_v_heads + head) * d_v + column;
      out[at] = narrow(outputs[column] * scale * norm[column] * silu(widen(z[at])));
    }
    barrier(CLK_LOCAL_MEM_FENCE | CLK_GLOBAL_MEM_FENCE);
  }
  if (rows.committed && rows.cursor < rows.end && rows.end == boundary + GRID) {
    STORE_FOLD();
  }
}

// k of the rows that the ring holds after the step. A group per run (axis 0), k head (axis 1) and row counted from the last (axis 2).
__kernel __attribute__((reqd_work_group_size(ITEMS, 1, 1))) void gdn_keep(int num_k_heads, int d_k, int k_max, PLACE(const run_t, runs), PLACE(const int, cursors),
                                                                          PLACE(const float, keys), PLACE(ring_t, ring_k)) {
  FIND(const run_t, runs);
  FIND(const int, cursors);
  FIND(const float, keys);
  FIND(ring_t, ring_k);
  const rows_t rows = rows_of(runs[get_group_id(0)], cursors);
  const int head = (int)get_group_id(1);
  const long index = rows.end - 1 - (long)get_group_id(2), length = GRID + k_max + 1;
  if (index < rows.cursor) return;
  const long row = rows.first_row + index - rows.cursor;
  for (int i = (int)get_local_id(0); i < d_k; i += ITEMS)
    ring_k[((rows.slot * length + index % length) * num_k_heads + head) * d_k + i] = ring_of(keys[((row * num_k_heads + head) * 2 + 1) * d_k + i]);
}

// An item per run (axis 1) and channel (axis 0): the columns before the boundary that gdn_rows has stored a fold at, then the window.
__kernel void gdn_window(int k_max, long channels, PLACE(const run_t, runs), PLACE(const int, cursors), PLACE(const int, boundaries), PLACE(const activation_t, qkv),
                         PLACE(activation_t, window), PLACE(activation_t, boundary_columns)) {
  FIND(const run_t, runs);
  FIND(const int, cursors);
  FIND(const int, boundaries);
  FIND(const activation_t, qkv);
  FIND(activation_t, window);
  FIND(activation_t, boundary_columns);
  const rows_t rows = rows_of(runs[get_global_id(1)], cursors);
  const long channel = (long)get_global_id(0);
  if (rows.cursor == rows.end || channel >= channels) return;
  keep_columns(k_max, channels, rows, channel, boundaries, qkv, window, boundary_columns);
}

// The conv's taps apart, [channels, 4] -> [4, channels], and -exp(A_log) in place.
__kernel void gdn_prepare(long channels, int num_v_heads, PLACE(const uchar, conv1d), int conv_dtype, PLACE(float, taps), PLACE(float, decays)) {
  FIND(const uchar, conv1d);
  FIND(float, taps);
  FIND(float, decays);
  const long i = (long)get_global_id(0);
  if (i < channels)
    for (int tap = 0; tap < 4; ++tap) taps[tap * channels + i] = load_any(conv1d, conv_dtype, i * 4 + tap);
  if (i < num_v_heads) decays[i] = -exp(decays[i]);
}
