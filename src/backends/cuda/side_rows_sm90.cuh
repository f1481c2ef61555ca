#pragma once

#include "backends/cuda/mma.cuh"
#include "backends/cuda/quantise_sm90.cuh"

// in_proj_b and in_proj_a for decode rows: a hundred rows of bf16 beside thousands of e4m3, multiplied by warps that have nothing else to do. A unit is eight packed rows over
// kSideSlice blocks of 128 of K; a block of threads takes a unit or two, and leaves its sums for those that add up the slices, in the order of K. Every number of rows has one arithmetic:
// products of 128 columns on the matrix units, from zero, added to a slice's sum in the order of K.

namespace quern::cuda::sm90 {

struct SideUnit {
  bool is_b;
  int group;  // eight packed rows of the weight
  int slice, slices;

  __device__ SideUnit(const SideRows& side, int unit, int blocks) : slices(side_slices(blocks)) {
    const int groups = unit / slices, of_b = side_groups(side.num_b);
    slice = unit % slices;
    is_b = groups < of_b;
    group = is_b ? groups : groups - of_b;
  }
  /// Of `blocks` of 128 of K.
  __device__ int first_block() const { return slice * kSideSlice; }
  __device__ int count(int blocks) const { return min(kSideSlice, blocks - first_block()); }
};

/// A unit's weights in a block of 128 of K: lane (g, q) has the pieces of eight columns q and q + 4 of either half of packed row g.
struct SideWeights {
  uint4 pieces[4];

  SideWeights() = default;
  /// `half_bytes`: between the eight rows' halves of the block.
  __device__ SideWeights(const char* rows, int half_bytes) {
    const int lane = static_cast<int>(threadIdx.x) & 31, g = lane >> 2, q = lane & 3;
#pragma unroll
    for (int i = 0; i < 4; ++i) pieces[i] = *reinterpret_cast<const uint4*>(rows + i / 2 * half_bytes + swizzled(g, (i % 2 * 4 + q) * 16));
  }
  __device__ SideWeights(const SideRows& side, const SideUnit& unit, int block, int blocks) {
    const int lane = static_cast<int>(threadIdx.x) & 31, g = lane >> 2, q = lane & 3;
    const char* weight = static_cast<const char*>(side.weight) + int64_t{(unit.is_b ? 0 : 2 * blocks) + 2 * block} * kTileBytes + unit.group * (8 * kTileRowBytes);
#pragma unroll
    for (int i = 0; i < 4; ++i) pieces[i] = __ldg(reinterpret_cast<const uint4*>(weight + i / 2 * kTileBytes + swizzled(g, (i % 2 * 4 + q) * 16)));
  }
  /// The products by 16 rows: of rows g (0 and 1) and g + 8 (2 and 3) by the packed rows 2 q and 2 q + 1 of the unit. `piece(half, p)`: the p-th eight columns of a half of row g; `upper`: of row g + 8.
  __device__ __forceinline__ void multiply(float (&product)[4], const auto& piece, const auto& upper) const {
    const int q = static_cast<int>(threadIdx.x) & 3;
    uint4 low[4], high[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) low[i] = piece(i / 2, i % 2 * 4 + q), high[i] = upper(i / 2, i % 2 * 4 + q);
    multiply(product, low, high);
  }
  /// Where the pieces are there already: [half * 2 + 0 or 1], columns q and q + 4 of a half.
  __device__ __forceinline__ void multiply(float (&product)[4], const uint4 (&low)[4], const uint4 (&high)[4]) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) product[i] = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      multiply_add(product, {low[i].x, high[i].x, low[i].y, high[i].y}, pieces[i].x, pieces[i].y);
      multiply_add(product, {low[i].z, high[i].z, low[i].w, high[i].w}, pieces[i].z, pieces[i].w);
    }
  }
};

/// parts: [units][kMaxDecodeRows][8], kNothing where nothing is left.
__device__ __forceinline__ float* side_part(float* parts, int unit, int row) { return parts + (int64_t{unit} * kMaxDecodeRows + row) * 8; }

/// Leaves sums, as SideWeights::multiply places them, of the rows from `first_row` on.
__device__ __forceinline__ void leave_side(float* parts, int unit, int first_row, int rows, const float (&sum)[4]) {
  const int lane = static_cast<int>(threadIdx.x) & 31, row = first_row + (lane >> 2), packed = 2 * (lane & 3);
  if (row < rows) __stcg(reinterpret_cast<float2*>(side_part(parts, unit, row) + packed), make_float2(sum[0], sum[1]));
  if (row + 8 < rows) __stcg(reinterpret_cast<float2*>(side_part(parts, unit, row + 8) + packed), make_float2(sum[2], sum[3]));
}

/// The units of this block by all rows in x16 (bf16 [2 blocks][x_rows] pieces of 128 bytes, permuted), kGroups times 16 rows a warp of `warps` at once. kAhead: pieces are asked for
/// before those of the block before are multiplied, which takes 160 registers with two groups.
template <int kGroups, bool kAhead>
__device__ __forceinline__ void multiply_side(const SideRows& side, const void* x16, int rows, int x_rows, int blocks, int warp, int warps) {
  const int lane = static_cast<int>(threadIdx.x) & 31, g = lane >> 2, q = lane & 3;
  struct Pieces {
    SideWeights weights;
    uint4 x[kGroups][2][4];
  };
  for (int at = static_cast<int>(blockIdx.x); at < side_units(side, blocks); at += static_cast<int>(gridDim.x)) {
    const SideUnit unit(side, at, blocks);
    for (int first = warp * 16; first < rows; first += warps * 16 * kGroups) {
      const auto load = [&](Pieces& pieces, int block) {
        pieces.weights = SideWeights(side, unit, block, blocks);
#pragma unroll
        for (int n = 0; n < kGroups; ++n)
#pragma unroll
          for (int upper = 0; upper < 2; ++upper) {
            const int row = first + n * warps * 16 + upper * 8 + g;
#pragma unroll
            for (int i = 0; i < 4; ++i)
              pieces.x[n][upper][i] = row < rows ? __ldcg(reinterpret_cast<const uint4*>(static_cast<const char*>(x16) + int64_t{2 * block + i / 2} * x_rows * kTileRowBytes +
                                                                                         swizzled(row, (i % 2 * 4 + q) * 16)))
                                                 : uint4{};
          }
      };
      float sum[kGroups][4] = {};
      const auto add = [&](const Pieces& pieces) {
#pragma unroll
        for (int n = 0; n < kGroups; ++n) {
          float product[4];
          pieces.weights.multiply(product, pieces.x[n][0], pieces.x[n][1]);
#pragma unroll
          for (int i = 0; i < 4; ++i) sum[n][i] = __fadd_rn(sum[n][i], product[i]);
        }
      };
      const int end = unit.first_block() + unit.count(blocks);
      if constexpr (kAhead) {
        Pieces pieces;
        load(pieces, unit.first_block());
#pragma unroll 1
        for (int block = unit.first_block() + 1; block < end; ++block) {
          Pieces next;
          load(next, block);
          add(pieces);
          pieces = next;
        }
        add(pieces);
      } else {
#pragma unroll 1
        for (int block = unit.first_block(); block < end; ++block) {
          Pieces pieces;
          load(pieces, block);
          add(pieces);
        }
      }
#pragma unroll
      for (int n = 0; n < kGroups; ++n) leave_side(side.parts, at, first + n * warps * 16, rows, sum[n]);
    }
  }
}

/// Adds up the slices of the groups of eight packed rows that this block has units of, each slice's block every so many rows, and marks the places as empty again. `thread` of `threads`,
/// after their own sums are left.
__device__ __forceinline__ void join_side(const SideRows& side, int rows, int blocks, int thread, int threads) {
  constexpr int kTogether = 8;
  for (int at = static_cast<int>(blockIdx.x); at < side_units(side, blocks); at += static_cast<int>(gridDim.x)) {
    const SideUnit unit(side, at, blocks);
    const int first = at - unit.slice, mine = (rows - unit.slice + unit.slices - 1) / unit.slices;
    for (int i = thread; i < mine * 8; i += threads) {
      const int row = unit.slice + i / 8 * unit.slices, packed = i % 8;
      float sum = 0;
      for (int slice = 0; slice < unit.slices; slice += kTogether) {
        float part[kTogether];
        bool there;
        do {
          there = true;
#pragma unroll
          for (int k = 0; k < kTogether; ++k)
            if (slice + k < unit.slices) {
              part[k] = load_relaxed(side_part(side.parts, first + slice + k, row) + packed);
              there = there && is_there(part[k]);
            }
        } while (!there);
#pragma unroll
        for (int k = 0; k < kTogether; ++k)
          if (slice + k < unit.slices) {
            sum = __fadd_rn(sum, part[k]);
            __stcg(side_part(side.parts, first + slice + k, row) + packed, __uint_as_float(kNothing));
          }
      }
      const int feature = unit.group / 2 * 16 + packed * 2 + unit.group % 2, num = unit.is_b ? side.num_b : side.num_a;
      if (feature < num) static_cast<__nv_bfloat16*>(unit.is_b ? side.b : side.a)[int64_t{row} * num + feature] = __float2bfloat16_rn(sum);
    }
  }
}

// ---- all of them by blocks that have no tiles ----

/// A block's share: slices which, which + side.blocks, ... . What is multiplied of 128 of K comes to shared memory together: both halves of the rows, then of each half b's weights and a's.
struct SideShare {
  int which, groups_b, groups, slices;

  __device__ explicit SideShare(const SideRows& side, int blocks)
      : which(static_cast<int>(blockIdx.x) - static_cast<int>(gridDim.x) + side.blocks), groups_b(side_groups(side.num_b)), groups(groups_b + side_groups(side.num_a)), slices(side_slices(blocks)) {}
  __device__ bool is_mine() const { return which >= 0; }
  __device__ int half_bytes() const { return groups * 8 * kTileRowBytes; }
};

/// What multiply_side multiplies, kGroups times 16 rows a warp of `warps`. `await()` gives what belongs to the next block of 128, as it comes; `free()` says that the warp has read it.
template <int kGroups>
__device__ __forceinline__ void multiply_side_share(const SideRows& side, const SideShare& share, int rows, int x_rows, int blocks, int warp, int warps, const auto& await, const auto& free) {
  const int lane = static_cast<int>(threadIdx.x) & 31, g = lane >> 2, q = lane & 3;
#pragma unroll 1
  for (int slice = share.which; slice < share.slices; slice += side.blocks) {
    float sum[kGroups][kSideGroups][4] = {};
    const int end = min((slice + 1) * kSideSlice, blocks);
#pragma unroll 1
    for (int block = slice * kSideSlice; block < end; ++block) {
      const char* from = await();
      uint32_t x[kGroups][8][4];  // the operands of SideWeights::multiply; what they are of rows that there are not is not used
#pragma unroll
      for (int m = 0; m < kGroups; ++m)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const char* piece = from + i / 2 * x_rows * kTileRowBytes + swizzled((m * warps + warp) * 16 + g, (i % 2 * 4 + q) * 16);
          const uint4 low = *reinterpret_cast<const uint4*>(piece), high = *reinterpret_cast<const uint4*>(piece + 8 * kTileRowBytes);
          x[m][2 * i][0] = low.x, x[m][2 * i][1] = high.x, x[m][2 * i][2] = low.y, x[m][2 * i][3] = high.y;
          x[m][2 * i + 1][0] = low.z, x[m][2 * i + 1][1] = high.z, x[m][2 * i + 1][2] = low.w, x[m][2 * i + 1][3] = high.w;
        }
      const char* weights = from + 2 * x_rows * kTileRowBytes;
#pragma unroll
      for (int n = 0; n < kSideGroups; n += 2) {  // side_groups are even
        if (n >= share.groups) break;
        const SideWeights w[2] = {{weights + n * 8 * kTileRowBytes, share.half_bytes()}, {weights + (n + 1) * 8 * kTileRowBytes, share.half_bytes()}};
        float product[2][kGroups][4] = {};
#pragma unroll
        for (int k = 0; k < 8; ++k)  // several at a time: each has to wait for itself
#pragma unroll
          for (int j = 0; j < 2; ++j)
#pragma unroll
            for (int m = 0; m < kGroups; ++m) {
              const uint4& piece = w[j].pieces[k / 2];
              multiply_add(product[j][m], x[m][k], k % 2 == 0 ? piece.x : piece.z, k % 2 == 0 ? piece.y : piece.w);
            }
#pragma unroll
        for (int j = 0; j < 2; ++j)
#pragma unroll
          for (int m = 0; m < kGroups; ++m)
#pragma unroll
            for (int i = 0; i < 4; ++i) sum[m][n + j][i] = __fadd_rn(sum[m][n + j][i], product[j][m][i]);
      }
      free();
    }
#pragma unroll
    for (int n = 0; n < kSideGroups; ++n) {
      if (n >= share.groups) break;
#pragma unroll
      for (int m = 0; m < kGroups; ++m) leave_side(side.parts, n * share.slices + slice, (m * warps + warp) * 16, rows, sum[m][n]);
    }
  }
}

/// As join_side, of all side rows by the blocks that multiplied them.
__device__ __forceinline__ void join_side_share(const SideRows& side, const SideShare& share, int rows, int thread, int threads) {
  constexpr int kTogether = 8, kItems = 3, kStride = kMaxDecodeRows * 2;  // slices; four packed rows of a row; between slices
  const int of_group = rows * 2, items = share.groups * of_group, step = side.blocks * threads;
#pragma unroll 1
  for (int first = share.which * threads + thread; first < items; first += kItems * step) {
    int group[kItems], place[kItems];  // of four packed rows among a group's
    float4* at[kItems];
    float4 sums[kItems];
#pragma unroll
    for (int n = 0; n < kItems; ++n) {
      const int item = min(first + n * step, items - 1);
      group[n] = item / of_group, place[n] = item - group[n] * of_group;
      at[n] = reinterpret_cast<float4*>(side_part(side.parts, group[n] * share.slices, 0)) + place[n];
      sums[n] = float4{};
    }
#pragma unroll 1
    for (int slice = 0; slice < share.slices; slice += kTogether) {
      float4 parts[kItems][kTogether];
      bool there;
      do {
        there = true;
#pragma unroll
        for (int n = 0; n < kItems; ++n)
#pragma unroll
          for (int k = 0; k < kTogether; ++k)
            if (slice + k < share.slices) parts[n][k] = load_relaxed(at[n] + (slice + k) * kStride);
#pragma unroll
        for (int n = 0; n < kItems; ++n)
#pragma unroll
          for (int k = 0; k < kTogether; ++k)
            if (first + n * step < items && slice + k < share.slices) there = there && is_there(parts[n][k]);
      } while (!there);
#pragma unroll
      for (int n = 0; n < kItems; ++n)
#pragma unroll
        for (int k = 0; k < kTogether; ++k)
          if (slice + k < share.slices) sums[n] = {__fadd_rn(sums[n].x, parts[n][k].x), __fadd_rn(sums[n].y, parts[n][k].y), __fadd_rn(sums[n].z, parts[n][k].z), __fadd_rn(sums[n].w, parts[n][k].w)};
    }
#pragma unroll
    for (int n = 0; n < kItems; ++n) {
      if (first + n * step >= items) break;
      const float nothing = __uint_as_float(kNothing);
#pragma unroll 1
      for (int slice = 0; slice < share.slices; ++slice) __stcg(at[n] + slice * kStride, make_float4(nothing, nothing, nothing, nothing));
      const bool is_b = group[n] < share.groups_b;
      const int of = is_b ? group[n] : group[n] - share.groups_b, num = is_b ? side.num_b : side.num_a, feature = of / 2 * 16 + place[n] % 2 * 8 + of % 2;
      auto* out = static_cast<__nv_bfloat16*>(is_b ? side.b : side.a) + int64_t{place[n] / 2} * num + feature;
      const float values[4] = {sums[n].x, sums[n].y, sums[n].z, sums[n].w};
#pragma unroll
      for (int i = 0; i < 4; ++i)
        if (feature + 2 * i < num) out[2 * i] = __float2bfloat16_rn(values[i]);
    }
  }
}

}  // namespace quern::cuda::sm90
