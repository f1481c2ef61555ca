#include "backends/cuda/linear_e4m3_args.h"
#include "backends/cuda/linear_mma.cuh"
#include "backends/cuda/quantise.cuh"

// Linear layers on matrix units that multiply e4m3 by e4m3 (sm_89, sm_120): weights as stored, activations quantised per row and group of 128. Products of 128 columns are added by the matrix
// units, then multiplied by both scales and added in f32. A sum runs over K in eight slices, added in order, whoever computes it: few rows are taken by blocks whose warps have a slice each, many
// by blocks with all slices in turn; up to eight rows are quantised where they are multiplied, more by a launch before. So a row's bits depend on the weight's shape alone, whatever the rows and their kind.

namespace quern::cuda::mma {

namespace {

constexpr int kStepsPerBlock = kBlockColumns / kTileColumns;
constexpr int kBlockPieces = kStepsPerBlock * 2 * 32;  // of 16 bytes: 32 features by 128 columns

/// sum = a [16 x 32] * b [32 x 8], places as for multiply_add of mma.cuh; or added to it.
__device__ void multiply_e4m3(float (&sum)[4], const uint4& a, uint32_t b0, uint32_t b1) {
  asm volatile("mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %10, %10, %10};"
               : "=f"(sum[0]), "=f"(sum[1]), "=f"(sum[2]), "=f"(sum[3])
               : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b0), "r"(b1), "f"(0.0f));
}
__device__ void multiply_add_e4m3(float (&sum)[4], const uint4& a, uint32_t b0, uint32_t b1) {
  asm volatile("mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
               : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
               : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b0), "r"(b1));
}

/// The product of 128 columns: of a half of the features, a[2 step + half], with eight rows, whose codes of either 64 columns are `b`.
__device__ void multiply_block(float (&sum)[4], const uint4 (&a)[2 * kStepsPerBlock], int half, const uint4 (&b)[2]) {
  multiply_e4m3(sum, a[half], b[0].x, b[0].y);
  multiply_add_e4m3(sum, a[2 + half], b[0].z, b[0].w);
  multiply_add_e4m3(sum, a[4 + half], b[1].x, b[1].y);
  multiply_add_e4m3(sum, a[6 + half], b[1].z, b[1].w);
}

/// A lane's share of a group of 128 columns of eight rows, row lane / 4 of them: of either half of the columns the 16 from 16 (lane % 4) on.
struct Group {
  uint4 x[4];

  /// Zeros where `row` is null.
  __device__ void load(const uint8_t* row, int block) {
#pragma unroll
    for (int i = 0; i < 4; ++i)
      x[i] = row == nullptr ? make_uint4(0, 0, 0, 0) : *reinterpret_cast<const uint4*>(row + (int64_t{block} * kBlockColumns + i / 2 * 64 + i % 2 * 8) * 2);
  }
  /// The scale of the row; codes as the matrix units take them. To be called by whole warps.
  __device__ float quantise(uint4 (&codes)[2]) const {
    __nv_bfloat162 pair = __floats2bfloat162_rn(0, 0);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t words[4] = {x[i].x, x[i].y, x[i].z, x[i].w};
#pragma unroll
      for (int j = 0; j < 4; ++j) pair = __hmax2(pair, __habs2(*reinterpret_cast<const __nv_bfloat162*>(&words[j])));
    }
    float most = fmaxf(1e-10f, fmaxf(__low2float(pair), __high2float(pair)));
    most = fmaxf(most, __shfl_xor_sync(kAllLanes, most, 1));
    most = fmaxf(most, __shfl_xor_sync(kAllLanes, most, 2));
    const float inverse = from_448(most);
    uint2 halves[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float v[8];
      unpack8(x[i], v);
#pragma unroll
      for (int j = 0; j < 8; ++j) v[j] = __fmul_rn(v[j], inverse);
      halves[i] = {e4m3_pair(v[0], v[1]) | e4m3_pair(v[2], v[3]) << 16, e4m3_pair(v[4], v[5]) | e4m3_pair(v[6], v[7]) << 16};
    }
    codes[0] = make_uint4(halves[0].x, halves[0].y, halves[1].x, halves[1].y);
    codes[1] = make_uint4(halves[2].x, halves[2].y, halves[3].x, halves[3].y);
    return over_448(most);
  }
};

/// Where lane `lane` begins to read row `row` of x; null: zeros.
__device__ const uint8_t* row_start(const void* x, const int32_t* x_rows, int row, int num_rows, int in_features, int lane) {
  if (row >= num_rows) return nullptr;
  const int64_t source = x_rows == nullptr ? row : x_rows[row];
  return source < 0 ? nullptr : static_cast<const uint8_t*>(x) + (source * in_features + lane % 4 * 16) * 2;
}

/// sum += part * the scales of both: `scales` of the lane's two rows, times the weight's.
__device__ void promote(float (&sum)[4], const float (&part)[4], float first, float second) {
  sum[0] = fmaf(part[0], first, sum[0]);
  sum[1] = fmaf(part[1], second, sum[1]);
  sum[2] = fmaf(part[2], first, sum[2]);
  sum[3] = fmaf(part[3], second, sum[3]);
}

__device__ const float* scales_of(const TiledWeight& weight, int tile_row) { return weight.scale + int64_t{tile_row} * (weight.in_features / kBlockColumns); }
__device__ const uint8_t* tiles_of(const TiledWeight& weight, int tile_row) { return static_cast<const uint8_t*>(weight.tiles) + int64_t{tile_row} * kTileFeatures * weight.in_features; }

// ---- Few rows: a block takes 32 features of 8 kColumns rows, each of its warps a slice ----

/// Eight rows, which the warp quantises for itself.
struct OwnRows {
  static constexpr int kColumns = 1;
  const uint8_t* row;
  Group group;

  __device__ OwnRows(const E4M3LinearArgs& args, int first_row, int lane)
      : row(row_start(args.linear.x, args.linear.x_rows, first_row + lane / 4, args.linear.num_rows, args.linear.weight.in_features, lane)) {}
  __device__ void load(int block) { group.load(row, block); }
  /// The codes, as multiply_block takes them, and the scales of the lane's two rows; `group` may be loaded again.
  __device__ float2 operand(int /*column*/, int lane, uint4 (&codes)[2]) {
    const float scale = group.quantise(codes);
    return {__shfl_sync(kAllLanes, scale, lane % 4 * 8), __shfl_sync(kAllLanes, scale, lane % 4 * 8 + 4)};
  }
};
/// 8 kCount rows that were quantised before.
template <int kCount>
struct ReadyRows {
  static constexpr int kColumns = kCount;
  const uint8_t* codes;
  const float* scale;
  int64_t padded;
  uint4 x[kColumns][2];
  float2 scales[kColumns];

  __device__ ReadyRows(const E4M3LinearArgs& args, int first_row, int lane)
      : codes(args.rows.codes + int64_t{first_row} * 64 + lane * 16), scale(args.rows.scale + first_row + lane % 4 * 2), padded(args.rows.padded) {}
  __device__ void load(int block) {
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
#pragma unroll
      for (int h = 0; h < 2; ++h) x[c][h] = *reinterpret_cast<const uint4*>(codes + ((int64_t{block} * 2 + h) * padded + c * 8) * 64);
      scales[c] = *reinterpret_cast<const float2*>(scale + block * padded + c * 8);
    }
  }
  __device__ float2 operand(int column, int /*lane*/, uint4 (&operand)[2]) {
    operand[0] = x[column][0];
    operand[1] = x[column][1];
    return scales[column];
  }
};

/// Adds the products of 32 features and scale blocks [begin, end) of K.
template <bool kScaled, class Rows>
__device__ void walk(const E4M3LinearArgs& args, int tile_row, int first_row, int begin, int end, int lane, Sums<Rows::kColumns>& sums) {
  constexpr int kColumns = Rows::kColumns, kTurn = kColumns <= 2 ? 2 : 1, kPieces = 2 * kStepsPerBlock;  // blocks of a weight that are on their way
  const uint8_t* tiles = tiles_of(args.linear.weight, tile_row) + lane * 16;
  const float* scales = kScaled ? scales_of(args.linear.weight, tile_row) : nullptr;
  uint4 ring[kTurn][kPieces];
  const auto load = [&](uint4(&pieces)[kPieces], int block) {
#pragma unroll
    for (int i = 0; i < kPieces; ++i) pieces[i] = load_constant(tiles + (int64_t{block} * kBlockPieces + i * 32) * 16);
  };
#pragma unroll
  for (int j = 0; j < kTurn; ++j)
    if (begin + j < end) load(ring[j], begin + j);
  float scale = kScaled && begin < end ? scales[begin] : 1.0f;
  await_predecessor();
  Rows rows(args, first_row, lane);
  if (begin < end) rows.load(begin);
  for (int turn = begin; turn < end; turn += kTurn) {
#pragma unroll
    for (int j = 0; j < kTurn; ++j) {
      const int block = turn + j;
      if (block >= end) break;
      uint4 codes[kColumns][2];
      float2 row_scales[kColumns];
#pragma unroll
      for (int c = 0; c < kColumns; ++c) row_scales[c] = rows.operand(c, lane, codes[c]);
      if (block + 1 < end) rows.load(block + 1);
#pragma unroll
      for (int c = 0; c < kColumns; ++c)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          float part[4];
          multiply_block(part, ring[j], half, codes[c]);
          promote(sums[half][c], part, row_scales[c].x * scale, row_scales[c].y * scale);
        }
      if (block + kTurn < end) load(ring[j], block + kTurn);
      if (kScaled && block + 1 < end) scale = scales[block + 1];
    }
  }
}

template <bool kScaled, class Rows>
__device__ void multiply_split(const E4M3LinearArgs& args) {
  release_successor();
  const int slice = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32, tile_row = static_cast<int>(blockIdx.y);
  const int first_row = static_cast<int>(blockIdx.x) * Rows::kColumns * 8, k_blocks = args.linear.weight.in_features / kBlockColumns;
  Sums<Rows::kColumns> sums;
  clear<Rows::kColumns>(sums);
  walk<kScaled, Rows>(args, tile_row, first_row, slice_begin(k_blocks, slice), slice_begin(k_blocks, slice + 1), lane, sums);
  finish_slices<Rows::kColumns>(args.linear, tile_row, first_row, sums);
}

// ---- Many rows: a block takes 128 features of 128 rows and all of K; a warp 32 features of half of the rows ----

constexpr int kWarpColumns = kBlockRows / 2 / 8;

struct Stage {
  uint4 weight[kBlockFeatures / kTileFeatures][kBlockPieces];
  uint4 codes[2][kBlockRows * 4];  // [64 columns][row][16 columns]
  float scale[kBlockRows];
};
static_assert(kStages * sizeof(Stage) == kBlockSharedBytes && kBlockPieces == kThreads);

/// Asks for what is multiplied of scale block `block`. Every thread has its pieces.
__device__ void copy_stage(const E4M3LinearArgs& args, Stage& stage, int first_tile, int num_tiles, int first_row, int block) {
  const int thread = static_cast<int>(threadIdx.x);
#pragma unroll
  for (int i = 0; i < kBlockFeatures / kTileFeatures; ++i) {
    const bool given = first_tile + i < num_tiles;
    const uint8_t* tiles = tiles_of(args.linear.weight, given ? first_tile + i : first_tile);
    copy_async(&stage.weight[i][thread], tiles + (int64_t{block} * kBlockPieces + thread) * 16, given);
  }
#pragma unroll
  for (int h = 0; h < 2; ++h)
#pragma unroll
    for (int i = 0; i < kBlockRows * 4; i += kThreads)
      copy_async(&stage.codes[h][i + thread], args.rows.codes + ((int64_t{block} * 2 + h) * args.rows.padded + first_row) * 64 + (i + thread) * 16);
  if (thread < kBlockRows / 4) copy_async(&stage.scale[thread * 4], args.rows.scale + int64_t{block} * args.rows.padded + first_row + thread * 4);
}

template <bool kScaled>
__device__ void multiply_blocks(const E4M3LinearArgs& args) {
  extern __shared__ uint4 shared[];
  auto* stages = reinterpret_cast<Stage*>(shared);
  release_successor();
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const int first_row = static_cast<int>(blockIdx.x) * kBlockRows, k_blocks = args.linear.weight.in_features / kBlockColumns;
  const int num_tiles = (args.linear.weight.out_features + kTileFeatures - 1) / kTileFeatures, first_tile = static_cast<int>(blockIdx.y) * (kBlockFeatures / kTileFeatures);
  const int own = warp % 4, first_column = warp / 4 * kWarpColumns, tile_row = first_tile + own;  // of this warp: the tile, and its first eight rows
  const float* scales = kScaled ? scales_of(args.linear.weight, min(tile_row, num_tiles - 1)) : nullptr;
  float scale = kScaled ? scales[0] : 1.0f;
  await_predecessor();
#pragma unroll
  for (int i = 0; i < kStages - 1; ++i) {
    if (i < k_blocks) copy_stage(args, stages[i], first_tile, num_tiles, first_row, i);
    commit_copies();
  }
  Sums<kWarpColumns> sums, total;  // of a slice, and of those before it
  clear<kWarpColumns>(sums);
#pragma unroll
  for (int half = 0; half < 2; ++half)
#pragma unroll
    for (int c = 0; c < kWarpColumns; ++c)
#pragma unroll
      for (int i = 0; i < 4; ++i) total[half][c][i] = -0.0f;  // to which a first slice can be added like any other
  int slice = 0;
  const auto end_slices = [&](int block) {
    for (; slice < kSlices && slice_begin(k_blocks, slice + 1) == block; ++slice) {
#pragma unroll
      for (int half = 0; half < 2; ++half)
#pragma unroll
        for (int c = 0; c < kWarpColumns; ++c)
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            total[half][c][i] += sums[half][c][i];
            sums[half][c][i] = 0;
          }
    }
  };
  end_slices(0);
  for (int block = 0; block < k_blocks; ++block) {
    await_copies<kStages - 2>();
    __syncthreads();
    if (block + kStages - 1 < k_blocks) copy_stage(args, stages[(block + kStages - 1) % kStages], first_tile, num_tiles, first_row, block + kStages - 1);
    commit_copies();
    const Stage& stage = stages[block % kStages];
    const float next = kScaled && block + 1 < k_blocks ? scales[block + 1] : 1.0f;
    uint4 a[2 * kStepsPerBlock];
#pragma unroll
    for (int i = 0; i < 2 * kStepsPerBlock; ++i) a[i] = stage.weight[own][i * 32 + lane];
#pragma unroll
    for (int c = 0; c < kWarpColumns; ++c) {
      const uint4 codes[2] = {stage.codes[0][(first_column + c) * 32 + lane], stage.codes[1][(first_column + c) * 32 + lane]};
      const float2 row_scales = *reinterpret_cast<const float2*>(&stage.scale[(first_column + c) * 8 + lane % 4 * 2]);
      const float first = row_scales.x * scale, second = row_scales.y * scale;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float part[4];
        multiply_block(part, a, half, codes);
        promote(sums[half][c], part, first, second);
      }
    }
    scale = next;
    end_slices(block + 1);
  }
#pragma unroll
  for (int c = 0; c < kWarpColumns; ++c)
#pragma unroll
    for (int column = 0; column < 2; ++column)
#pragma unroll
      for (int half = 0; half < 2; ++half)
        finish(args.linear, first_row + (first_column + c) * 8 + lane % 4 * 2 + column, tile_row * kTileFeatures + half * 16 + lane / 4 * 2, total[half][c][column], total[half][c][2 + column]);
}

}  // namespace

#define QUERN_LINEAR(name, kScaled)                                                                                                                                      \
  extern "C" __global__ void __launch_bounds__(kThreads, 2) name##_8(const __grid_constant__ E4M3LinearArgs args) { multiply_split<kScaled, OwnRows>(args); }             \
  extern "C" __global__ void __launch_bounds__(kThreads) name##_16(const __grid_constant__ E4M3LinearArgs args) { multiply_split<kScaled, ReadyRows<2>>(args); }          \
  extern "C" __global__ void __launch_bounds__(kThreads) name##_32(const __grid_constant__ E4M3LinearArgs args) { multiply_split<kScaled, ReadyRows<4>>(args); }          \
  extern "C" __global__ void __launch_bounds__(kThreads) name##_128(const __grid_constant__ E4M3LinearArgs args) { multiply_blocks<kScaled>(args); }
QUERN_LINEAR(e4m3_block, true)
QUERN_LINEAR(e4m3_whole, false)

/// A warp takes a group of eight rows.
extern "C" __global__ void __launch_bounds__(kThreads) e4m3_rows(const __grid_constant__ QuantiseRowsArgs args) {
  release_successor();
  const int lane = static_cast<int>(threadIdx.x) % 32, block = static_cast<int>(blockIdx.x) * (kThreads / 32) + static_cast<int>(threadIdx.x) / 32;
  const int row = static_cast<int>(blockIdx.y) * 8 + lane / 4;
  if (block >= args.in_features / kBlockColumns) return;
  await_predecessor();
  Group group;
  group.load(row_start(args.x, args.x_rows, row, args.num_rows, args.in_features, lane), block);
  uint4 codes[2];
  const float scale = group.quantise(codes);
#pragma unroll
  for (int h = 0; h < 2; ++h) *reinterpret_cast<uint4*>(args.rows.codes + ((int64_t{block} * 2 + h) * args.rows.padded + row) * 64 + lane % 4 * 16) = codes[h];
  if (lane % 4 == 0) args.rows.scale[int64_t{block} * args.rows.padded + row] = scale;
}

}  // namespace quern::cuda::mma
