// y = W x on the matrix units of Xe2, for weights in tile16 (tile16.cl). Two kernels, one for each kind of rows; both give a row the same bits whatever stands beside it.
//   dpas_decode: 8 sub-groups share the blocks of 128 K of TILES tiles in turn, and their sums are added in order. With -DROWS=n, up to n rows are made operands on the way
//                and normed with -DNORM; otherwise operands come from decode_operands (dpas_operands.cl), and ROW_GROUPS x 8 of them meet one converted weight.
//   dpas_prompt: a sub-group computes SGM rows x SGN features over all K; the sum is kept in units of the current block's scale and rescaled when the block changes.
// One launch multiplies with up to four weights, the parts of one packing, one after the other in tiles; -DMIXED: the last of them in bf16, after others in e4m3.
// The host defines WEIGHT_E4M3, WEIGHT_BF16 or WEIGHT_F16, EPILOGUE of dpas_prompt, EMULATED for devices without matrix units, and SCALED_OPERANDS for matrix units that flush subnormals.
#include "backends/opencl/numeric.clh"
#include "backends/opencl/xe2.clh"
#include "backends/opencl/lanes.clh"
#include "backends/opencl/operands.clh"
#include "backends/opencl/epilogue.clh"

#define SPLITS 8  // sub-groups of dpas_decode

#define TYPE_E4M3 0
#define TYPE_BF16 1
#define TYPE_F16 2
#ifdef WEIGHT_E4M3
#define TYPE TYPE_E4M3
#elif defined(WEIGHT_BF16)
#define TYPE TYPE_BF16
#else
#define TYPE TYPE_F16
#endif
// Dwords of a tile before row k of it.
#define DWORDS(type, k) ((type) == TYPE_E4M3 ? (k) / 4 * 16 : (k) / 2 * 16)

// The part that a tile of the packing belongs to: where its rows go, how long they are, and which of its tiles this is.
typedef struct {
  __global uchar* out;
  int features, tile;
} part_t;
#define PARTS_PARAMETERS PLACE(uchar, out0), int features0, PLACE(uchar, out1), int features1, PLACE(uchar, out2), int features2, PLACE(uchar, out3), int features3
#define FIND_PARTS      \
  FIND(uchar, out0);    \
  FIND(uchar, out1);    \
  FIND(uchar, out2);    \
  FIND(uchar, out3)
#define PART_OF(tile) part_of(tile, out0, features0, out1, features1, out2, features2, out3, features3)
part_t part_of(int tile, __global uchar* out0, int features0, __global uchar* out1, int features1, __global uchar* out2, int features2, __global uchar* out3, int features3) {
  const int end0 = (features0 + 15) / 16, end1 = end0 + (features1 + 15) / 16, end2 = end1 + (features2 + 15) / 16;
  part_t part = {out0, features0, tile};
  if (tile >= end2) {
    part.out = out3;
    part.features = features3;
    part.tile = tile - end2;
  } else if (tile >= end1) {
    part.out = out2;
    part.features = features2;
    part.tile = tile - end1;
  } else if (tile >= end0) {
    part.out = out1;
    part.features = features1;
    part.tile = tile - end0;
  }
  return part;
}

#ifdef DECODE
#ifdef ROWS
#define ROW_GROUPS 1
#endif
// With TILES 2 tiles of gate and up alternate, and out = r(r(silu(r(gate))) * r(up)).
// Adds the blocks split, split + SPLITS, ... to totals, and the squares of the rows to squares. `type` is a constant.
void add_blocks(const int type, const __global uint* tiles, const __global float* scales, const __global ushort* x, const __global int* x_rows, const __global float* norm,
                const __global float* row_scales, int scales_stride, int num_rows, int in_features, int split, __private float* squares,
                __private float8 (*totals)[ROW_GROUPS] EMULATION_PARAMETER) {
  const int blocks = in_features / BLOCK;
#ifdef ROWS
  const __global ushort* from[ROWS];
  UNROLL
  for (int m = 0; m < ROWS; ++m) {
    const int row = min(m, num_rows - 1);
    from[m] = x + (long)(x_rows == 0 ? row : max(x_rows[row], 0)) * in_features;
  }
#endif
#ifdef EMULATED
  const int end = (blocks + SPLITS - 1) / SPLITS * SPLITS;  // all sub-groups take the same number of turns
#else
  const int end = blocks;
#endif
#pragma unroll 1
  for (int turn = split; turn < end; turn += SPLITS) {
    const int block = min(turn, blocks - 1);
    const bool counts = turn < blocks;
    float8 sums[TILES][ROW_GROUPS];
    UNROLL
    for (int t = 0; t < TILES; ++t) {
      UNROLL
      for (int g = 0; g < ROW_GROUPS; ++g) sums[t][g] = 0.0f;
    }
#ifdef ROWS
    ushort operands[8][8];  // 16 K each, row
    float row_scale[8] = {1.0f, 1.0f, 1.0f, 1.0f, 1.0f, 1.0f, 1.0f, 1.0f};
#ifdef NORM
    const float8 weight = load_norm(norm + block * BLOCK);
#endif
    UNROLL
    for (int m = 0; m < 8; ++m) {
      float values[8];
      if (m < ROWS) {
        float8 v = load_activations(from[m] + block * BLOCK);
#ifdef NORM
        squares[m] = counts ? add_squares(v, squares[m]) : squares[m];
        v *= weight;
#endif
        if (type == TYPE_BF16) {
          vstore8(v, 0, values);
        } else {
          const float inverse = block_inverse(v);
          row_scale[m] = inverse_of(inverse);
          vstore8(v * inverse, 0, values);
        }
      } else {
        vstore8((float8)(0.0f), 0, values);
      }
      UNROLL
      for (int i = 0; i < 8; ++i) operands[i][m] = type == TYPE_BF16 ? bf16_of(values[i]) : half_of(values[i]);
    }
#endif
    UNROLL
    for (int k = 0; k < BLOCK; k += 32) {
      int8 b[TILES][2];
      UNROLL
      for (int t = 0; t < TILES; ++t) {
        const __global uint* w = tiles + t * (long)DWORDS(type, in_features) + DWORDS(type, block * BLOCK + k);
        if (type == TYPE_E4M3) {
          const uint8 words = intel_sub_group_block_read8(w);
          b[t][0] = operand_of(words.lo);
          b[t][1] = operand_of(words.hi);
        } else {
          b[t][0] = as_int8(intel_sub_group_block_read8(w));
          b[t][1] = as_int8(intel_sub_group_block_read8(w + 128));
        }
      }
      UNROLL
      for (int half_k = 0; half_k < 2; ++half_k) {
        UNROLL
        for (int g = 0; g < ROW_GROUPS; ++g) {
          short8 a;
#ifdef ROWS
          a = as_short8(vload8(0, operands[k / 16 + half_k]));
#else
          intel_sub_group_2d_block_read_16b_8r16x1c((__global void*)x, in_features * 2, num_rows, in_features * 2, (int2)(block * BLOCK + k + half_k * 16, g * 8),
                                                    (__private ushort*)&a);
#endif
          UNROLL
          for (int t = 0; t < TILES; ++t)
            if (type == TYPE_BF16)
              sums[t][g] = MAD_BF16(a, b[t][half_k], sums[t][g]);
            else
              sums[t][g] = MAD_F16(a, b[t][half_k], sums[t][g]);
        }
      }
    }
    UNROLL
    for (int t = 0; t < TILES; ++t) {
      const float scale = !counts ? 0.0f : type == TYPE_E4M3 ? scales[t * blocks + block] * OPERAND_FACTOR : 1.0f;
      UNROLL
      for (int g = 0; g < ROW_GROUPS; ++g) {
#ifdef ROWS
        const float8 of_rows = vload8(0, row_scale);
#else
        const float8 of_rows = type == TYPE_BF16 ? 1.0f : vload8(0, row_scales + (long)block * scales_stride + g * 8);
#endif
        totals[t][g] += sums[t][g] * (of_rows * scale);
      }
    }
  }
}

// x: rows of bf16, or operands, [num_rows, in_features]; x_rows names the row of x of each row, -1: zeros, null: the row itself (with ROWS alone). norm: f32 [in_features].
// row_scales, row_factors: of decode_operands. Groups: tiles / TILES; the first `num_first` of them, MIXED, are e4m3 and the others in tiles2. Items: 16 x SPLITS.
SUB_GROUP __attribute__((reqd_work_group_size(16 * SPLITS, 1, 1))) __kernel void dpas_decode(
    PLACE(const uint, tiles), PLACE(const float, scales), PLACE(const float, factors), int num_first, PLACE(const uint, tiles2), PLACE(const float, factors2), PLACE(const ushort, x),
    PLACE(const ushort, x2), PLACE(const int, x_rows), PLACE(const float, norm), float eps, PLACE(const float, row_scales), int scales_stride, PLACE(const float, row_factors),
    int num_rows, int in_features, int epilogue, PARTS_PARAMETERS) {
  FIND(const uint, tiles);
  FIND(const float, scales);
  FIND(const float, factors);
  FIND(const ushort, x);
  FIND(const int, x_rows);
  FIND(const float, norm);
  FIND(const float, row_scales);
  FIND(const float, row_factors);
  FIND_PARTS;
  EMULATION_MEMORY(16 * SPLITS);
  __local float shared[SPLITS][TILES][8 * ROW_GROUPS][16];
  const int split = (int)get_sub_group_id(), lane = (int)get_sub_group_local_id(), first_tile = (int)get_group_id(0) * TILES;
  float8 totals[TILES][ROW_GROUPS];
  UNROLL
  for (int t = 0; t < TILES; ++t) {
    UNROLL
    for (int g = 0; g < ROW_GROUPS; ++g) totals[t][g] = 0.0f;
  }
  float squares[8] = {0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f};
  const __global int* names = x_rows_memory == 0 ? 0 : x_rows;
#ifdef MIXED
  FIND(const uint, tiles2);
  FIND(const float, factors2);
  FIND(const ushort, x2);
  const bool is_first = first_tile < num_first;
  const __global float* of_features = is_first ? factors + first_tile * 16 : factors2 + (first_tile - num_first) * 16;
  if (is_first)
    add_blocks(TYPE_E4M3, tiles + first_tile * (long)DWORDS(TYPE_E4M3, in_features), scales + (long)first_tile * (in_features / BLOCK), x, names, norm, row_scales, scales_stride,
               num_rows, in_features, split, squares, totals EMULATION);
  else
    add_blocks(TYPE_BF16, tiles2 + (first_tile - num_first) * (long)DWORDS(TYPE_BF16, in_features), scales, x2, names, norm, row_scales, scales_stride, num_rows, in_features, split,
               squares, totals EMULATION);
#else
  const __global float* of_features = factors + first_tile * 16;
  add_blocks(TYPE, tiles + first_tile * (long)DWORDS(TYPE, in_features), scales + (long)first_tile * (in_features / BLOCK), x, names, norm, row_scales, scales_stride, num_rows,
             in_features, split, squares, totals EMULATION);
#endif
  UNROLL
  for (int t = 0; t < TILES; ++t) {
    UNROLL
    for (int g = 0; g < ROW_GROUPS; ++g) {
      float rows[8];
      vstore8(totals[t][g], 0, rows);
      UNROLL
      for (int m = 0; m < 8; ++m) shared[split][t][g * 8 + m][lane] = rows[m];
    }
  }
#ifdef NORM
  __local float shared_squares[SPLITS][8];
  UNROLL
  for (int m = 0; m < ROWS; ++m) {
    const float sum = lanes_sum(squares[m], lane);
    if (lane == 0) shared_squares[split][m] = sum;
  }
#endif
  barrier(CLK_LOCAL_MEM_FENCE);
  const part_t part = PART_OF(first_tile / TILES);
  const int feature = part.tile * 16 + lane;
  for (int row = split; row < num_rows; row += SPLITS) {
    float factor = row_factors_memory == 0 ? 1.0f : row_factors[row];
#ifdef NORM
    float sum = 0.0f;
    for (int s = 0; s < SPLITS; ++s) sum += shared_squares[s][row];
    factor = norm_factor(sum, in_features, eps);
#endif
    if (names != 0 && names[row] < 0) factor = 0.0f;
    float y[TILES];
    for (int t = 0; t < TILES; ++t) {
      y[t] = 0.0f;
      for (int s = 0; s < SPLITS; ++s) y[t] += shared[s][t][row][lane];
      y[t] *= factor * of_features[t * 16 + lane];
    }
    if (feature >= part.features) continue;
    const long at = (long)row * part.features + feature;
#if TILES == 2
    finish_pair(part.out, at, y[0], y[1]);
#else
    finish(epilogue, part.out, at, y[0]);
#endif
  }
}
#else
// A work-group has WGM x WGN sub-groups of SGM rows, a multiple of 32, and SGN features.
#define SGN 32  // two tiles, which are gate and up of the same features where these alternate
#define WGN 8
#define MT (SGM / 8)
#define NT (SGN / 16)
#define MAD(a, b, c) (TYPE == TYPE_BF16 ? MAD_BF16(a, b, c) : MAD_F16(a, b, c))
// x: operand rows of prompt_operands and the factor of each row, null: 1. Groups: tiles / (NT x WGN) x rows / (SGM x WGM); items: 16 x WGN, WGM.
SUB_GROUP __attribute__((reqd_work_group_size(16 * WGN, WGM, 1))) __kernel void dpas_prompt(PLACE(const uint, tiles), PLACE(const float, scales), PLACE(const float, factors),
                                                                                            PLACE(const ushort, x), PLACE(const float, row_factors), int num_rows, int num_tiles,
                                                                                            int in_features, PARTS_PARAMETERS) {
  FIND(const uint, tiles);
  FIND(const float, scales);
  FIND(const float, factors);
  FIND(const ushort, x);
  FIND(const float, row_factors);
  FIND_PARTS;
  EMULATION_MEMORY(16 * WGN * WGM);
  const int lane = (int)get_sub_group_local_id(), blocks = in_features / BLOCK;
  const int tile = ((int)get_group_id(0) * WGN + (int)get_local_id(0) / 16) * NT;  // the sub-group's first; past the last one it computes that again and keeps nothing
  const int row = ((int)get_group_id(1) * WGM + (int)get_local_id(1)) * SGM;
  const __global uint* w[NT];
  const __global float* s[NT];
  float8 sums[MT][NT];
  UNROLL
  for (int j = 0; j < NT; ++j) {
    const long from = min(tile + j, num_tiles - 1);
    w[j] = tiles + from * DWORDS(TYPE, (long)in_features);
    s[j] = scales + from * blocks;
    UNROLL
    for (int i = 0; i < MT; ++i) sums[i][j] = 0.0f;
  }
#pragma unroll 1
  for (int block = 0; block < blocks; ++block) {
#ifdef WEIGHT_E4M3
    UNROLL
    for (int j = 0; j < NT; ++j) {
      const float ratio = block == 0 ? 1.0f : s[j][block - 1] / s[j][block];
      UNROLL
      for (int i = 0; i < MT; ++i) sums[i][j] *= ratio;
    }
#endif
#pragma unroll 1
    for (int k = block * BLOCK; k < (block + 1) * BLOCK; k += 32) {
      short8 a[2][MT];
      UNROLL
      for (int i = 0; i < MT; i += 4) {
        intel_sub_group_2d_block_read_16b_32r16x1c((__global void*)x, in_features * 2, num_rows, in_features * 2, (int2)(k, row + i * 8), (__private ushort*)&a[0][i]);
        intel_sub_group_2d_block_read_16b_32r16x1c((__global void*)x, in_features * 2, num_rows, in_features * 2, (int2)(k + 16, row + i * 8), (__private ushort*)&a[1][i]);
      }
      UNROLL
      for (int j = 0; j < NT; ++j) {
        int8 b[2];
#ifdef WEIGHT_E4M3
        const uint8 words = intel_sub_group_block_read8(w[j] + DWORDS(TYPE, k));
        b[0] = operand_of(words.lo);
        b[1] = operand_of(words.hi);
#else
        b[0] = as_int8(intel_sub_group_block_read8(w[j] + DWORDS(TYPE, k)));
        b[1] = as_int8(intel_sub_group_block_read8(w[j] + DWORDS(TYPE, k) + 128));
#endif
        UNROLL
        for (int half_k = 0; half_k < 2; ++half_k) {
          UNROLL
          for (int i = 0; i < MT; ++i) sums[i][j] = MAD(a[half_k][i], b[half_k], sums[i][j]);
        }
      }
    }
  }
  float of_features[NT];
  part_t part[NT];
  UNROLL
  for (int j = 0; j < NT; ++j) {
    const bool kept = tile + j < num_tiles;
    part[j] = PART_OF(EPILOGUE == EPILOGUE_PAIR ? tile / 2 : tile + j);
    part[j].tile = part[j].tile * 16 + lane;
    if (!kept) part[j].tile = part[j].features;
#ifdef WEIGHT_E4M3
    of_features[j] = kept ? factors[(tile + j) * 16 + lane] * (s[j][blocks - 1] * OPERAND_FACTOR) : 0.0f;
#else
    of_features[j] = kept ? factors[(tile + j) * 16 + lane] : 0.0f;
#endif
  }
  UNROLL
  for (int i = 0; i < MT; ++i) {
    float rows[NT][8];
    UNROLL
    for (int j = 0; j < NT; ++j) vstore8(sums[i][j], 0, rows[j]);
    UNROLL
    for (int m = 0; m < 8; ++m) {
      const int at = row + i * 8 + m;
      if (at >= num_rows) continue;
      const float factor = row_factors_memory == 0 ? 1.0f : row_factors[at];
      if (EPILOGUE == EPILOGUE_PAIR) {
        if (part[0].tile < part[0].features)
          finish_pair(part[0].out, (long)at * part[0].features + part[0].tile, rows[0][m] * (of_features[0] * factor), rows[1][m] * (of_features[1] * factor));
      } else {
        UNROLL
        for (int j = 0; j < NT; ++j)
          if (part[j].tile < part[j].features) finish(EPILOGUE, part[j].out, (long)at * part[j].features + part[j].tile, rows[j][m] * (of_features[j] * factor));
      }
    }
  }
}
#endif
