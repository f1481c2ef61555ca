// The gated delta rule of gdn_mix.cl for heads of 128 x 128 on sub-groups of 16: the state of a head is read once a row, and written only when 64 rows are folded in. What is summed
// over lies in a lane's registers: a lane has a column of the state, and meets k and q that other lanes hold and a broadcast brings, so nothing is exchanged between lanes but for norms.
// Sums have one order, however rows are cut. Launches of a layer: gdn_keys, gdn_rows, gdn_keep; with -DSHORT_RUNS, for runs of up to 8 rows, gdn_rows makes q and k by itself, to the
// same bits, and keeps what a single row leaves.
#define ITEMS 128
#include "backends/opencl/numeric.clh"
#include "backends/opencl/step.clh"
#include "backends/opencl/gdn.clh"
#include "backends/opencl/lanes.clh"
#include "backends/opencl/xe2.clh"

#define D 128        // d_k and d_v: an item has a column
#define GROUPS 8     // sub-groups
#define HALF 64      // elements of d_k, of a column at a time, or of 16 rows of a chunk
#define SHORT_RUN 8  // rows

#define ONE_BY_ONE _Pragma("unroll 1")  // loops whose turns are counted (gdn_row_pass() of programs.cpp)

// Elements 8 n .. 8 n + 7, n known when the kernel is built, of what the lanes hold in turn in `registers`; emulation reads them from memory in place of asking other lanes.
#ifdef EMULATED
#define EIGHT(registers, n, in_memory) (in_memory)
#else
#define ELEMENT(registers, i) intel_sub_group_shuffle((registers)[(i) / 16], (i) % 16)
#define EIGHT(registers, n, in_memory)                                                                                                                               \
  (float8)(ELEMENT(registers, 8 * (n)), ELEMENT(registers, 8 * (n) + 1), ELEMENT(registers, 8 * (n) + 2), ELEMENT(registers, 8 * (n) + 3), ELEMENT(registers, 8 * (n) + 4), \
           ELEMENT(registers, 8 * (n) + 5), ELEMENT(registers, 8 * (n) + 6), ELEMENT(registers, 8 * (n) + 7))
#endif
float sum8(float8 x) { return ((x.s0 + x.s1) + (x.s2 + x.s3)) + ((x.s4 + x.s5) + (x.s6 + x.s7)); }

#ifdef ACTIVATION_BF16
activation_t quick_narrow(float x) { return bf16_of(x); }
#else
activation_t quick_narrow(float x) { return x; }
#endif
float quick_round(float x) { return widen(quick_narrow(x)); }
// What the pointwise functions of numeric.clh are, in fewer instructions: within 1e-6 of them.
float quick_sigmoid(float x) { return native_recip(1.0f + native_exp(-x)); }
float quick_silu(float x) { return x * quick_sigmoid(x); }
// log(1 + t) of t = e^-|x| is 2 artanh(t / (2 + t)), whose series has ever smaller powers of 1/9.
float quick_softplus(float x) {
  const float t = native_exp(-fabs(x)), z = t * native_recip(2.0f + t), z2 = z * z;
  float series = 1.0f / 15;
  series = fma(series, z2, 1.0f / 13);
  series = fma(series, z2, 1.0f / 11);
  series = fma(series, z2, 1.0f / 9);
  series = fma(series, z2, 1.0f / 7);
  series = fma(series, z2, 1.0f / 5);
  series = fma(series, z2, 1.0f / 3);
  series = fma(series, z2, 1.0f);
  return fmax(x, 0.0f) + 2.0f * z * series;
}

// a b, of numbers below 2^32: the compiler multiplies longs in three times as many instructions.
#define PRODUCT(a, b) ((ulong)(uint)(a) * (uint)(b))
// x mod n, for x < 2^24.
int remainder_of(int x, int n) {
  const int rest = x - (int)((float)x * native_recip((float)n)) * n;  // -n <= rest < 2 n
  return rest < 0 ? rest + n : rest >= n ? rest - n : rest;
}
int wrapped(int at, int length) { return at < length ? at : at - length; }
// The run's rows of qkv, and the slot's window with the place in it of rows.cursor.
typedef struct {
  const __global activation_t *rows, *window;
  int window_at, window_length, channels;
} columns_t;
columns_t columns_of(const __global activation_t* qkv, const __global activation_t* window, int k_max, int channels, rows_t rows) {
  const int length = 3 + k_max + 1;
  columns_t columns = {qkv + PRODUCT(rows.first_row, channels), window + PRODUCT((int)rows.slot * length, channels), remainder_of((int)rows.cursor, length), length, channels};
  return columns;
}
// The column that stands `at` after the run's first row, at least -length.
const __global activation_t* column_at(columns_t columns, int at) {
  const int in_window = columns.window_at + at;
  return (at >= 0 ? columns.rows : columns.window) + (at >= 0 ? at : in_window < 0 ? in_window + columns.window_length : in_window) * columns.channels;
}
// convolved() of gdn.clh.
float convolved_in(columns_t columns, const __global float* taps, int index, int in_step, int channel) {
  float y = 0.0f;
  UNROLL
  for (int tap = 0; tap < 4; ++tap) {
    const uint there = index - 3 + tap >= 0 ? 0xffffffffu : 0u;
    y = fma(taps[tap * columns.channels + channel], as_float(as_uint(widen(column_at(columns, in_step - 3 + tap)[channel])) & there), y);
  }
  return quick_round(quick_silu(y));
}
// Eight sums of 16 squares each.
#define SUM_OF_8(x) sum8(vload8(0, x))
// q or k of length 1, q also times 128^-1/2, k as the ring holds it.
float query_value(float x, float squares) { return x * (rsqrt(squares + 1e-6f) * 0.08838834764831845f); }
float key_value(float x, float squares) { return round_ring(x * rsqrt(squares + 1e-6f)); }

#ifndef SHORT_RUNS
// q and k of every row: keys f32 [rows, num_k_heads, 2, 128], q first. A sub-group per row (axis 0) and of q or k of a head (axis 1).
SUB_GROUP __attribute__((reqd_work_group_size(16, 1, 1))) __kernel void gdn_keys(
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
  const columns_t columns = columns_of(qkv, window, k_max, (int)channels, rows);
  const int in_step = (int)(row - rows.first_row);
  float x[D / 16], sums[D / 16];
  UNROLL
  for (int n = 0; n < D / 16; ++n) {
    x[n] = convolved_in(columns, taps, (int)rows.cursor + in_step, in_step, (which * num_k_heads + head) * D + n * 16 + lane);
    sums[n] = lanes_sum(x[n] * x[n], lane);
  }
  const float squares = SUM_OF_8(sums);
  UNROLL
  for (int n = 0; n < D / 16; ++n) keys[((row * num_k_heads + head) * 2 + which) * D + n * 16 + lane] = which == 0 ? query_value(x[n], squares) : key_value(x[n], squares);
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
      ring_k[(rows.slot * length + in_turn(index, length)) * width + in_k] = ring_of(keys[(((rows.first_row + index - rows.cursor) * num_k_heads + head) * 2 + 1) * D + i]);
  }
  keep_columns(k_max, channels, rows, channel, boundaries, qkv, window, boundary_columns);
}
#endif

// Row j from the boundary on in the rings of the run's slot and head, for j below a ring's length.
#define IN_RING(j) wrapped(ring_start + (j), length)
#define RING_KEY(j) (ring_k_at + IN_RING(j) * key_width)
#define RING_U(j) (ring_u_at + IN_RING(j) * value_width)
#define SUM_AT(j) sums[(boundary + (j)) & (MAX_CHUNK - 1)]
#define RING_G(j) ring_g_at[IN_RING(j) * num_v_heads]
// k of this step's row s.
#ifdef SHORT_RUNS
#define STEP_KEY(s) (step_keys + (s) * D)
#define ROW_KEY(s) STEP_KEY(s)
#else
#define ROW_KEY(s) row_key
#define STEP_KEY(s) (keys_at + (s) * (2 * key_width))
#endif

float8 widen_ring8(const __global ring_t* p) {
#ifdef RING_BF16
  return as_float8(convert_uint8(vload8(0, p)) << 16);
#else
  return vload8(0, p);
#endif
}
// 8 rows of the ring's u from `row` on, of 16 columns; nothing is read, and 0 found, from `height` on.
float8 read_u(const __global ring_t* ring, int num_v_heads, int height, int column, int row) {
#ifdef RING_BF16
  ushort8 bits;
  intel_sub_group_2d_block_read_16b_8r16x1c((__global void*)ring, D * 2, height, num_v_heads * D * 2, (int2)(column, row), (__private ushort*)&bits);
  return as_float8(convert_uint8(bits) << 16);
#else
  float8 u;
  intel_sub_group_2d_block_read_32b_8r16x1c((__global void*)ring, D * 4, height, num_v_heads * D * 4, (int2)(column, row), (__private uint*)&u);
  return u;
#endif
}

// A group per run (axis 0) and value head (axis 1).
SUB_GROUP __attribute__((reqd_work_group_size(ITEMS, 1, 1))) __kernel void gdn_rows(GDN_ROWS_PARAMETERS) {
  FIND_GDN_ROWS;
  // G of the last rows by index; then of a row q, k and squares, its gates beta and e^G, and what the keys of its chunk are times k and q, by halves of d_k, then with their decay.
  __local float sums[MAX_CHUNK], row_query[D], squares[3][GROUPS], gates[2], halves[2][2][GRID + 8], along[2][GRID + 8], factors[GRID];
  const int item = (int)get_local_id(0), lane = (int)get_sub_group_local_id(), group = item / 16, first_column = group * 16;
  const int head = (int)get_group_id(1), k_head = k_heads[head];
  const rows_t rows = rows_in_turn(runs[get_group_id(0)], cursors, prompts_apart);
  const int slot = (int)rows.slot, first_row = (int)rows.first_row, cursor = (int)rows.cursor, end = (int)rows.end;
  const int length = GRID + k_max + 1, slot_ring = slot * length, key_width = num_k_heads * D, value_width = num_v_heads * D;
  const columns_t columns = columns_of(qkv, window, k_max, (int)channels, rows);
  __global float* state_column = states + (long)(slot * num_v_heads + head) * (D * D) + item * D;
  __global ring_t* ring_k_at = ring_k + PRODUCT(slot_ring, key_width) + k_head * D;
  __global ring_t* ring_u_at = ring_u + PRODUCT(slot_ring, value_width) + head * D;
  __global float* ring_g_at = ring_g + slot_ring * num_v_heads + head;
  __global float* keys_at = keys + (long)(first_row * num_k_heads + k_head) * (2 * D) + D;
#ifdef SHORT_RUNS
  __local float step_keys[SHORT_RUN * D];
  const bool gives_key = is_first_of_key(k_heads, num_v_heads, head);
#else
  __local float row_key[D];
#endif
  int boundary = cursor == end ? 0 : boundaries[slot];
  int ring_start = remainder_of(boundary, length), in_ring = cursor - boundary;  // where the rows from the boundary on begin in the ring, and how many are there
  if (item < in_ring) SUM_AT(item) = RING_G(item);

  for (int index = cursor; index <= end; ++index) {
    // A full chunk is folded in: one that the steps before have left, one that the run goes past, and one that it ends with. A fold past drafts is not stored, and done again for each row.
    const bool is_row = index < end, folds = index >= boundary + GRID, stores = folds && (rows.committed || in_ring >= GRID);
    const int num_folds = (index - boundary) >> 6;
    if (!is_row && !(folds && rows.committed)) break;
    const int in_step = index - cursor, row = first_row + in_step;
    const int place = index - boundary, base = folds ? GRID : 0, before = place - base;  // of the row, of its chunk's first row, and how many are between
    barrier(CLK_LOCAL_MEM_FENCE);
    float v = 0.0f;
    __local float* this_key = ROW_KEY(in_step);
    if (is_row) {
      // Conv of q, k and v; the row's gates are one sub-group's.
      const int v_channel = 2 * key_width + head * D + item;
      v = convolved_in(columns, taps, index, in_step, v_channel);
      if (group == GROUPS - 1) {
        const float decay_log = decays[head] * quick_softplus(widen(a[row * num_v_heads + head]) + dt_bias[head]);
        const float total = before > 0 ? SUM_AT(place - 1) + decay_log : decay_log;
        if (lane == 0) {
          SUM_AT(place) = total;
          gates[0] = quick_round(quick_sigmoid(widen(b[row * num_v_heads + head])));
          gates[1] = exp(total);
        }
      }
#ifdef SHORT_RUNS
      const int q_channel = k_head * D + item, k_channel = key_width + q_channel;
      const float convolved_q = convolved_in(columns, taps, index, in_step, q_channel), convolved_k = convolved_in(columns, taps, index, in_step, k_channel);
      const float q_square = lanes_sum(convolved_q * convolved_q, lane), k_square = lanes_sum(convolved_k * convolved_k, lane);
      if (lane == 0) {
        squares[0][group] = q_square;
        squares[1][group] = k_square;
      }
      barrier(CLK_LOCAL_MEM_FENCE);
      const float k = key_value(convolved_k, SUM_OF_8(squares[1]));
      row_query[item] = query_value(convolved_q, SUM_OF_8(squares[0]));
      this_key[item] = k;
      if (keeps) {  // a single row: no group reads its place in the rings
        const int kept[3] = {v_channel, q_channel, k_channel}, folded_end = (rows.committed ? end : cursor) & -GRID;
        const bool folded = folded_end > boundaries[slot];
        __global activation_t* window_here = (__global activation_t*)columns.window + columns.window_at * columns.channels;
        UNROLL
        for (int n = 0; n < 3; ++n)
          if (n == 0 || gives_key) window_here[kept[n]] = columns.rows[kept[n]];
        ONE_BY_ONE
        for (int i = 0; folded && i < 3; ++i) {
          UNROLL
          for (int n = 0; n < 3; ++n)
            if (n == 0 || gives_key) boundary_columns[PRODUCT(slot * 3 + i, columns.channels) + kept[n]] = column_at(columns, folded_end - cursor - 3 + i)[kept[n]];
        }
        if (gives_key) RING_KEY(place)[item] = ring_of(k);
      } else if (gives_key) {
        keys_at[in_step * (2 * key_width) + item] = k;
      }
#else
      row_query[item] = STEP_KEY(in_step)[item - D];
      this_key[item] = STEP_KEY(in_step)[item];
#endif
    }
    barrier(CLK_LOCAL_MEM_FENCE);

    // S^T k and S^T q of the item's column.
    float state_k = 0.0f, state_q = 0.0f;
    ONE_BY_ONE
    for (int half_k = 0; half_k < 2; ++half_k) {
      float8 state[HALF / 8], dot_k = 0.0f, dot_q = 0.0f;
      __global float* column_at_half = state_column + half_k * HALF;
      float k[HALF / 16], q[HALF / 16];
      UNROLL
      for (int n = 0; n < HALF / 8; ++n) state[n] = vload8(n, column_at_half);
      for (int fold = 0; fold < num_folds; ++fold) {  // once at most; a loop, so that its instructions are counted apart
        if (item < GRID) factors[item] = exp(SUM_AT(GRID - 1) - SUM_AT(item));
        barrier(CLK_LOCAL_MEM_FENCE);
        const float folded_decay = exp(SUM_AT(GRID - 1));
        UNROLL
        for (int n = 0; n < HALF / 8; ++n) state[n] *= folded_decay;
        ONE_BY_ONE
        for (int j = 0; j < GRID; ++j) {
          const float u = factors[j] * ring_to_f32(RING_U(j)[item]);
          if (j >= in_ring) {
            UNROLL
            for (int n = 0; n < HALF / 16; ++n) k[n] = (STEP_KEY(j - in_ring) + half_k * HALF + lane)[n * 16];
          } else {
            UNROLL
            for (int n = 0; n < HALF / 16; ++n) k[n] = ring_to_f32((RING_KEY(j) + half_k * HALF + lane)[n * 16]);
          }
          UNROLL
          for (int n = 0; n < HALF / 8; ++n)
            state[n] = fma((float8)u, EIGHT(k, n, j >= in_ring ? vload8(n, STEP_KEY(j - in_ring) + half_k * HALF) : widen_ring8(RING_KEY(j) + half_k * HALF + n * 8)), state[n]);
        }
        if (stores) {
          UNROLL
          for (int n = 0; n < HALF / 8; ++n) vstore8(state[n], n, column_at_half);
        }
      }
      const __local float *keys_here = this_key + half_k * HALF, *query_here = row_query + half_k * HALF;
      UNROLL
      for (int n = 0; n < HALF / 16; ++n) {
        k[n] = (keys_here + lane)[n * 16];
        q[n] = (query_here + lane)[n * 16];
      }
      UNROLL
      for (int n = 0; n < HALF / 8; ++n) {
        dot_k = fma(EIGHT(k, n, vload8(n, keys_here)), state[n], dot_k);
        dot_q = fma(EIGHT(q, n, vload8(n, query_here)), state[n], dot_q);
      }
      state_k += sum8(dot_k);
      state_q += sum8(dot_q);
    }
    if (!is_row) break;
    // Those of a lane's row of the chunk: half of d_k, which are two sub-groups'.
    const int half_k = group / 4;
    ONE_BY_ONE
    for (int first = group % 4 * 16; first <= before; first += GRID) {
      const int j = base + min(first + lane, before);
      const __local float *keys_here = this_key + half_k * HALF, *query_here = row_query + half_k * HALF;
      float k[HALF / 16], q[HALF / 16];
      float8 key[HALF / 8], dot_k = 0.0f, dot_q = 0.0f;
      if (j >= in_ring) {
        UNROLL
        for (int n = 0; n < HALF / 8; ++n) key[n] = vload8(n, STEP_KEY(j - in_ring) + half_k * HALF);
      } else {
        UNROLL
        for (int n = 0; n < HALF / 8; ++n) key[n] = widen_ring8(RING_KEY(j) + half_k * HALF + n * 8);
      }
      UNROLL
      for (int n = 0; n < HALF / 16; ++n) {
        k[n] = (keys_here + lane)[n * 16];
        q[n] = (query_here + lane)[n * 16];
      }
      UNROLL
      for (int n = 0; n < HALF / 8; ++n) {
        dot_k = fma(EIGHT(k, n, vload8(n, keys_here)), key[n], dot_k);
        dot_q = fma(EIGHT(q, n, vload8(n, query_here)), key[n], dot_q);
      }
      halves[0][half_k][first + lane] = sum8(dot_k);
      halves[1][half_k][first + lane] = sum8(dot_q);
    }
    barrier(CLK_LOCAL_MEM_FENCE);
    if (item < GRID + 8) {
      const float factor = item < before ? exp(SUM_AT(place) - SUM_AT(base + item)) : item == before ? 1.0f : 0.0f;
      along[0][item] = item <= before ? factor * (halves[0][0][item] + halves[0][1][item]) : 0.0f;
      along[1][item] = item <= before ? factor * (halves[1][0][item] + halves[1][1][item]) : 0.0f;
    }
    barrier(CLK_LOCAL_MEM_FENCE);

    // The ring's u, 8 rows at a time; the ring may end between them.
    float predicted = gates[1] * state_k, o = gates[1] * state_q;
    const __local float* along_here = along[lane / 8] + lane % 8;
    ONE_BY_ONE
    for (int j = 0; j < before;) {
      const int at = IN_RING(base + j), taken = min(min(8, before - j), length - at);
      const float8 u = read_u(ring_u_at, num_v_heads, at + taken, first_column, at);
#ifdef EMULATED
      for (int i = 0; i < taken; ++i) {
        predicted = fma(along[0][j + i], ((const float*)&u)[i], predicted);
        o = fma(along[1][j + i], ((const float*)&u)[i], o);
      }
#else
      const float of_8_rows[1] = {along_here[j]};
      const float8 k = EIGHT(of_8_rows, 0, 0), q = EIGHT(of_8_rows, 1, 0);
      UNROLL
      for (int i = 0; i < 8; ++i) {
        predicted = fma(k[i], u[i], predicted);
        o = fma(q[i], u[i], o);
      }
#endif
      j += taken;
    }
    const float u = round_ring(gates[0] * (v - predicted));
    o = fma(along[1][before], u, o);
    RING_U(place)[item] = ring_of(u);
    if (item == 0) RING_G(place) = SUM_AT(place);
    const float square = lanes_sum(o * o, lane);
    if (lane == 0) squares[2][group] = square;
    barrier(CLK_LOCAL_MEM_FENCE | CLK_GLOBAL_MEM_FENCE);
    const int at = (row * num_v_heads + head) * D + item;
    if (stores) {
      boundary += GRID;
      ring_start = wrapped(ring_start + GRID, length);
      in_ring -= GRID;
    }
    out[at] = quick_narrow(o * rsqrt(SUM_OF_8(squares[2]) / (float)D + eps) * norm[item] * quick_silu(widen(z[at])));
  }
}
