#pragma once

// Decode rows from 33 on: the loop of linear_sm90.cuh with the rows as A and the weights as B, so that a thread has two rows and needs but four scales a tile. A product's bits are the same either way, and so
// is the order of every sum: the rest is as there, but for a few things. Rows are quantised two at a time by a block where there are more than blocks. A tile row that several blocks share is added up by those of
// them that have no tiles behind it, each a share of its rows and features; what a block adds up itself stays in its shared memory, and parts of others are copied beside it. Whatever comes behind products is short
// and in loops, since a block runs it once or twice (decision 0038). Side rows are left to blocks without tiles where there are enough (decision 0047). One layer a launch: without a loop over layers the compiler keeps addresses and scales out of the way of the sums.

#include "backends/cuda/linear_sm90.cuh"

namespace quern::cuda::sm90 {

// ---- what becomes of finished sums ----

/// Sums are stored and added up for as many groups of 16 packed rows at a time, in loops: code that is run once or twice a launch takes longer to be fetched than to be run.
constexpr int kUnitsTogether = 2;
/// Eight sums of a thread in each of these units of a tile, for 64 rows: [8 u + 4 h + 2 r + i] is row g + 8 r by packed row 16 u + 8 h + 2 q + i.
using UnitSums = float[kUnitsTogether * 8];

/// Where a thread's sums of a tile go. What follows from the tile alone is found out once, before the loops.
struct Destination {
  char* out;           // where row 0 of the segment has the tile's first feature
  int row_bytes;
  int features;        // of the segment from there on
  int row;             // of this thread in 64
  bool whole;          // rows can be read and written in pieces of four features

  Destination() = default;
  __device__ Destination(const LinearLayer& linear, int tile) {
    const OutputSegment& segment = segment_of(linear, tile);
    const int thread = thread_here(), tile_features = linear.epilogue == Epilogue::kSiluUp ? kTileRows / 2 : kTileRows, first = (tile - segment.first_tile) * tile_features;
    const int size = linear.epilogue == Epilogue::kLogits ? 4 : 2;
    out = static_cast<char*>(segment.out) + int64_t{first} * size;
    row_bytes = static_cast<int>(segment.stride) * size;
    features = segment.features - first;
    row = ((thread >> 5) & 3) * 16 + ((thread & 31) >> 2);
    whole = features >= tile_features && segment.stride % 4 == 0 && (reinterpret_cast<uintptr_t>(segment.out) & (4 * size - 1)) == 0;
  }
  /// Of one of 64 rows that begin at `first_row`, row 8 r after the thread's own.
  __device__ char* at(int first_row, int r) const { return out + int64_t{first_row + row + 8 * r} * row_bytes; }
  __device__ bool has(int first_row, int r, int rows) const { return first_row + row + 8 * r < rows; }
};

/// What sums are added to, where a layer has a residual and pieces are whole.
struct Before {
  uint2 words[2][kUnitsTogether];
};
/// Asked for early, so that it is there when the sums are.
__device__ __forceinline__ void load_before(const LinearLayer& linear, const Destination& to, int unit, int first_row, int rows, Before& before) {
  if (linear.epilogue != Epilogue::kResidual || !to.whole) return;
  const int bytes = unit * 32 + (thread_here() & 3) * 8;
#pragma unroll
  for (int r = 0; r < 2; ++r)
    if (to.has(first_row, r, rows))
#pragma unroll
      for (int u = 0; u < kUnitsTogether; ++u) before.words[r][u] = __ldcg(reinterpret_cast<const uint2*>(to.at(first_row, r) + bytes + u * 32));
}

/// Where there is a scale a packed row, sums are multiplied by it.
__device__ __forceinline__ void scale_units(const LinearLayer& linear, UnitSums& v, int tile, int unit) {
  if (linear.row_scale == nullptr) return;
  const int q = thread_here() & 3;
#pragma unroll
  for (int half = 0; half < 2 * kUnitsTogether; ++half)
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float scale = __ldg(linear.row_scale + int64_t{tile} * kTileRows + unit * 16 + half * 8 + q * 2 + i);
      v[4 * half + i] = __fmul_rn(v[4 * half + i], scale);
      v[4 * half + 2 + i] = __fmul_rn(v[4 * half + 2 + i], scale);
    }
}

/// Stores such sums, scaled: of kSiluUp. They are rounded in pairs, which takes an instruction of the fast kind.
__device__ __forceinline__ void store_silu_units(const Destination& to, const UnitSums& v, int unit, int first_row, int rows) {
  static_assert(kUnitsTogether == 2);
  const int q = thread_here() & 3;
  const auto low = [](uint32_t pair) { return __uint_as_float(pair << 16); };
  const auto high = [](uint32_t pair) { return __uint_as_float(pair & 0xffff0000u); };
  uint32_t y[2][2];
#pragma unroll
  for (int r = 0; r < 2; ++r)
#pragma unroll
    for (int u = 0; u < 2; ++u) {
      const float* sums = v + 8 * u + 2 * r;
      const uint32_t gates = bf16_pair(sums[0], sums[1]), ups = bf16_pair(sums[4], sums[5]), gated = bf16_pair(silu(low(gates)), silu(high(gates)));
      y[r][u] = bf16_pair(low(gated) * low(ups), high(gated) * high(ups));
    }
  if (to.whole) {  // four lanes store 32 bytes: two neighbours each other's unit
    const bool odd = q % 2 != 0;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const uint32_t other = __shfl_xor_sync(0xffffffffu, odd ? y[r][0] : y[r][1], 1);
      if (to.has(first_row, r, rows)) __stcg(reinterpret_cast<uint2*>(to.at(first_row, r) + unit * 16 + q % 2 * 16 + q / 2 * 8), odd ? make_uint2(other, y[r][1]) : make_uint2(y[r][0], other));
    }
  } else {
#pragma unroll
    for (int r = 0; r < 2; ++r)
#pragma unroll
      for (int u = 0; u < 2; ++u)
        if (to.has(first_row, r, rows) && (unit + u) * 8 + q * 2 < to.features) *reinterpret_cast<uint32_t*>(to.at(first_row, r) + (unit + u) * 16 + q * 4) = y[r][u];
  }
}
/// Of any other epilogue. `before`: what load_before gave.
__device__ __forceinline__ void store_units(const LinearLayer& linear, const Destination& to, const UnitSums& v, int unit, int first_row, int rows, const Before& before) {
  const int feature = unit * 16 + (thread_here() & 3) * 4;
  const auto sum = [&](int u, int h, int r, int i) { return v[8 * u + 4 * h + 2 * r + i]; };
  if (linear.epilogue == Epilogue::kLogits) {
#pragma unroll
    for (int r = 0; r < 2; ++r)
#pragma unroll
      for (int u = 0; u < kUnitsTogether; ++u) {
        if (!to.has(first_row, r, rows)) continue;
        auto* at = reinterpret_cast<float*>(to.at(first_row, r)) + feature + u * 16;
        const float y[4] = {sum(u, 0, r, 0), sum(u, 1, r, 0), sum(u, 0, r, 1), sum(u, 1, r, 1)};
        if (to.row_bytes % 16 == 0 && feature + u * 16 + 4 <= to.features) {
          *reinterpret_cast<float4*>(at) = make_float4(y[0], y[1], y[2], y[3]);
        } else {
          if (feature + u * 16 < to.features) *reinterpret_cast<float2*>(at) = make_float2(y[0], y[1]);
          if (feature + u * 16 + 2 < to.features) *reinterpret_cast<float2*>(at + 2) = make_float2(y[2], y[3]);
        }
      }
    return;
  }
  const bool adds = linear.epilogue == Epilogue::kResidual;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    if (!to.has(first_row, r, rows)) continue;
    char* at = to.at(first_row, r) + feature * 2;
    const auto rounded = [&](int u) { return uint2{bf16_pair(sum(u, 0, r, 0), sum(u, 1, r, 0)), bf16_pair(sum(u, 0, r, 1), sum(u, 1, r, 1))}; };  // features 16 u + 4 q to 16 u + 4 q + 3
    if (to.whole) {
#pragma unroll
      for (int u = 0; u < kUnitsTogether; ++u) {
        uint2 y = rounded(u);
        if (adds) y = {add_pair(before.words[r][u].x, y.x), add_pair(before.words[r][u].y, y.y)};
        *reinterpret_cast<uint2*>(at + u * 32) = y;
      }
    } else {
#pragma unroll
      for (int u = 0; u < kUnitsTogether; ++u) {
        const uint2 y = rounded(u);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          if (feature + u * 16 + 2 * i >= to.features) continue;
          auto* pair = reinterpret_cast<uint32_t*>(at + u * 32 + 4 * i);
          const uint32_t half = i == 0 ? y.x : y.y;
          *pair = adds ? add_pair(__ldcg(pair), half) : half;
        }
      }
    }
  }
}

__device__ __forceinline__ void store_scaled(const LinearLayer& linear, const Destination& to, UnitSums& v, int tile, int unit, int first_row, int rows, const Before& before) {
  scale_units(linear, v, tile, unit);
  if (linear.epilogue == Epilogue::kSiluUp) store_silu_units(to, v, unit, first_row, rows);
  else store_units(linear, to, v, unit, first_row, rows, before);
}

// ---- the multiplying warpgroups ----

/// What of a tile by kColumns rows a warpgroup multiplies: kBlocks times 64 rows by 16 kUnits packed rows of the weight.
template <int kColumns>
struct WideShare {
  static constexpr int kBlocks = kColumns == 256 ? 2 : 1, kUnits = kColumns == 64 ? 4 : 8, kSums = kUnits * 8, kPacked = kUnits * 16;
  static __device__ __forceinline__ int first_row(int group, int block) { return kColumns == 64 ? 0 : block * 128 + group * 64; }
  static __device__ __forceinline__ int first_unit(int group) { return kColumns == 64 ? group * kUnits : 0; }
};
template <int kColumns>
using WideSums = float[WideShare<kColumns>::kBlocks][WideShare<kColumns>::kSums];

/// Of a consumer; the compiler sees that it is the same for a warp, which operands are addressed with.
__device__ __forceinline__ int warpgroup() { return __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) >> 7, 0); }

/// acc = the sums of `count` tiles along K, the next ones of the ring; e4m3 is promoted every 128 with both scales. A sum's bits do not depend on kColumns. Of 64 rows
/// that begin past `rows` the second are left out; what acc says of rows that there are not is not to be used.
template <int kColumns, bool kFp8>
__device__ __forceinline__ void multiply_wide(const Layout<kColumns, kFp8, false>& at, WideSums<kColumns>& acc, int count, int rows, RingPlace& ring, RingPlace& rows_ring) {
  using Share = WideShare<kColumns>;
  const int group = warpgroup(), lane = threadIdx.x & 31;
#pragma unroll
  for (int m = 0; m < Share::kBlocks; ++m)
#pragma unroll
    for (int i = 0; i < Share::kSums; ++i) acc[m][i] = 0;
  const auto next_stage = [&] {
    const int stage = ring.stage;
    await_stage(at, ring);
    ring.advance(at.stages);
    return stage;
  };
  const uint64_t first_a = operand(at.rows(0) + Share::first_row(group, 0) * kTileRowBytes), first_b = operand(at.weight(0) + Share::first_unit(group) * 16 * kTileRowBytes);
  const auto start = [&](float(&sum)[Share::kSums], int stage, int m, bool adds) {
    const uint32_t begin = stage * ((kTileBytes + kColumns * kTileRowBytes) / kOperandUnit);
    const uint64_t a = operand_at(first_a, begin + m * (128 * kTileRowBytes / kOperandUnit)), b = operand_at(first_b, begin);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < 4; ++k) wgmma<Share::kPacked, kFp8>(sum, operand_at(a, k * 2), operand_at(b, k * 2), adds || k > 0 ? 1 : 0);
    wgmma_commit();
  };
  if constexpr (Layout<kColumns, kFp8, 0>::kSplit) {
    struct Stages {
      int tile, rows;
    };
    const auto next = [&] {
      const Stages now{ring.stage, rows_ring.stage};
      barrier_wait(at.full(ring.stage), ring.parity);
      barrier_wait(at.rows_full(rows_ring.stage), rows_ring.parity);
      ring.advance(at.stages);
      rows_ring.advance(kRowStages);
      return now;
    };
    const auto begin = [&](float(&sum)[Share::kSums], const Stages& now) {
      const uint64_t a = operand_at(first_a, now.rows * (kColumns * kTileRowBytes / kOperandUnit)), b = operand_at(first_b, now.tile * (kTileBytes / kOperandUnit));
      wgmma_fence();
#pragma unroll
      for (int k = 0; k < 4; ++k) wgmma<Share::kPacked, kFp8>(sum, operand_at(a, k * 2), operand_at(b, k * 2), k > 0 ? 1 : 0);
      wgmma_commit();
    };
    const auto promote = [&](float(&of)[Share::kSums], const Stages& now, int wait) {
      const float2 scale = load_shared_pair(at.tile_scale_address(now.tile));
      const int thread = thread_here();
      const uint32_t x = at.scales_address(now.rows) + (((thread >> 5) & 3) * 16 + ((thread & 31) >> 2)) * 4;
      const float first = load_shared(x), second = load_shared(x + 8 * 4);
      const float scales[2][2] = {{__fmul_rn(scale.x, first), __fmul_rn(scale.x, second)}, {__fmul_rn(scale.y, first), __fmul_rn(scale.y, second)}};
      wgmma_wait_for(wait);
      settle(of);
      if ((thread_here() & 31) == 0) {
        barrier_arrive(at.empty(now.tile));
        barrier_arrive(at.rows_empty(now.rows));
      }
#pragma unroll
      for (int i = 0; i < Share::kSums; ++i) acc[0][i] = __fmaf_rn(of[i], scales[i / 4 % 2][i / 2 % 2], acc[0][i]);
    };
    int k = 0;
    for (; k + 2 <= count; k += 2) {
      float product[2][Share::kSums];
      Stages stages[2];
#pragma unroll
      for (int n = 0; n < 2; ++n) begin(product[n], stages[n] = next());
      promote(product[0], stages[0], 1);
      promote(product[1], stages[1], 0);
    }
    for (; k < count; ++k) {
      float product[Share::kSums];
      const Stages stages = next();
      begin(product, stages);
      promote(product, stages, 0);
    }
  } else if constexpr (kFp8) {
    const auto promote = [&](float(&of)[Share::kSums], int stage, int m, int wait, bool last) {
      const float2 scale = load_shared_pair(at.tile_scale_address(stage));
      const int thread = thread_here();
      const uint32_t x = at.scales_address(stage) + (Share::first_row(group, m) + ((thread >> 5) & 3) * 16 + ((thread & 31) >> 2)) * 4;
      const float first = load_shared(x), second = load_shared(x + 8 * 4);
      const float scales[2][2] = {{__fmul_rn(scale.x, first), __fmul_rn(scale.x, second)}, {__fmul_rn(scale.y, first), __fmul_rn(scale.y, second)}};
      wgmma_wait_for(wait);
      settle(of);
      if (last && (thread_here() & 31) == 0) barrier_arrive(at.empty(stage));
#pragma unroll
      for (int i = 0; i < Share::kSums; ++i) acc[m][i] = __fmaf_rn(of[i], scales[i / 4 % 2][i / 2 % 2], acc[m][i]);
    };
    if constexpr (Share::kBlocks == 1) {
      int k = 0;
      for (; k + 2 <= count; k += 2) {
        float product[2][Share::kSums];
        int stages[2];
#pragma unroll
        for (int n = 0; n < 2; ++n) start(product[n], stages[n] = next_stage(), 0, false);
        promote(product[0], stages[0], 0, 1, true);
        promote(product[1], stages[1], 0, 0, true);
      }
      for (; k < count; ++k) {
        const int stage = next_stage();
        float product[Share::kSums];
        start(product, stage, 0, false);
        promote(product, stage, 0, 0, true);
      }
    } else {  // the other warpgroup multiplies while this one promotes
      const bool both = Share::first_row(group, 1) < rows;
      float product[Share::kSums];
      int stage = next_stage();
      for (int k = 1; k <= count; ++k) {
        const int now = stage;
        // The next tile is waited for while products are under way, so that its own begin as soon as there are registers.
        const auto then = [&] { if (k < count) stage = next_stage(); };
        start(product, now, 0, false);
        if (both) {
          promote(product, now, 0, 0, false);
          start(product, now, 1, false);
          then();
          promote(product, now, 1, 0, true);
        } else {
          then();
          promote(product, now, 0, 0, true);
        }
      }
    }
  } else {
    int before = 0;
    for (int k = 0; k < count; ++k) {  // a tile is free when the next one's products are under way
      const int stage = next_stage();
#pragma unroll
      for (int m = 0; m < Share::kBlocks; ++m) start(acc[m], stage, m, true);
      wgmma_wait_for(Share::kBlocks);
      if (k > 0 && lane == 0) barrier_arrive(at.empty(before));
      before = stage;
    }
    wgmma_wait_for(0);
#pragma unroll
    for (int m = 0; m < Share::kBlocks; ++m) settle(acc[m]);
    if (lane == 0) barrier_arrive(at.empty(before));
  }
}

/// `then(sums, unit, first_row)` for all sums of a thread whose 64 rows begin below `rows`, kUnits units at a time. The sums are gone thereafter.
template <int kColumns, int kUnits>
__device__ __forceinline__ void for_each_units(WideSums<kColumns>& acc, int rows, const auto& then) {
  using Share = WideShare<kColumns>;
  constexpr int kStep = kUnits * 8;
  const int group = warpgroup();
#pragma unroll 1
  for (int m = 0; m < Share::kBlocks && Share::first_row(group, m) < rows; ++m) {
#pragma unroll 1
    for (int u = 0; u < Share::kUnits; u += kUnits) {
      float sums[kStep];
#pragma unroll
      for (int i = 0; i < kStep; ++i) sums[i] = acc[0][i];
#pragma unroll
      for (int i = 0; i < Share::kSums - kStep; ++i) acc[0][i] = acc[0][i + kStep];
      then(sums, Share::first_unit(group) + u, Share::first_row(group, m));
    }
    if constexpr (Share::kBlocks > 1)
#pragma unroll
      for (int i = 0; i < Share::kSums; ++i) acc[0][i] = acc[1][i];
  }
}

template <int kColumns>
__device__ __forceinline__ void store_wide(const LinearLayer& linear, WideSums<kColumns>& acc, int tile, int rows) {
  const Destination to(linear, tile);
  if (linear.epilogue == Epilogue::kStore && linear.row_scale == nullptr && to.whole) {  // little code
    constexpr int kAll = WideShare<kColumns>::kUnits;
    for_each_units<kColumns, kAll>(acc, rows, [&](const float(&v)[kAll * 8], int unit, int first_row) {
      char* out = to.at(first_row, 0) + unit * 32 + (thread_here() & 3) * 8;
#pragma unroll
      for (int r = 0; r < 2; ++r)
        if (to.has(first_row, r, rows))
#pragma unroll
          for (int u = 0; u < kAll; ++u) {
            const float* y = v + u * 8 + r * 2;
            *reinterpret_cast<uint2*>(out + 8 * r * int64_t{to.row_bytes} + u * 32) = {bf16_pair(y[0], y[4]), bf16_pair(y[1], y[5])};
          }
    });
  } else {
    for_each_units<kColumns, kUnitsTogether>(acc, rows, [&](UnitSums& sums, int unit, int first_row) {
      Before before;
      load_before(linear, to, unit, first_row, rows, before);
      store_scaled(linear, to, sums, tile, unit, first_row, rows, before);
    });
  }
}

// ---- parts of tile rows ----

/// A part of a tile row: of each 64 rows the units of 16 packed rows, and of those two halves of four sums of each thread. An item is kUnitsTogether units of 64 rows.
inline constexpr int kItemWords = kUnitsTogether * 2, kItemsOfRows = 8 / kUnitsTogether;
template <int kColumns>
__device__ __forceinline__ float4* part_of(float* parts, int place) { return reinterpret_cast<float4*>(parts + int64_t{place} * (kTileRows * kColumns)); }
/// This thread's words of an item are 128 apart.
__device__ __forceinline__ float4* item_of(float4* part, int item) { return part + item * (kItemWords * 128) + (thread_here() & 127); }

/// Of a thread's sums in an item, what another block has left of them.
struct LeftItem {
  float4 words[kItemWords];

  __device__ __forceinline__ void load(const float4* from) {
#pragma unroll
    for (int i = 0; i < kItemWords; ++i) words[i] = load_relaxed(from + i * 128);
  }
  /// From shared memory, `step` apart.
  __device__ __forceinline__ void load_shared(const float4* from, int step) {
#pragma unroll
    for (int i = 0; i < kItemWords; ++i) words[i] = from[i * step];
  }
  /// Of a warp: one answer for all, so that the compiler sees that loops which wait do not part it.
  __device__ __forceinline__ bool are_there() const {
    bool there = true;
#pragma unroll
    for (int i = 0; i < kItemWords; ++i) there &= is_there(words[i]);
    return __all_sync(0xffffffffu, there);
  }
  static __device__ __forceinline__ void mark_empty(float4* at) {
    const float nothing = __uint_as_float(kNothing);
#pragma unroll
    for (int i = 0; i < kItemWords; ++i) __stcg(at + i * 128, make_float4(nothing, nothing, nothing, nothing));
  }
  __device__ __forceinline__ void add_to(UnitSums& sums) const {
#pragma unroll
    for (int i = 0; i < kItemWords; ++i) {
      const float values[4] = {words[i].x, words[i].y, words[i].z, words[i].w};
#pragma unroll
      for (int j = 0; j < 4; ++j) sums[i * 4 + j] = __fadd_rn(sums[i * 4 + j], values[j]);
    }
  }
};

/// A tile row of which several blocks have parts. Those that have no tiles behind it add them up, each a share of its items, row block by row block. So a block adds up
/// no tile row but its last, and what it has of another is left long before; of two blocks that share a tile row the first adds it up.
struct SharedTileRow {
  int first = 0, parts = 0;  // the blocks that have parts
  int begin = 0, end = 0;    // this block's items

  SharedTileRow() = default;
  __device__ SharedTileRow(const LinearLayer& linear, int tile, int rows) {
    const uint32_t place = static_cast<uint32_t>(tile) * static_cast<uint32_t>(linear.k_blocks), behind = place + linear.k_blocks, blocks = linear.blocks;
    first = block_of(linear, place, linear.blocks);
    const int last = block_of(linear, behind - 1, linear.blocks), which = static_cast<int>(blockIdx.x) - first;
    parts = last - first + 1;
    const int adders = num_tiles(linear) * static_cast<uint32_t>(last + 1) / blocks > behind ? parts - 1 : parts, items = (rows + 63) / 64 * kItemsOfRows;
    begin = items * which / adders, end = items * (which + 1) / adders;
  }
  __device__ bool is_mine(int row_block, int unit) const {
    const int item = row_block * kItemsOfRows + unit / kUnitsTogether;
    return item >= begin && item < end;
  }
};

/// Leaves a part of a tile row for those that add it up. What this block adds up itself goes to `own`, laid out as a part.
template <int kColumns>
__device__ __forceinline__ void leave_wide(float4* part, WideSums<kColumns>& acc, int rows, const SharedTileRow& shared, float4* own) {
  constexpr int kAll = WideShare<kColumns>::kUnits;
  for_each_units<kColumns, kAll>(acc, rows, [&](const float(&sums)[kAll * 8], int unit, int first_row) {
    const int row_block = first_row / 64, first = row_block * kItemsOfRows + unit / kUnitsTogether;
    float4 *to = item_of(part, first), *kept = item_of(own, first);
#pragma unroll
    for (int u = 0; u < kAll; ++u) {
      const bool stays = shared.is_mine(row_block, unit + u);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float* v = sums + u * 8 + half * 4;
        const float4 words = make_float4(v[0], v[1], v[2], v[3]);
        if (stays) kept[(u * 2 + half) * 128] = words;
        else __stcg(to + (u * 2 + half) * 128, words);
      }
    }
  });
}

/// Shared memory behind a part of its own, in which a thread has items of others on their way.
template <int kColumns>
struct Arriving {
  static constexpr int kSlots = kColumns == 256 ? 4 : 8;
  float4* own;

  __device__ float4* slot(int i) const { return own + kTileRows * kColumns / 4 + i * (kItemWords * kConsumers) + thread_here(); }
};

/// What the first items of a warpgroup are added to, asked for before others are waited for.
inline constexpr int kBefore = 3;
struct FirstBefore {
  Before of[kBefore];
};
__device__ __forceinline__ void load_before_item(const LinearLayer& linear, const Destination& to, int item, int rows, Before& before) {
  load_before(linear, to, item % kItemsOfRows * kUnitsTogether, item / kItemsOfRows * 64, rows, before);
}

/// Adds up this block's share of its last tile row, in the order of K, and marks the places as empty again. All consumers; `own`: what leave_wide kept of this block's own part, where the ring was. Parts of others are
/// copied to shared memory by those threads that add them, several ahead, and asked for again until they are there.
template <int kColumns>
__device__ __forceinline__ void join_wide(const LinearLayer& linear, float* parts, float4* own, int tile, const SharedTileRow& shared, int rows, const Destination& to, FirstBefore& before) {
  using Slots = Arriving<kColumns>;
  constexpr int kSlots = Slots::kSlots;
  const Slots slots{own};
  const int count = shared.parts, end = shared.end, kept = static_cast<int>(blockIdx.x) - shared.first, first_other = kept == 0 ? 1 : 0;
  const auto other = [&](int part, int item) { return item_of(part_of<kColumns>(parts, 2 * (shared.first + part) + (part > 0 ? 0 : 1)), item); };
  int item = shared.begin + warpgroup();
  if (item >= end) return;
  int next_item = item, next_part = first_other, next_slot = 0, slot = 0;  // of what is asked for next; of what comes next
  const auto turn = [](int& which) { which = which + 1 == kSlots ? 0 : which + 1; };
  const auto ask = [&] {
    if (next_item < end) {
      float4* at = slots.slot(next_slot);
      const float4* from = other(next_part, next_item);
#pragma unroll
      for (int i = 0; i < kItemWords; ++i) copy_async(at + i * kConsumers, from + i * 128);
      turn(next_slot);
      if (++next_part == kept) ++next_part;
      if (next_part >= count) next_item += 2, next_part = first_other;
    }
    commit_copies();
  };
  const auto ask_first = [&] {
    next_item = item, next_part = first_other, next_slot = 0;
#pragma unroll 1
    for (int i = 0; i < kSlots; ++i) ask();
  };
  // What others leave only now is waited for here, the last word that this thread adds of each part; otherwise everything would be asked for too early and again, one after the other. Words of others in the block
  // may be marked as empty again already.
  const int last_item = item + (end - 1 - item) / 2 * 2;
  bool late = false;
  ask_first();
#pragma unroll 1
  for (int part = 0; part < count; ++part)
    if (part != kept)
      while (!__all_sync(0xffffffffu, is_there(load_relaxed(other(part, last_item) + (kItemWords - 1) * 128)))) late = true;
  if (late) {
    await_copies<0>();
    ask_first();
  }
#pragma unroll 1
  for (; item < end; item += 2) {
    UnitSums sums;
#pragma unroll
    for (float& sum : sums) sum = -0.0f;  // to which the first part is added without a change
#pragma unroll 1
    for (int part = 0; part < count; ++part) {
      LeftItem left;
      if (part == kept) {
        left.load_shared(item_of(own, item), 128);
      } else {
        float4* from = other(part, item);
        await_copies<kSlots - 1>();
        left.load_shared(slots.slot(slot), kConsumers);
        turn(slot);
        while (!left.are_there()) left.load(from);
        LeftItem::mark_empty(from);
        ask();
      }
      left.add_to(sums);
    }
    store_scaled(linear, to, sums, tile, item % kItemsOfRows * kUnitsTogether, item / kItemsOfRows * 64, rows, before.of[0]);
#pragma unroll
    for (int i = 0; i + 1 < kBefore; ++i) before.of[i] = before.of[i + 1];
    if (item + 2 * kBefore < end) load_before_item(linear, to, item + 2 * kBefore, rows, before.of[kBefore - 1]);
  }
}

/// Whether this block, which has the first part of a tile row, has but one other's to add to it: that of the next block, which has tiles behind it.
__device__ __forceinline__ bool adds_alone(const LinearLayer& linear, int tile) {
  const uint32_t behind = static_cast<uint32_t>(tile + 1) * static_cast<uint32_t>(linear.k_blocks), next = blockIdx.x + 1, blocks = linear.blocks;
  return num_tiles(linear) * (next + 1) / blocks > behind;
}
/// Adds that part, which stands in place `place` and was left before most of this block's tiles came, to the sums of up to 64 rows where they are.
__device__ __forceinline__ void add_left(float* parts, int place, WideSums<64>& acc) {
  using Share = WideShare<64>;
  float4* from = item_of(part_of<64>(parts, place), Share::first_unit(warpgroup()) / kUnitsTogether);
  float4 left[Share::kUnits * 2];
  const auto at = [&](int i) { return from + i * 128; };
  bool there;
  do {
    there = true;
#pragma unroll
    for (int i = 0; i < Share::kUnits * 2; ++i) left[i] = load_relaxed(at(i));
#pragma unroll
    for (int i = 0; i < Share::kUnits * 2; ++i) there = there && is_there(left[i]);
  } while (!__all_sync(0xffffffffu, there));
#pragma unroll
  for (int i = 0; i < Share::kUnits * 2; ++i) {
    const float values[4] = {left[i].x, left[i].y, left[i].z, left[i].w}, nothing = __uint_as_float(kNothing);
#pragma unroll
    for (int j = 0; j < 4; ++j) acc[0][i * 4 + j] = __fadd_rn(acc[0][i * 4 + j], values[j]);
    __stcg(at(i), make_float4(nothing, nothing, nothing, nothing));
  }
}

template <int kColumns, bool kFp8>
__device__ __forceinline__ void multiply_rows(const DecodeArgs& args, const Layout<kColumns, kFp8, false>& layout) {
  const Layout<kColumns, kFp8, false> at = layout.settled();
  const LinearLayer& linear = args.linear;
  DecodeWalk walk(linear);
  const auto ahead = ahead_for<kColumns, kFp8>(args, linear);
  wait_for_predecessors();
  quantise_and_arrive(args, linear, at, ahead);
  RingPlace ring, rows_ring;  // the latter where rows have a ring of their own
  auto* own = reinterpret_cast<float4*>(at.generic);
  SharedTileRow shared;  // that this block adds up
  int last_tile = -1;
  while (walk.left > 0) {
    const int begin = walk.k, count = min(linear.k_blocks - begin, walk.left);
    WideSums<kColumns> acc;
    multiply_wide<kColumns, kFp8>(at, acc, count, args.rows, ring, rows_ring);
    bool whole = count == linear.k_blocks;
    if constexpr (kColumns == 64) {
      if (!whole && begin == 0 && adds_alone(linear, walk.tile)) {
        add_left(args.parts, 2 * (static_cast<int>(blockIdx.x) + 1), acc);
        whole = true;
      }
    }
    if (whole) {
      store_wide<kColumns>(linear, acc, walk.tile, args.rows);
    } else {
      const bool adds = walk.left == count;
      if (adds) {  // what this block adds up itself stays with it, where the ring was
        last_tile = walk.tile;
        shared = SharedTileRow(linear, walk.tile, args.rows);
        consumer_barrier();
      }
      leave_wide<kColumns>(part_of<kColumns>(args.parts, 2 * static_cast<int>(blockIdx.x) + (begin > 0 ? 0 : 1)), acc, args.rows, shared, own);
    }
    walk.left -= count;
    walk.next_tile();
  }
  if (last_tile >= 0) {
    const Destination to(linear, last_tile);
    FirstBefore before;
#pragma unroll
    for (int i = 0; i < kBefore; ++i)
      if (const int item = shared.begin + warpgroup() + 2 * i; item < shared.end) load_before_item(linear, to, item, args.rows, before.of[i]);
    consumer_barrier();
    join_wide<kColumns>(linear, args.parts, own, last_tile, shared, args.rows, to, before);
  }
  if constexpr (kHasHelpers<kColumns>) {
    if (linear.side.weight != nullptr) named_barrier<6, kConsumers + kSideHelpers>();
  } else {
    const SideShare share(linear.side, kFp8 ? linear.k_blocks : linear.k_blocks / 2);
    if (share.is_mine()) side_rows_alone(args, linear, share, SideStages<kColumns, kFp8>{at});
    else side_rows_of_consumers<kColumns, kFp8>(args, linear);
  }
  if constexpr (!kHasHelpers<kColumns>)
    if (copier_finishes(linear)) return;
  consumer_barrier();
  if (threadIdx.x == 0) finish_with(args.arrivals);
}

template <int kColumns, bool kFp8>
__device__ __forceinline__ void run_wide(const DecodeArgs& args) {
  extern __shared__ char raw[];
  const Layout<kColumns, kFp8, false> at(raw, args.stages, 0, 0);
  if constexpr (kHasHelpers<kColumns>) {
    const int warp = static_cast<int>(threadIdx.x) / 32;
    if (warp >= kConsumers / 32) {
      fewer_registers<88>();
      if (warp == kConsumers / 32) {
        copy_tiles(args, at);
      } else {
        await_barriers();
        help(args, at);
      }
    } else {
      more_registers<208>();
      await_barriers();
      multiply_rows(args, at);
    }
  } else {
    if (threadIdx.x == kConsumers) at.init_barriers();
    __syncthreads();
    if (threadIdx.x >= kConsumers) {
      fewer_registers<24>();
      if (threadIdx.x == kConsumers) copy_tiles_and_rows(args, at);
    } else {
      more_registers<240>();
      multiply_rows(args, at);
    }
  }
}

#define QUERN_WIDE(name, columns, fp8)                                                                      \
  extern "C" __global__ void __launch_bounds__(kThreads, 1) name(const __grid_constant__ DecodeArgs args) { \
    run_wide<columns, fp8>(args);                                                                           \
  }

}  // namespace quern::cuda::sm90
