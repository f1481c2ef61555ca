// Prompt rows of the gated delta rule (ops/gdn_mix.h) for heads of 128 x 128, a chunk of the 64-grid at a time on the matrix units. With y the rows after the conv, which are exact
// in bf16, and f what normalizes them:
//   L = strictly lower(beta_i f_i f_j e^(Gi - Gj) yk_i . yk_j)      T = (I + L)^-1 diag(beta)      P = lower(fq_i f_j e^(Gi - Gj) yq_i . yk_j)
//   U = T (V - diag(e^G f) Yk S)      O = diag(e^G fq) Yq S + P U      S <- e^G64 S + Yk^T diag(e^(G64 - G) f) U
// Launches, each for all chunks of all prompts at once: gdn_prompt_rows makes y and f, gdn_prompt_chunks T and P, gdn_prompt_scan walks along the chunks of a run with S in
// registers, gdn_prompt_norm is the gated norm. Whatever is not exact in bf16 meets the matrix units in two parts, 16 bits of mantissa; sums, S, G, e^G and the solve are f32.
//
// Chunks are counted from the boundary of the stored state. Rows of a chunk that are in the ring, since the run begins inside it or a fold is due, are known: their k and u are read, their
// rows of L are zero and those of T the identity's, so that U gives them back. A row's bits depend on the rows before it and on its place on the grid: what a product takes of later rows is a zero.
#include "backends/opencl/numeric.clh"
#include "backends/opencl/step.clh"
#include "backends/opencl/gdn.clh"
#include "backends/opencl/xe2.clh"
#include "backends/opencl/lanes.clh"

#define D 128       // d_k and d_v
#define IMAGE 8192  // elements of the rows of a head: 64 x 128, or 128 x 64
#define MATRIX 4096
#define COLUMNS 16  // of a head, that a sub-group of the scan has

// A chunk of a prompt.
typedef struct {
  int slot, cursor, base;  // the run's first row stands at `cursor`, the chunk's at `base`
  int row;                 // of the step, that the chunk's first would be; before the run's where rows are known
  int known, rows;         // rows before the run's first; all rows. No rows: nothing to do
} tile_t;
// Chunks of a run, of which the last may turn out empty: how many rows are known is on the device alone.
int tiles_of(run_t run, int k_max) {
  return run.slot >= 0 && run.num_rows > 0 && is_chunked(run) ? (run.num_rows + 2 * GRID + k_max - 1) / GRID : 0;
}
tile_t tile_of_run(run_t run, const __global int* cursors, const __global int* boundaries, int chunk) {
  tile_t tile;
  tile.slot = run.slot;
  tile.cursor = cursors[run.slot];
  tile.base = (tile.cursor == 0 ? 0 : boundaries[run.slot]) + chunk * GRID;
  tile.row = run.first_row + tile.base - tile.cursor;
  tile.known = clamp(tile.cursor - tile.base, 0, GRID);
  tile.rows = clamp(tile.cursor + run.num_rows - tile.base, 0, GRID);
  return tile;
}
tile_t tile_of(const __global run_t* runs, int num_runs, const __global int* cursors, const __global int* boundaries, int k_max, int number) {
  for (int i = 0; i < num_runs; ++i) {
    const run_t run = runs[i];
    const int tiles = tiles_of(run, k_max);
    if (number < tiles) return tile_of_run(run, cursors, boundaries, number);
    number -= tiles;
  }
  tile_t none = {0, 0, 0, 0, 0, 0};
  return none;
}

// Workspace of a launch, by tile from first_tile on: images of rows bf16 [num_tiles, 3 num_k_heads + num_v_heads, 8192], those of q, k and v [64, 128] and k transposed [128, 64];
// matrices bf16 [num_tiles, num_v_heads, 4, 64, 64], T and what its rounding leaves, P likewise; scalars f32 [num_tiles, num_v_heads, 4, 64], e^G f, e^G fq, e^(G64 - G) f, G;
// factors f32 [num_tiles, 2 num_k_heads, 64], f of q, times 128^-1/2, and of k.
#define PROMPT_PARAMETERS                                                                                                                                                 \
  int first_tile, int num_tiles, int num_runs, int num_k_heads, int num_v_heads, int k_max, PLACE(const run_t, runs), PLACE(const int, cursors), PLACE(const int, boundaries), \
      PLACE(ushort, images)
#define FIND_PROMPT                                                                                               \
  FIND(const run_t, runs);                                                                                        \
  FIND(const int, cursors);                                                                                       \
  FIND(const int, boundaries);                                                                                    \
  FIND(ushort, images);                                                                                           \
  const int num_images = 3 * num_k_heads + num_v_heads;                                                           \
  __global ushort* matrices = images + (long)num_tiles * num_images * IMAGE;                                      \
  __global float* scalars = (__global float*)(matrices + (long)num_tiles * num_v_heads * 4 * MATRIX);             \
  __global float* factors = scalars + (long)num_tiles * num_v_heads * 4 * GRID;                                   \
  const int lane = (int)get_sub_group_local_id(), group = (int)get_sub_group_id()
#define FIND_TILE                                                                                                 \
  const int in_launch = (int)get_group_id(0), head = (int)get_group_id(1);                                        \
  const tile_t tile = tile_of(runs, num_runs, cursors, boundaries, k_max, first_tile + in_launch);                \
  if (tile.rows == 0) return

// Within a few ulps of silu(), before it is rounded to bf16.
float quick_silu(float x) { return x * native_recip(1.0f + native_exp(-x)); }
float8 widen8(ushort8 x) { return as_float8(convert_uint8(x) << 16); }
float8 load8(const __global ushort* p) {  // 16 bytes, aligned
  const uint4 pairs = *(const __global uint4*)p;
  float8 x;
  x.even = as_float4(pairs << 16);
  x.odd = as_float4(pairs & 0xffff0000u);
  return x;
}
float rounded(float x) { return as_float((uint)bf16_of(x) << 16); }
ushort8 narrow8(float8 x) {
  float value[8];
  ushort bits[8];
  vstore8(x, 0, value);
  UNROLL
  for (int i = 0; i < 8; ++i) bits[i] = bf16_of(value[i]);
  return vload8(0, bits);
}
float8 rounded8(float8 x) {
  float value[8];
  vstore8(x, 0, value);
  UNROLL
  for (int i = 0; i < 8; ++i) value[i] = rounded(value[i]);
  return vload8(0, value);
}
// The upper halves of floats in pairs, the first of a pair below.
uint8 paired(float8 first, float8 second) { return as_uint8(first) >> 16 | (as_uint8(second) & 0xffff0000u); }
float sum8(float8 x) { return ((x.s0 + x.s1) + (x.s2 + x.s3)) + ((x.s4 + x.s5) + (x.s6 + x.s7)); }

// y and f of a head's rows. A group per tile (axis 0) and head of q, then k, then v (axis 1); a sub-group has 16 rows, a lane 8 channels.
SUB_GROUP __attribute__((reqd_work_group_size(64, 1, 1))) __kernel void gdn_prompt_rows(PROMPT_PARAMETERS, int channels, PLACE(const float, taps), PLACE(const ushort, qkv),
                                                                                       PLACE(const ushort, window), PLACE(const ring_t, ring_k), PLACE(const ring_t, ring_u)) {
  FIND_PROMPT;
  FIND(const float, taps);
  FIND(const ushort, qkv);
  FIND(const ushort, window);
  FIND(const ring_t, ring_k);
  FIND(const ring_t, ring_u);
  FIND_TILE;
  const int first = group * 16, window_length = 3 + k_max + 1, ring_length = GRID + k_max + 1;
  const long channel = (long)head * D + lane * 8;
  const bool is_key = head >= num_k_heads && head < 2 * num_k_heads, is_value = head >= 2 * num_k_heads;
  const float scale = head < num_k_heads ? 0.08838834764831845f : 1.0f;
  __global ushort* image = images + ((long)in_launch * num_images + head) * IMAGE;
  // Of known rows k and u are in the ring; nobody needs their q.
  const int ring_width = is_value ? num_v_heads * D : num_k_heads * D;
  const __global ring_t* ring = (is_value ? ring_u + (head - 2 * num_k_heads) * D : ring_k + max(head - num_k_heads, 0) * D) + (long)tile.slot * ring_length * ring_width + lane * 8;
  const __global ushort* from = qkv + ((long)tile.row + first - 3) * channels + channel;  // of row r; where it has one
  const __global ushort* window_rows = window + (long)tile.slot * window_length * channels + channel;
  float8 weight[4], x[4];  // x of row r at r mod 4, before it those of the three rows before the first
  UNROLL
  for (int tap = 0; tap < 4; ++tap) weight[tap] = *(const __global float8*)(taps + tap * channels + channel);
  float own_factor = 0.0f;  // lane r: of row r
  float8 before = 0.0f;
  int in_window = max(tile.base + first - 3, 0) % window_length, in_ring = (tile.base + first) % ring_length;  // of row r
  __global uint* transposed = (__global uint*)(images + ((long)in_launch * num_images + num_k_heads + num_v_heads + head) * IMAGE + lane * 8 * GRID + first);  // of a k head
  UNROLL
  for (int r = -3; r < 16; ++r, from += channels) {
    const int row = first + r, index = tile.base + row;
    const bool is_new = index >= tile.cursor && row < tile.rows;
    x[r & 3] = 0.0f;
    if (is_new)
      x[r & 3] = load8(from);
    else if (index >= 0 && index < tile.cursor)
      x[r & 3] = load8(window_rows + (long)in_window * channels);
    in_window = index < 0 || in_window + 1 == window_length ? 0 : in_window + 1;
    if (r < 0) continue;
    float8 sum = 0.0f;
    UNROLL
    for (int tap = 0; tap < 4; ++tap) sum = fma(weight[tap], x[(r + 1 + tap) & 3], sum);
    float value[8];
    vstore8(sum, 0, value);
    UNROLL
    for (int i = 0; i < 8; ++i) value[i] = is_new ? rounded(quick_silu(value[i])) : 0.0f;
    float8 y = vload8(0, value);
    if (row < tile.known && head >= num_k_heads) {
      const __global ring_t* kept = ring + (long)in_ring * ring_width;
#ifdef RING_BF16
      y = load8(kept);
#else
      y = rounded8(*(const __global float8*)kept);
#endif
    }
    in_ring = in_ring + 1 == ring_length ? 0 : in_ring + 1;
    const uint8 bits = as_uint8(y);
    *(__global uint4*)(image + row * D + lane * 8) = bits.even >> 16 | bits.odd;
    const float factor = native_rsqrt(lanes_sum(sum8(y * y), lane) + 1e-6f) * scale;
    own_factor = lane != r ? own_factor : is_new ? factor : row < tile.known ? 1.0f : 0.0f;
    if (is_key && r % 2 == 1) {
      uint pair[8];
      vstore8(paired(before, y), 0, pair);
      UNROLL
      for (int i = 0; i < 8; ++i) transposed[i * (GRID / 2) + r / 2] = pair[i];
    }
    before = y;
  }
  if (!is_value) factors[((long)in_launch * 2 * num_k_heads + head) * GRID + first + lane] = own_factor;
}

// A matrix [64, 64] in two parts, 8 rows and 16 columns of it.
void store_split(float8 x, __global ushort* matrix, int row, int column) {
  const ushort8 rounded = narrow8(x), rest = narrow8(x - widen8(rounded));
  intel_sub_group_2d_block_write_16b_8r16x1c(matrix, GRID * 2, GRID, GRID * 2, (int2)(column, row), (__private ushort*)&rounded);
  intel_sub_group_2d_block_write_16b_8r16x1c(matrix + MATRIX, GRID * 2, GRID, GRID * 2, (int2)(column, row), (__private ushort*)&rest);
}

// T and P. A group per tile (axis 0) and value head (axis 1). Two sub-groups have 32 rows each of yk . yk, two of yq . yk; then each has 16 columns of T, a lane one.
SUB_GROUP __attribute__((reqd_work_group_size(64, 1, 1))) __kernel void gdn_prompt_chunks(PROMPT_PARAMETERS, PLACE(const float, decays), PLACE(const float, dt_bias),
                                                                                         PLACE(const int, k_heads), PLACE(const ushort, b), PLACE(const ushort, a),
                                                                                         PLACE(const float, ring_g)) {
  FIND_PROMPT;
  FIND(const float, decays);
  FIND(const float, dt_bias);
  FIND(const int, k_heads);
  FIND(const ushort, b);
  FIND(const ushort, a);
  FIND(const float, ring_g);
  EMULATION_MEMORY(64);
  __local float lower[GRID * GRID], sums[GRID], beta[GRID], row_factors[2][GRID];  // L by columns; of the rows of L and P
  FIND_TILE;
  const int item = (int)get_local_id(0), k_head = k_heads[head];
  const long place = (long)in_launch * num_v_heads + head;
  const __global float* key_factors = factors + ((long)in_launch * 2 * num_k_heads + num_k_heads + k_head) * GRID;
  const __global float* query_factors = key_factors - num_k_heads * GRID;
  const bool is_known = item < tile.known, is_new = !is_known && item < tile.rows;
  {
    const int ring_length = GRID + k_max + 1;
    const long at = (long)(is_new ? tile.row + item : 0) * num_v_heads + head;
    const float own_beta = is_new ? round_bf16(sigmoid(bf16_to_f32(b[at]))) : 0.0f;
    row_factors[0][item] = own_beta * key_factors[item];
    row_factors[1][item] = query_factors[item];
    beta[item] = is_known ? 1.0f : own_beta;
    sums[item] = is_known ? ring_g[((long)tile.slot * ring_length + (tile.base + item) % ring_length) * num_v_heads + head]
                          : is_new ? decays[head] * softplus(bf16_to_f32(a[at]) + dt_bias[head]) : 0.0f;
  }
  barrier(CLK_LOCAL_MEM_FENCE);
  if (item == 0) {
    float total = 0.0f;
    UNROLL
    for (int j = 0; j < GRID; ++j) {
      total = j < tile.known ? sums[j] : total + sums[j];
      sums[j] = total;
    }
  }
  barrier(CLK_LOCAL_MEM_FENCE);

  const bool is_query = group >= 2;
  const int first = group % 2 * 32;
  __global void* keys = (__global void*)(images + ((long)in_launch * num_images + num_k_heads + k_head) * IMAGE);
  __global void* rows = (__global void*)(images + ((long)in_launch * num_images + (is_query ? 0 : num_k_heads) + k_head) * IMAGE);
  float8 products[4][4];
  UNROLL
  for (int r = 0; r < 4; ++r) {
    UNROLL
    for (int n = 0; n < 4; ++n) products[r][n] = 0.0f;
  }
  UNROLL
  for (int step = 0; step < D / 16; ++step) {
    ushort8 left[4];
    intel_sub_group_2d_block_read_16b_32r16x1c(rows, D * 2, GRID, D * 2, (int2)(step * 16, first), (__private ushort*)left);
    UNROLL
    for (int n = 0; n < 4; ++n) {
      uint8 right;
      intel_sub_group_2d_block_read_transpose_32b_16r8x1c(keys, D * 2, GRID, D * 2, (int2)(step * 8, n * 16), (__private uint*)&right);
      UNROLL
      for (int r = 0; r < 4; ++r) products[r][n] = MAD_BF16(as_short8(left[r]), as_int8(right), products[r][n]);
    }
  }
  __global ushort* matrix = matrices + place * 4 * MATRIX;
  UNROLL
  for (int n = 0; n < 4; ++n) {
    const int j = n * 16 + lane;
    const float sum_j = sums[j], factor_j = key_factors[j];
    UNROLL
    for (int r = 0; r < 4; ++r) {
      const int row = first + r * 8;
      const float8 sum = vload8(0, sums + row), decay = fmin(sum - sum_j, 0.0f), scaled = products[r][n] * vload8(0, row_factors[is_query ? 1 : 0] + row) * factor_j;
      float product[8], exponent[8];
      vstore8(scaled, 0, product);
      vstore8(decay, 0, exponent);
      UNROLL
      for (int m = 0; m < 8; ++m) product[m] = j < row + m + (is_query ? 1 : 0) ? product[m] * native_exp(exponent[m]) : 0.0f;
      if (is_query)
        store_split(vload8(0, product), matrix + 2 * MATRIX, row, n * 16);
      else
        vstore8(vload8(0, product), 0, lower + j * GRID + row);
    }
  }
  {
    const float decay = native_exp(sums[item]), left = native_exp(sums[GRID - 1] - sums[item]);
    __global float* scalar = scalars + place * 4 * GRID + item;
    scalar[0] = is_known ? 0.0f : decay * key_factors[item];
    scalar[GRID] = decay * query_factors[item];
    scalar[2 * GRID] = left * key_factors[item];
    scalar[3 * GRID] = sums[item];
  }
  barrier(CLK_LOCAL_MEM_FENCE);

  // (I + L)^-1 by columns: with x_j known, L_ij x_j leaves all later rows. Above its first row a column is zero.
  const int column = group * 16 + lane;
  float x[GRID];
  UNROLL
  for (int i = 0; i < GRID; ++i) x[i] = i == column ? 1.0f : 0.0f;
  UNROLL
  for (int block = 0; block < 4; ++block) {
    if (block < group) continue;
    UNROLL
    for (int in_block = 0; in_block < 16; ++in_block) {
      const int j = block * 16 + in_block;
      UNROLL
      for (int rows = 0; rows < GRID; rows += 16) {
        if (rows + 15 <= j) continue;
        float l[16];
        vstore16(vload16(0, lower + j * GRID + rows), 0, l);
        UNROLL
        for (int i = 0; i < 16; ++i)
          if (rows + i > j) x[rows + i] = fma(-l[i], x[j], x[rows + i]);
      }
    }
  }
  const float column_beta = beta[column];
  UNROLL
  for (int row = 0; row < GRID; row += 8) store_split(vload8(0, x + row) * column_beta, matrix, row, group * 16);
}

// 16 rows of a product, those of K in the next one, as a B operand in two parts: a dword has two rows. The first part is the upper half of a float, the second that of what it leaves.
void split_operand(float8 low, float8 high, uint upper_half, __private int8* parts) {
  const float8 even = (float8)(low.even, high.even), odd = (float8)(low.odd, high.odd);
  const uint8 even_part = as_uint8(even) & upper_half, odd_part = as_uint8(odd) & upper_half;
  parts[0] = as_int8(even_part >> 16 | odd_part);
  parts[1] = as_int8(as_uint8(even - as_float8(even_part)) >> 16 | (as_uint8(odd - as_float8(odd_part)) & upper_half));
}

// Blocks of a lower triangular matrix that are not zero: of 16 rows and 16 columns. Emulated ones are all multiplied: no barrier stands in a branch.
#ifdef EMULATED
#define IS_LOWER(row_block, column_block) true
#else
#define IS_LOWER(row_block, column_block) ((column_block) <= (row_block))
#endif
// sums [16 rows, 16 columns] of row_block += a lower triangular matrix in two parts, times operands in two parts of 16 of its columns each, which are the item's.
void multiply_lower(__global ushort* matrix, int row_block, const __local int8 (*operands)[2][D], int item, __private float8* sums EMULATION_PARAMETER) {
  UNROLL
  for (int step = 0; step < 4; ++step) {
    if (!IS_LOWER(row_block, step)) continue;
    const int8 right[2] = {operands[step][0][item], operands[step][1][item]};
    ushort8 left[2][2];
    UNROLL
    for (int part = 0; part < 2; ++part)
      intel_sub_group_2d_block_read_16b_16r16x1c((__global void*)(matrix + part * MATRIX), GRID * 2, GRID, GRID * 2, (int2)(step * 16, row_block * 16), (__private ushort*)left[part]);
    UNROLL
    for (int pair = 0; pair < 3; ++pair) {  // not the product of both rests
      UNROLL
      for (int r = 0; r < 2; ++r) sums[r] = MAD_BF16(as_short8(left[pair / 2][r]), right[pair % 2], sums[r]);
    }
  }
}

// A group per value head (axis 0) and run (axis 1): a sub-group walks along the chunks with 16 columns of the head, of which a lane has one. They wait for nobody.
SUB_GROUP __attribute__((reqd_work_group_size(D, 1, 1))) __kernel void gdn_prompt_scan(PROMPT_PARAMETERS, PLACE(const int, k_heads), PLACE(ushort, out), PLACE(float, states),
                                                                                     PLACE(ring_t, ring_k), PLACE(ring_t, ring_u), PLACE(float, ring_g)) {
  FIND_PROMPT;
  FIND(const int, k_heads);
  FIND(ushort, out);
  FIND(float, states);
  FIND(ring_t, ring_k);
  FIND(ring_t, ring_u);
  FIND(float, ring_g);
  EMULATION_MEMORY(D);
  // Of each item: what the state gives the outputs of 64 rows; operands of V - diag(e^G f) Yk S, and in their place those of U.
  __local float8 kept[8][D];
  __local int8 operands[4][2][D];
  __local volatile uint upper_half;
  const int head = (int)get_group_id(0), k_head = k_heads[head], item = (int)get_local_id(0), column = group * COLUMNS;
  if (item == 0) upper_half = 0xffff0000u;
  barrier(CLK_LOCAL_MEM_FENCE);
  const run_t run = runs[get_group_id(1)];
  int run_tile = -first_tile;  // the run's first, counted from the launch's
  for (int before = 0; before < (int)get_group_id(1); ++before) run_tile += tiles_of(runs[before], k_max);
  const int begin = max(0, run_tile);
  int end = min(num_tiles, run_tile + tiles_of(run, k_max));
  while (end > begin && tile_of_run(run, cursors, boundaries, end - 1 - run_tile).rows == 0) --end;
  if (begin >= end) return;
  const bool keeps_key = is_first_of_key(k_heads, num_v_heads, head);
  const int ring_length = GRID + k_max + 1;
  __global float8* stored = (__global float8*)(states + (((long)run.slot * num_v_heads + head) * D + column + lane) * D);
  float8 state[D / 8];
  UNROLL
  for (int i = 0; i < D / 8; ++i) state[i] = stored[i];

#pragma unroll 1
  for (int number = begin; number < end; ++number) {
    const tile_t tile = tile_of_run(run, cursors, boundaries, number - run_tile);
    __global ushort* tile_images = images + (long)number * num_images * IMAGE;
    const long place = (long)number * num_v_heads + head;
    __global ushort* matrix = matrices + place * 4 * MATRIX;
    const __global float* scalar = scalars + place * 4 * GRID;
    const __global float8* row_scalars = (const __global float8*)scalar;  // of 8 rows each
    __global void* values = (__global void*)(tile_images + (long)(2 * num_k_heads + head) * IMAGE);
    UNROLL
    for (int which = 0; which < 2; ++which) {  // q, k
      __global void* rows = (__global void*)(tile_images + (long)(which * num_k_heads + k_head) * IMAGE);
      float8 sums[8];
      UNROLL
      for (int r = 0; r < 8; ++r) sums[r] = 0.0f;
      const uint mask = upper_half;
      UNROLL
      for (int step = 0; step < D / 16; ++step) {
        int8 right[2];
        split_operand(state[2 * step], state[2 * step + 1], mask, right);
        UNROLL
        for (int half_rows = 0; half_rows < 2; ++half_rows) {
          ushort8 left[4];
          intel_sub_group_2d_block_read_16b_32r16x1c(rows, D * 2, GRID, D * 2, (int2)(step * 16, half_rows * 32), (__private ushort*)left);
          UNROLL
          for (int part = 0; part < 2; ++part) {
            UNROLL
            for (int r = 0; r < 4; ++r) sums[half_rows * 4 + r] = MAD_BF16(as_short8(left[r]), right[part], sums[half_rows * 4 + r]);
          }
        }
      }
      if (which == 0) {
        UNROLL
        for (int r = 0; r < 8; ++r) kept[r][item] = row_scalars[8 + r] * sums[r];
      } else {
        UNROLL
        for (int step = 0; step < 4; ++step) {
          ushort8 value[2];
          intel_sub_group_2d_block_read_16b_16r16x1c(values, D * 2, GRID, D * 2, (int2)(column, step * 16), (__private ushort*)value);
          int8 right[2];
          split_operand(widen8(value[0]) - row_scalars[2 * step] * sums[2 * step], widen8(value[1]) - row_scalars[2 * step + 1] * sums[2 * step + 1], 0xffff0000u, right);
          operands[step][0][item] = right[0];
          operands[step][1][item] = right[1];
        }
      }
    }
    __global void* keys = (__global void*)(tile_images + (long)(2 * num_k_heads + num_v_heads + k_head) * IMAGE);
    const float total = native_exp(scalar[4 * GRID - 1]);
    UNROLL
    for (int i = 0; i < D / 8; ++i) state[i] *= total;
    UNROLL
    for (int block = 3; block >= 0; --block) {  // 16 rows of U, whose operands take the place of what no other block needs, and what they give the state
      float8 u[2] = {0.0f, 0.0f};
      int8 right[2];
      multiply_lower(matrix, block, operands, item, u EMULATION);
      split_operand(u[0], u[1], 0xffff0000u, right);
      operands[block][0][item] = right[0];
      operands[block][1][item] = right[1];
      split_operand(u[0] * row_scalars[16 + 2 * block], u[1] * row_scalars[17 + 2 * block], 0xffff0000u, right);
      UNROLL
      for (int quarter = 0; quarter < 4; ++quarter) {
        ushort8 left[4];
        intel_sub_group_2d_block_read_16b_32r16x1c(keys, GRID * 2, D, GRID * 2, (int2)(block * 16, quarter * 32), (__private ushort*)left);
        UNROLL
        for (int part = 0; part < 2; ++part) {
          UNROLL
          for (int r = 0; r < 4; ++r) state[quarter * 4 + r] = MAD_BF16(as_short8(left[r]), right[part], state[quarter * 4 + r]);
        }
      }
    }
    if (tile.rows == GRID && (number + 1 == end || tile_of_run(run, cursors, boundaries, number + 1 - run_tile).rows < GRID)) {
      UNROLL
      for (int i = 0; i < D / 8; ++i) stored[i] = state[i];
    }
    if (tile.rows < GRID) {  // the run's last chunk: its rows are kept
      __global ring_t* ring_rows = ring_u + (long)tile.slot * ring_length * num_v_heads * D + head * D + item;
      const __global ushort* key_rows = tile_images + (long)(num_k_heads + k_head) * IMAGE;
      const __global float* key_factors = factors + ((long)number * 2 * num_k_heads + num_k_heads + k_head) * GRID;
      for (int j = tile.known; j < tile.rows; ++j) {
        const long in_ring = (tile.base + j) % ring_length, at = (long)tile.slot * ring_length + in_ring;
        const __local uint* pair = (const __local uint*)&operands[j / 16][0][item] + j % 16 / 2;  // two rows of U, then what they leave
        const uint rest = pair[sizeof(int8) / sizeof(uint) * D];
        const float u = j % 2 == 0 ? as_float(*pair << 16) + as_float(rest << 16) : as_float(*pair & 0xffff0000u) + as_float(rest & 0xffff0000u);
        ring_rows[in_ring * num_v_heads * D] = ring_of(u);
        if (keeps_key) ring_k[(at * num_k_heads + k_head) * D + item] = ring_of(bf16_to_f32(key_rows[j * D + item]) * key_factors[j]);
        if (item == 0) ring_g[at * num_v_heads + head] = scalar[3 * GRID + j];
      }
    }
    const int row_bytes = num_v_heads * D * 2;
    __global void* out_rows = (__global void*)(out + (long)(tile.row + tile.known) * num_v_heads * D);
    UNROLL
    for (int block = 0; block < 4; ++block) {
      float8 pair[2] = {kept[2 * block][item], kept[2 * block + 1][item]};
      multiply_lower(matrix + 2 * MATRIX, block, operands, item, pair EMULATION);
      UNROLL
      for (int r = 0; r < 2; ++r) {
        // Of rows past the end nothing is written, nor of those before the block's first.
        const int row = block * 16 + r * 8;
        const ushort8 o = narrow8(pair[r]);
        if (row + 8 > tile.known && row < tile.rows) {
          if (row >= tile.known) {
            intel_sub_group_2d_block_write_16b_8r16x1c(out_rows, row_bytes, tile.rows - tile.known, row_bytes, (int2)(head * D + column, row - tile.known), (__private ushort*)&o);
          } else {
            const int skipped = tile.known - row;
            ushort element[8];
            vstore8(o, 0, element);
            UNROLL
            for (int m = 1; m < 8; ++m)
              if (m >= skipped && row + m < tile.rows) out[((long)(tile.row + row + m) * num_v_heads + head) * D + item] = element[m];
          }
        }
      }
    }
  }
}

// out <- rms norm of out, times the norm's weight and silu(z). A group per tile (axis 0) and value head (axis 1); a sub-group has 16 rows.
SUB_GROUP __attribute__((reqd_work_group_size(64, 1, 1))) __kernel void gdn_prompt_norm(PROMPT_PARAMETERS, float eps, PLACE(const float, norm), PLACE(const ushort, z),
                                                                                       PLACE(ushort, out)) {
  FIND_PROMPT;
  FIND(const float, norm);
  FIND(const ushort, z);
  FIND(ushort, out);
  FIND_TILE;
  const float8 weight = vload8(lane, norm);
  UNROLL
  for (int r = 0; r < 16; ++r) {
    const int i = group * 16 + r;
    const bool is_new = i >= tile.known && i < tile.rows;
    const long at = ((long)(is_new ? tile.row + i : 0) * num_v_heads + head) * D + lane * 8;
    const float8 o = load8(out + at);
    const float scale = native_rsqrt(lanes_sum(sum8(o * o), lane) * (1.0f / D) + eps);
    float gate[8];
    vstore8(load8(z + at), 0, gate);
    UNROLL
    for (int j = 0; j < 8; ++j) gate[j] = quick_silu(gate[j]);
    if (is_new) vstore8(narrow8(o * scale * weight * vload8(0, gate)), 0, out + at);
  }
}
