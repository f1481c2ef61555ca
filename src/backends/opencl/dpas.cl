// y = W x on the matrix units of Xe2, for weights in tile16 (tile16.cl). Two kernels, one for each kind of rows; both give a row the same bits whatever stands beside it.
//   dpas_decode: 8 sub-groups share the blocks of 128 K of TILES tiles in turn, and their sums are added in order. ROW_GROUPS x 8 rows meet one converted weight.
//   dpas_prompt: a sub-group computes SGM rows x SGN features over all K; the sum is kept in units of the current block's scale and rescaled when the block changes.
// The host defines WEIGHT_E4M3, WEIGHT_BF16 or WEIGHT_F16, EPILOGUE (a number of epilogue.clh), EMULATED for devices without
// matrix units, and SCALED_OPERANDS for matrix units that flush subnormals.
#include "backends/opencl/numeric.clh"
#include "backends/opencl/xe2.clh"
#include "backends/opencl/epilogue.clh"

#define BLOCK 128  // of K, with one scale
#define SPLITS 8   // sub-groups of dpas_decode

#ifdef WEIGHT_E4M3
#define DWORDS(k) ((k) / 4 * 16)  // of a tile, before row k of it
#define MAD intel_sub_group_f16_f16_matrix_mad_k16
#define BLOCK_SCALE(p, at) ((p)[at] * OPERAND_FACTOR)
#else
#define DWORDS(k) ((k) / 2 * 16)
#define BLOCK_SCALE(p, at) 1.0f
#ifdef WEIGHT_BF16
#define MAD intel_sub_group_bf16_bf16_matrix_mad_k16
#define ROW_SCALE(row) 1.0f
#else
#define MAD intel_sub_group_f16_f16_matrix_mad_k16
#endif
#endif

#ifndef ROW_SCALE
#define ROW_SCALE(row) row_scales[row]
#endif

#ifdef DECODE
#ifndef ROW_GROUPS
#define ROW_GROUPS 1
#endif
#ifndef TILES
#define TILES 1  // 2: tiles of gate and up alternate, and out = r(r(silu(r(gate))) * r(up))
#endif
// x: operand rows [num_rows, in_features]; out: rows of out_features. Groups: tiles / TILES; items: 16 x SPLITS.
SUB_GROUP __attribute__((reqd_work_group_size(16 * SPLITS, 1, 1))) __kernel void dpas_decode(PLACE(const uint, tiles), PLACE(const float, scales), PLACE(const float, factors),
                                                                                             PLACE(const ushort, x), PLACE(const float, row_scales), int num_rows,
                                                                                             int out_features, int in_features, PLACE(uchar, out)) {
  FIND(const uint, tiles);
  FIND(const float, scales);
  FIND(const float, factors);
  FIND(const ushort, x);
  FIND(const float, row_scales);
  FIND(uchar, out);
  __local float shared[SPLITS][TILES][8 * ROW_GROUPS][16];
  const int split = (int)get_sub_group_id(), lane = (int)get_sub_group_local_id(), blocks = in_features / BLOCK;
  const long first_tile = (long)get_group_id(0) * TILES;
  float8 totals[TILES][ROW_GROUPS];
  for (int t = 0; t < TILES; ++t)
    for (int g = 0; g < ROW_GROUPS; ++g) totals[t][g] = 0.0f;
#ifdef EMULATED
  const int end = (blocks + SPLITS - 1) / SPLITS * SPLITS;  // all sub-groups take the same number of turns
#else
  const int end = blocks;
#endif
#pragma unroll 1
  for (int turn = split; turn < end; turn += SPLITS) {
    const int block = min(turn, blocks - 1);
    float8 sums[TILES][ROW_GROUPS];
    for (int t = 0; t < TILES; ++t)
      for (int g = 0; g < ROW_GROUPS; ++g) sums[t][g] = 0.0f;
#pragma unroll
    for (int k = 0; k < BLOCK; k += 32) {
      int8 b[TILES][2];
#pragma unroll
      for (int t = 0; t < TILES; ++t) {
        const __global uint* w = tiles + (first_tile + t) * DWORDS((long)in_features) + DWORDS((long)block * BLOCK + k);
#ifdef WEIGHT_E4M3
        const uint8 words = intel_sub_group_block_read8(w);
        b[t][0] = operand_of(words.lo);
        b[t][1] = operand_of(words.hi);
#else
        b[t][0] = as_int8(intel_sub_group_block_read8(w));
        b[t][1] = as_int8(intel_sub_group_block_read8(w + 128));
#endif
      }
#pragma unroll
      for (int half_k = 0; half_k < 2; ++half_k)
#pragma unroll
        for (int g = 0; g < ROW_GROUPS; ++g) {
          short8 a;
          intel_sub_group_2d_block_read_16b_8r16x1c((__global void*)x, in_features * 2, num_rows, in_features * 2, (int2)(block * BLOCK + k + half_k * 16, g * 8),
                                                    (__private ushort*)&a);
#pragma unroll
          for (int t = 0; t < TILES; ++t) sums[t][g] = MAD(a, b[t][half_k], sums[t][g]);
        }
    }
#pragma unroll
    for (int t = 0; t < TILES; ++t) {
      const float scale = turn < blocks ? BLOCK_SCALE(scales, (first_tile + t) * blocks + block) : 0.0f;
#pragma unroll
      for (int g = 0; g < ROW_GROUPS; ++g) totals[t][g] += sums[t][g] * scale;
    }
  }
#pragma unroll
  for (int t = 0; t < TILES; ++t)
#pragma unroll
    for (int g = 0; g < ROW_GROUPS; ++g) {
      float rows[8];
      vstore8(totals[t][g], 0, rows);
#pragma unroll
      for (int m = 0; m < 8; ++m) shared[split][t][g * 8 + m][lane] = rows[m];
    }
  barrier(CLK_LOCAL_MEM_FENCE);
  for (int row = split; row < num_rows; row += SPLITS) {
    float y[TILES];
    for (int t = 0; t < TILES; ++t) {
      y[t] = 0.0f;
      for (int s = 0; s < SPLITS; ++s) y[t] += shared[s][t][row][lane];
      y[t] *= ROW_SCALE(row) * factors[(first_tile + t) * 16 + lane];
    }
    const long feature = first_tile / TILES * 16 + lane;
#if TILES == 2
    if (feature < out_features)
      ((__global activation_t*)out)[(long)row * out_features + feature] = narrow(round_activation(silu(round_activation(y[0]))) * round_activation(y[1]));
#else
    if (feature < out_features) finish(EPILOGUE, out, (long)row * out_features + feature, y[0]);
#endif
  }
}
#else
#ifndef SGM
#define SGM 32  // rows of a sub-group, a multiple of 32
#endif
#ifndef SGN
#define SGN 32  // features of a sub-group, a multiple of 16
#endif
#ifndef WGM
#define WGM 1  // sub-groups of a work-group
#endif
#ifndef WGN
#define WGN 8
#endif
#define MT (SGM / 8)
#define NT (SGN / 16)
// Tile number t of the weight is tile t * tile_step + tile_offset of the packing. Groups: features / (SGN x WGN) x rows / (SGM x WGM); items: 16 x WGN, WGM.
SUB_GROUP __attribute__((reqd_work_group_size(16 * WGN, WGM, 1))) __kernel void dpas_prompt(PLACE(const uint, tiles), PLACE(const float, scales), PLACE(const float, factors),
                                                                                            PLACE(const ushort, x), PLACE(const float, row_scales), int num_rows,
                                                                                            int out_features, int in_features, int tile_step, int tile_offset, PLACE(uchar, out)) {
  FIND(const uint, tiles);
  FIND(const float, scales);
  FIND(const float, factors);
  FIND(const ushort, x);
  FIND(const float, row_scales);
  FIND(uchar, out);
  const int lane = (int)get_sub_group_local_id(), blocks = in_features / BLOCK, num_tiles = (out_features + 15) / 16;
  const int tile = ((int)get_group_id(0) * WGN + (int)get_local_id(0) / 16) * NT;  // the sub-group's first; past the last one it computes that again and keeps nothing
  const int row = ((int)get_group_id(1) * WGM + (int)get_local_id(1)) * SGM;
  const __global uint* w[NT];
  const __global float* s[NT];
  float8 sums[MT][NT];
#pragma unroll
  for (int j = 0; j < NT; ++j) {
    const long from = (long)min(tile + j, num_tiles - 1) * tile_step + tile_offset;
    w[j] = tiles + from * DWORDS((long)in_features);
    s[j] = scales + from * blocks;
#pragma unroll
    for (int i = 0; i < MT; ++i) sums[i][j] = 0.0f;
  }
#pragma unroll 1
  for (int block = 0; block < blocks; ++block) {
#ifdef WEIGHT_E4M3
#pragma unroll
    for (int j = 0; j < NT; ++j) {
      const float ratio = block == 0 ? 1.0f : s[j][block - 1] / s[j][block];
#pragma unroll
      for (int i = 0; i < MT; ++i) sums[i][j] *= ratio;
    }
#endif
#pragma unroll 1
    for (int k = block * BLOCK; k < (block + 1) * BLOCK; k += 32) {
      short8 a[2][MT];
#pragma unroll
      for (int i = 0; i < MT; i += 4) {
        intel_sub_group_2d_block_read_16b_32r16x1c((__global void*)x, in_features * 2, num_rows, in_features * 2, (int2)(k, row + i * 8), (__private ushort*)&a[0][i]);
        intel_sub_group_2d_block_read_16b_32r16x1c((__global void*)x, in_features * 2, num_rows, in_features * 2, (int2)(k + 16, row + i * 8), (__private ushort*)&a[1][i]);
      }
#pragma unroll
      for (int j = 0; j < NT; ++j) {
        int8 b[2];
#ifdef WEIGHT_E4M3
        const uint8 words = intel_sub_group_block_read8(w[j] + DWORDS(k));
        b[0] = operand_of(words.lo);
        b[1] = operand_of(words.hi);
#else
        b[0] = as_int8(intel_sub_group_block_read8(w[j] + DWORDS(k)));
        b[1] = as_int8(intel_sub_group_block_read8(w[j] + DWORDS(k) + 128));
#endif
#pragma unroll
        for (int half_k = 0; half_k < 2; ++half_k)
#pragma unroll
          for (int i = 0; i < MT; ++i) sums[i][j] = MAD(a[half_k][i], b[half_k], sums[i][j]);
      }
    }
  }
#pragma unroll
  for (int j = 0; j < NT; ++j) {
    const int feature = (tile + j) * 16 + lane;
    const bool kept = feature < out_features;
    const float factor = kept ? factors[((tile + j) * tile_step + tile_offset) * 16 + lane] * BLOCK_SCALE(s[j], blocks - 1) : 0.0f;
#pragma unroll
    for (int i = 0; i < MT; ++i) {
      float rows[8];
      vstore8(sums[i][j], 0, rows);
#pragma unroll
      for (int m = 0; m < 8; ++m) {
        const int at = row + i * 8 + m;
        if (kept && at < num_rows) finish(EPILOGUE, out, (long)at * out_features + feature, rows[m] * (factor * ROW_SCALE(at)));
      }
    }
  }
}
#endif
