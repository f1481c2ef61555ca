#include "backends/cuda/linear_mma.cuh"
#include "backends/cuda/mma.cuh"
#include "backends/cuda/widen.cuh"

// Linear layers on the matrix units of sm_80 and newer with 16-bit activations: e4m3 weights become bf16 in registers, exactly; sums are f32. A sum runs over K in eight slices, each in the order of
// K, block scales applied every 128; slices are added in order. So a row's bits depend on the weight's shape alone, whatever the rows and their kind.

namespace quern::cuda::mma {

namespace {

/// A lane's part of a tile.
template <bool kE4M3>
struct TilePart {
  uint4 pieces[kE4M3 ? 2 : 4];

  __device__ void load(const uint8_t* tile, int lane) {
#pragma unroll
    for (int i = 0; i < (kE4M3 ? 2 : 4); ++i) pieces[i] = load_constant(tile + (i * 32 + lane) * 16);
  }
  /// What the matrix units take of columns 16 `step` to 16 `step` + 15.
  __device__ void operand(int half, int step, uint32_t (&a)[4]) const {
    if constexpr (kE4M3) {
      const uint4& p = pieces[half];
      const uint32_t even = step == 0 ? p.x : p.y, odd = step == 0 ? p.z : p.w;
      a[0] = even_codes(even);
      a[1] = even_codes(odd);
      a[2] = odd_codes(even);
      a[3] = odd_codes(odd);
    } else {
      const uint4 &even = pieces[half], &odd = pieces[2 + half];
      a[0] = step == 0 ? even.x : even.z;
      a[1] = step == 0 ? odd.x : odd.z;
      a[2] = step == 0 ? even.y : even.w;
      a[3] = step == 0 ? odd.y : odd.w;
    }
  }
};

/// A lane's part of 8 kColumns rows of x: row lane / 4 of every eight.
template <int kColumns>
struct RowParts {
  const uint8_t* rows[kColumns];  // null: zeros

  __device__ RowParts(const TiledLinearArgs& args, int first_row, int lane) {
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      const int row = first_row + c * 8 + lane / 4;
      rows[c] = nullptr;
      if (row >= args.num_rows) continue;
      const int64_t source = args.x_rows == nullptr ? row : args.x_rows[row];
      if (source >= 0) rows[c] = static_cast<const uint8_t*>(args.x) + source * args.weight.in_features * 2 + lane % 4 * 16;
    }
  }
  __device__ void load(int step, uint4 (&x)[kColumns]) const {
#pragma unroll
    for (int c = 0; c < kColumns; ++c) x[c] = rows[c] == nullptr ? make_uint4(0, 0, 0, 0) : *reinterpret_cast<const uint4*>(rows[c] + step * (kTileColumns * 2));
  }
};

template <bool kE4M3, int kColumns>
__device__ void multiply(const TilePart<kE4M3>& tile, const uint4 (&x)[kColumns], Sums<kColumns>& sums) {
#pragma unroll
  for (int half = 0; half < 2; ++half)
#pragma unroll
    for (int step = 0; step < 2; ++step) {
      uint32_t a[4];
      tile.operand(half, step, a);
#pragma unroll
      for (int c = 0; c < kColumns; ++c) multiply_add(sums[half][c], a, step == 0 ? x[c].x : x[c].z, step == 0 ? x[c].y : x[c].w);
    }
}

constexpr int kStepsPerBlock = kBlockColumns / kTileColumns;

/// Adds the products of 32 features and scale blocks [begin, end) of K.
template <bool kE4M3, bool kScaled, int kColumns>
__device__ void walk(const TiledLinearArgs& args, int tile_row, int first_row, int begin, int end, int lane, Sums<kColumns>& sums) {
  const int k_blocks = args.weight.in_features / kBlockColumns;
  const auto* tiles = static_cast<const uint8_t*>(args.weight.tiles) + int64_t{tile_row} * k_blocks * kStepsPerBlock * tile_bytes(kE4M3);
  const float* scales = kScaled ? args.weight.scale + int64_t{tile_row} * k_blocks : nullptr;
  constexpr int kTurn = kE4M3 && kColumns == 1 ? 2 : 1, kAhead = kTurn * kStepsPerBlock;  // blocks and tiles that are on their way
  TilePart<kE4M3> ring[kAhead];
  float scale = 1;
  if (begin < end) {
#pragma unroll
    for (int i = 0; i < kAhead; ++i)
      if (begin + i / kStepsPerBlock < end) ring[i].load(tiles + int64_t{begin * kStepsPerBlock + i} * tile_bytes(kE4M3), lane);
    if constexpr (kScaled) scale = scales[begin];
  }
  await_predecessor();
  const RowParts<kColumns> rows(args, first_row, lane);
  uint4 x[2][kColumns];
  if (begin < end) {
    rows.load(begin * kStepsPerBlock, x[0]);
    rows.load(begin * kStepsPerBlock + 1, x[1]);
  }
  Sums<kColumns> part;
  for (int turn = begin; turn < end; turn += kTurn) {
#pragma unroll
    for (int j = 0; j < kTurn; ++j) {
      const int block = turn + j;
      if (block >= end) break;
      const bool more = block + 1 < end, later = block + kTurn < end;
      if constexpr (kScaled) clear<kColumns>(part);
#pragma unroll
      for (int i = 0; i < kStepsPerBlock; ++i) {
        const int step = block * kStepsPerBlock + i;
        TilePart<kE4M3>& tile = ring[j * kStepsPerBlock + i];
        if constexpr (kScaled)
          multiply<kE4M3, kColumns>(tile, x[i % 2], part);
        else
          multiply<kE4M3, kColumns>(tile, x[i % 2], sums);
        if (later) tile.load(tiles + int64_t{step + kAhead} * tile_bytes(kE4M3), lane);
        if (more || i + 2 < kStepsPerBlock) rows.load(step + 2, x[i % 2]);
      }
      if constexpr (kScaled) {
        add<kColumns>(sums, part, scale);
        if (more) scale = scales[block + 1];
      }
    }
  }
}

/// A block takes 32 features of 8 kColumns rows, each of its warps a slice.
template <bool kE4M3, bool kScaled, int kColumns>
__device__ void multiply_split(const TiledLinearArgs& args) {
  release_successor();
  const int slice = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32, tile_row = static_cast<int>(blockIdx.y);
  const int first_row = static_cast<int>(blockIdx.x) * kColumns * 8, k_blocks = args.weight.in_features / kBlockColumns;
  Sums<kColumns> sums;
  clear<kColumns>(sums);
  walk<kE4M3, kScaled, kColumns>(args, tile_row, first_row, slice_begin(k_blocks, slice), slice_begin(k_blocks, slice + 1), lane, sums);
  finish_slices<kColumns>(args, tile_row, first_row, sums);
}

}  // namespace

#define QUERN_LINEAR(name, kE4M3, kScaled)                                                                                                                                 \
  extern "C" __global__ void __launch_bounds__(kThreads, 2) name##_8(const __grid_constant__ TiledLinearArgs args) { multiply_split<kE4M3, kScaled, 1>(args); }              \
  extern "C" __global__ void __launch_bounds__(kThreads) name##_16(const __grid_constant__ TiledLinearArgs args) { multiply_split<kE4M3, kScaled, 2>(args); }                 \
  extern "C" __global__ void __launch_bounds__(kThreads) name##_32(const __grid_constant__ TiledLinearArgs args) { multiply_split<kE4M3, kScaled, 4>(args); }
QUERN_LINEAR(multiply_block, true, true)
QUERN_LINEAR(multiply_e4m3, true, false)
QUERN_LINEAR(multiply_bf16, false, false)

/// A thread a piece of 16 bytes.
extern "C" __global__ void __launch_bounds__(kThreads) tile_weight(const __grid_constant__ TileWeightArgs args) {
  const bool e4m3 = args.order != Tiles::kBF16;
  const int64_t tiles_along = args.in_features / kTileColumns, pieces = tile_bytes(e4m3) / 16;
  const int64_t count = (args.out_features + kTileFeatures - 1) / kTileFeatures * tiles_along * pieces;
  const auto* source = static_cast<const uint8_t*>(args.source);
  for (int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x; i < count; i += int64_t{gridDim.x} * kThreads) {
    const int piece = static_cast<int>(i % pieces), lane = piece % 32, half = piece / 32 % 2;
    const int64_t tile = i / pieces, along = tile % tiles_along;
    const int64_t column = args.order == Tiles::kE4M3 ? along / 2 * (2 * kTileColumns) + (lane % 4 * 2 + along % 2) * 8 : along * kTileColumns + lane % 4 * 8;
    const int64_t feature = tile / tiles_along * kTileFeatures + half * 16 + lane / 4 * 2;
    uint4 value = make_uint4(0, 0, 0, 0);
    if (e4m3) {
      uint2 rows[2] = {make_uint2(0, 0), make_uint2(0, 0)};
      for (int r = 0; r < 2; ++r)
        if (feature + r < args.out_features) rows[r] = *reinterpret_cast<const uint2*>(source + (feature + r) * args.in_features + column);
      if (args.order == Tiles::kE4M3)
        value = make_uint4(rows[0].x, rows[1].x, rows[0].y, rows[1].y);
      else
        value = make_uint4(__byte_perm(rows[0].x, 0, 0x3120), __byte_perm(rows[0].y, 0, 0x3120), __byte_perm(rows[1].x, 0, 0x3120), __byte_perm(rows[1].y, 0, 0x3120));
    } else if (feature + piece / 64 < args.out_features) {
      value = *reinterpret_cast<const uint4*>(source + ((feature + piece / 64) * args.in_features + column) * 2);
    }
    static_cast<uint4*>(args.tiles)[i] = value;
  }
}

extern "C" __global__ void __launch_bounds__(kThreads) tile_scales(const __grid_constant__ TileScalesArgs args) {
  const int i = static_cast<int>(blockIdx.x * kThreads + threadIdx.x), row = i / args.k_blocks, block = i % args.k_blocks;
  if (row < args.tile_rows) args.scale[i] = args.source[(args.row_offset + row * kTileFeatures) / kBlockColumns * args.k_blocks + block];
}

}  // namespace quern::cuda::mma
