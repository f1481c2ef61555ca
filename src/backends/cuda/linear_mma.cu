#include "backends/cuda/linear_mma_args.h"
#include "backends/cuda/mma.cuh"
#include "backends/cuda/numeric.cuh"

// Linear layers on the matrix units of sm_80 and newer with 16-bit activations: e4m3 weights become bf16 in registers, exactly; sums are f32. A sum runs over K in eight slices, each in the order of
// K, block scales applied every 128; slices are added in order. So a row's bits depend on the weight's shape alone, whatever the rows and their kind.

namespace quern::cuda::mma {

namespace {

/// sum is this warp's of 32 features by 8 kColumns rows: [half of 16 features][8 rows].
template <int kColumns>
using Sums = float[2][kColumns][4];

template <int kColumns>
__device__ void clear(Sums<kColumns>& sums) {
#pragma unroll
  for (int h = 0; h < 2; ++h)
#pragma unroll
    for (int c = 0; c < kColumns; ++c)
#pragma unroll
      for (int i = 0; i < 4; ++i) sums[h][c][i] = 0;
}
template <int kColumns>
__device__ void add(Sums<kColumns>& to, const Sums<kColumns>& sums, float factor) {
#pragma unroll
  for (int h = 0; h < 2; ++h)
#pragma unroll
    for (int c = 0; c < kColumns; ++c)
#pragma unroll
      for (int i = 0; i < 4; ++i) to[h][c][i] = fmaf(sums[h][c][i], factor, to[h][c][i]);
}

/// 16 bytes that no kernel writes while this one runs.
__device__ uint4 load_constant(const void* at) {
  uint4 r;
  asm volatile("ld.global.nc.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(r.x), "=r"(r.y), "=r"(r.z), "=r"(r.w) : "l"(at));
  return r;
}

/// Four e4m3 codes as two pairs of bf16: the codes in bytes 0 and 2, those in bytes 1 and 3. Their exponents are 120 lower until they are multiplied.
__device__ uint32_t times_2_120(uint32_t pair) {
  uint32_t result;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(result) : "r"(pair), "r"(0x7b807b80u), "r"(0x80008000u));
  return result;
}
__device__ uint32_t even_codes(uint32_t word) { return times_2_120((word << 4 & 0x07f007f0u) | (word << 8 & 0x80008000u)); }
__device__ uint32_t odd_codes(uint32_t word) { return times_2_120((word >> 4 & 0x07f007f0u) | (word & 0x80008000u)); }

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

__device__ float2 unpack(uint32_t pair) { return {__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u)}; }
__device__ uint32_t pack(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&pair);
}
__device__ float rounded(float x) { return __bfloat162float(__float2bfloat16_rn(x)); }

/// Features `feature` and the next of a row; both exist or neither does.
__device__ void finish(const TiledLinearArgs& args, int row, int feature, float first, float second) {
  if (row >= args.num_rows || feature >= args.weight.out_features) return;
  if (args.weight.scales == Weight::Scales::kChannel) {
    first *= args.weight.scale[feature];
    second *= args.weight.scale[feature + 1];
  } else if (args.weight.scales == Weight::Scales::kTensor) {
    first *= args.weight.scale[0];
    second *= args.weight.scale[0];
  }
  const int64_t at = int64_t{row} * args.weight.out_features + feature;
  if (args.epilogue == Epilogue::kStoreF32) {
    *reinterpret_cast<float2*>(static_cast<float*>(args.out) + at) = {first, second};
    return;
  }
  auto* out = reinterpret_cast<uint32_t*>(static_cast<__nv_bfloat16*>(args.out) + at);
  first = rounded(first);
  second = rounded(second);
  if (args.epilogue == Epilogue::kAddResidual || args.epilogue == Epilogue::kMultiply) {
    const float2 before = unpack(*out);
    first = args.epilogue == Epilogue::kMultiply ? before.x * first : before.x + first;
    second = args.epilogue == Epilogue::kMultiply ? before.y * second : before.y + second;
  } else if (args.epilogue == Epilogue::kSilu) {
    first = silu(first);
    second = silu(second);
  }
  *out = pack(first, second);
}

constexpr int kStepsPerBlock = kBlockColumns / kTileColumns;

/// Adds the products of 32 features and scale blocks [begin, end) of K.
template <bool kE4M3, bool kScaled, int kColumns>
__device__ void walk(const TiledLinearArgs& args, int tile_row, int first_row, int begin, int end, int lane, Sums<kColumns>& sums) {
  const int k_blocks = args.weight.in_features / kBlockColumns;
  const auto* tiles = static_cast<const uint8_t*>(args.weight.tiles) + int64_t{tile_row} * k_blocks * kStepsPerBlock * tile_bytes(kE4M3);
  const float* scales = kScaled ? args.weight.scale + int64_t{tile_row} / (kBlockColumns / kTileFeatures) * k_blocks : nullptr;
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

/// Where slice `slice` begins among the scale blocks.
__device__ int slice_begin(int k_blocks, int slice) { return k_blocks * slice / kSlices; }

/// A block takes 32 features of 8 kColumns rows, each of its warps a slice.
template <bool kE4M3, bool kScaled, int kColumns>
__device__ void multiply_split(const TiledLinearArgs& args) {
  __shared__ float shared[kSlices][kColumns * 8][kTileFeatures];
  release_successor();
  const int slice = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32, tile_row = static_cast<int>(blockIdx.y);
  const int first_row = static_cast<int>(blockIdx.x) * kColumns * 8, k_blocks = args.weight.in_features / kBlockColumns;
  Sums<kColumns> sums;
  clear<kColumns>(sums);
  walk<kE4M3, kScaled, kColumns>(args, tile_row, first_row, slice_begin(k_blocks, slice), slice_begin(k_blocks, slice + 1), lane, sums);
#pragma unroll
  for (int half = 0; half < 2; ++half)
#pragma unroll
    for (int c = 0; c < kColumns; ++c)
#pragma unroll
      for (int column = 0; column < 2; ++column)
        *reinterpret_cast<float2*>(&shared[slice][c * 8 + lane % 4 * 2 + column][half * 16 + lane / 4 * 2]) = {sums[half][c][column], sums[half][c][2 + column]};
  __syncthreads();
  for (int i = static_cast<int>(threadIdx.x); i < kColumns * 8 * kTileFeatures / 2; i += kThreads) {
    const int row = i / (kTileFeatures / 2), feature = i % (kTileFeatures / 2) * 2;
    float2 sum = *reinterpret_cast<const float2*>(&shared[0][row][feature]);
#pragma unroll
    for (int s = 1; s < kSlices; ++s) {
      const float2 more = *reinterpret_cast<const float2*>(&shared[s][row][feature]);
      sum.x += more.x;
      sum.y += more.y;
    }
    finish(args, first_row + row, tile_row * kTileFeatures + feature, sum.x, sum.y);
  }
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
  const int64_t tiles_along = args.in_features / kTileColumns, pieces = tile_bytes(args.is_e4m3 != 0) / 16;
  const int64_t count = (args.out_features + kTileFeatures - 1) / kTileFeatures * tiles_along * pieces;
  const auto* source = static_cast<const uint8_t*>(args.source);
  for (int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x; i < count; i += int64_t{gridDim.x} * kThreads) {
    const int piece = static_cast<int>(i % pieces), lane = piece % 32, half = piece / 32 % 2;
    const int64_t tile = i / pieces, column = tile % tiles_along * kTileColumns + lane % 4 * 8;
    const int64_t feature = tile / tiles_along * kTileFeatures + half * 16 + lane / 4 * 2;
    uint4 value = make_uint4(0, 0, 0, 0);
    if (args.is_e4m3 != 0) {
      uint2 rows[2] = {make_uint2(0, 0), make_uint2(0, 0)};
      for (int r = 0; r < 2; ++r)
        if (feature + r < args.out_features) rows[r] = *reinterpret_cast<const uint2*>(source + (feature + r) * args.in_features + column);
      value = make_uint4(__byte_perm(rows[0].x, 0, 0x3120), __byte_perm(rows[0].y, 0, 0x3120), __byte_perm(rows[1].x, 0, 0x3120), __byte_perm(rows[1].y, 0, 0x3120));
    } else if (feature + piece / 64 < args.out_features) {
      value = *reinterpret_cast<const uint4*>(source + ((feature + piece / 64) * args.in_features + column) * 2);
    }
    static_cast<uint4*>(args.tiles)[i] = value;
  }
}

}  // namespace quern::cuda::mma
