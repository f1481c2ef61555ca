#pragma once

#include "backends/cuda/linear_sm90.h"
#include "backends/cuda/quantise.cuh"

// Norm and quantisation of a group of 128 activations, held by 16 lanes of 8 each: one order of every sum, wherever it is computed.

namespace quern::cuda::sm90 {

__device__ __forceinline__ float sum16(float v) {
#pragma unroll
  for (int lane = 8; lane > 0; lane /= 2) v = __fadd_rn(v, __shfl_xor_sync(0xffffffffu, v, lane, 16));
  return v;
}
/// Two bf16 and two others, added and rounded.
__device__ __forceinline__ uint32_t add_pair(uint32_t before, uint32_t rounded) {
  return bf16_pair(__uint_as_float(before << 16) + __uint_as_float(rounded << 16),
                   __uint_as_float(before & 0xffff0000u) + __uint_as_float(rounded & 0xffff0000u));
}
/// Of each of kCount groups, in step, so that latencies overlap.
template <int kCount>
__device__ __forceinline__ void square_sums(const uint4 (&groups)[kCount], float (&sums)[kCount]) {
#pragma unroll
  for (int n = 0; n < kCount; ++n) {
    float x[8];
    unpack8(groups[n], x);
    sums[n] = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) sums[n] = __fmaf_rn(x[i], x[i], sums[n]);
  }
#pragma unroll
  for (int lane = 8; lane > 0; lane /= 2)
#pragma unroll
    for (int n = 0; n < kCount; ++n) sums[n] = __fadd_rn(sums[n], __shfl_xor_sync(0xffffffffu, sums[n], lane, 16));
}
/// From the square sums of a row's blocks: lanes of 16 add every sixteenth, then each other's. To be called by whole warps.
__device__ __forceinline__ float inverse_rms(const float* sums, int blocks, float eps) {
  float sum = 0;
  for (int i = static_cast<int>(threadIdx.x) & 15; i < blocks; i += 16) sum = __fadd_rn(sum, sums[i]);
  return rsqrtf(__fmaf_rn(sum16(sum), __fdividef(1.0f, static_cast<float>(128 * blocks)), eps));
}
/// bf16(x * inverse * factor)
__device__ __forceinline__ uint4 normed(const uint4& packed, float inverse, const float4& f0, const float4& f1) {
  float x[8];
  unpack8(packed, x);
  const float factors[8] = {f0.x, f0.y, f0.z, f0.w, f1.x, f1.y, f1.z, f1.w};
#pragma unroll
  for (int i = 0; i < 8; ++i) x[i] = __fmul_rn(__fmul_rn(x[i], inverse), factors[i]);
  return {bf16_pair(x[0], x[1]), bf16_pair(x[2], x[3]), bf16_pair(x[4], x[5]), bf16_pair(x[6], x[7])};
}
/// Of each of kCount groups, in step: s = max |x| / 448; e4m3(x / s).
template <int kCount>
__device__ __forceinline__ void quantise_groups(const uint4 (&groups)[kCount], uint2 (&bytes)[kCount], float (&scales)[kCount]) {
  float most[kCount];
#pragma unroll
  for (int n = 0; n < kCount; ++n) {
    float x[8];
    unpack8(groups[n], x);
    most[n] = 1e-10f;
#pragma unroll
    for (int i = 0; i < 8; ++i) most[n] = fmaxf(most[n], fabsf(x[i]));
  }
#pragma unroll
  for (int lane = 8; lane > 0; lane /= 2)
#pragma unroll
    for (int n = 0; n < kCount; ++n) most[n] = fmaxf(most[n], __shfl_xor_sync(0xffffffffu, most[n], lane, 16));
#pragma unroll
  for (int n = 0; n < kCount; ++n) {
    float x[8];
    unpack8(groups[n], x);
    scales[n] = over_448(most[n]);
    const float inverse = from_448(most[n]);
#pragma unroll
    for (int i = 0; i < 8; ++i) x[i] = __fmul_rn(x[i], inverse);
    bytes[n] = {e4m3_pair(x[0], x[1]) | e4m3_pair(x[2], x[3]) << 16, e4m3_pair(x[4], x[5]) | e4m3_pair(x[6], x[7]) << 16};
  }
}
/// Byte of column byte `at` of row `row` among rows of 128 bytes in the matrix units' order.
__device__ __forceinline__ int swizzled(int row, int at) { return row * kTileRowBytes + (at ^ ((row & 7) << 4)); }

/// A word that another block may just be writing.
__device__ __forceinline__ float load_relaxed(const float* from) {
  float value;
  asm volatile("ld.relaxed.gpu.global.f32 %0, [%1];" : "=f"(value) : "l"(from) : "memory");
  return value;
}
__device__ __forceinline__ float4 load_relaxed(const float4* from) {
  float4 v;
  asm volatile("ld.relaxed.gpu.global.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "l"(from) : "memory");
  return v;
}
/// Whether another block has left a sum there, or all four.
__device__ __forceinline__ bool is_there(float v) { return __float_as_uint(v) != kNothing; }
__device__ __forceinline__ bool is_there(const float4& v) { return is_there(v.x) && is_there(v.y) && is_there(v.z) && is_there(v.w); }
/// What no launch writes, asked for where this stands and not where it is used.
__device__ __forceinline__ float4 load_here(const float4* from) {
  float4 v;
  asm volatile("ld.global.nc.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "l"(from));
  return v;
}
__device__ __forceinline__ uint4 load_row_piece(const void* in, int64_t element) {
  return __ldcg(reinterpret_cast<const uint4*>(static_cast<const __nv_bfloat16*>(in) + element));  // never from an L1 line older than the predecessor
}

// ---- whole rows, by a block ----

__device__ __forceinline__ int64_t source_row(const QuantiseArgs& args, int row) {
  return args.rows_of == nullptr ? row : max(0, __ldg(args.rows_of + row));
}
/// A group of 128 on its way out: lane l's eight columns of block `block` of row `row`, in every form that is asked for.
__device__ __forceinline__ void store_group(const QuantiseArgs& args, int row, int block, int l, const uint4& group, const uint2& bytes, float scale) {
  const int64_t to = args.first_block + block;
  if (args.x8 != nullptr) {
    *reinterpret_cast<uint2*>(static_cast<char*>(args.x8) + (to * args.x_rows + row) * kTileRowBytes + ((l * 8) ^ ((row & 7) << 4))) = bytes;
    if (l == 0) args.x_scale[to * args.x_rows + row] = scale;
  }
  if (args.x16 != nullptr)
    *reinterpret_cast<uint4*>(static_cast<char*>(args.x16) + ((2 * to + (l >> 3)) * args.x_rows + row) * kTileRowBytes + (((l & 7) * 16) ^ ((row & 7) << 4))) = group;
  if (args.out != nullptr) reinterpret_cast<uint4*>(static_cast<__nv_bfloat16*>(args.out) + (int64_t{row} * args.k_blocks + block) * 128)[l] = group;
}
/// Lane l's eight columns of the blocks first, first + step, ... below `end`.
template <int kCount>
__device__ __forceinline__ void store_groups(const QuantiseArgs& args, int row, int first, int step, int end, int l, const uint4 (&groups)[kCount]) {
  uint2 bytes[kCount];
  float scales[kCount];
  quantise_groups(groups, bytes, scales);
#pragma unroll
  for (int n = 0; n < kCount; ++n)
    if (first + n * step < end) store_group(args, row, first + n * step, l, groups[n], bytes[n], scales[n]);
}

/// Row `row` by kThreads threads, of which this is `thread`; `sums` [k_blocks]. Up to kMaxNormWidth columns.
template <int kThreads>
__device__ __forceinline__ void norm_row(const QuantiseArgs& args, int row, int thread, float* sums, const auto& barrier) {
  constexpr int kHalves = kThreads / 16, kCount = kMaxNormWidth / 128 / kHalves, kFirst = kCount > 4 ? 5 : kCount;  // those of 5,120 columns, and what wider rows have besides
  const int half = thread >> 4, l = thread & 15, blocks = args.k_blocks;
  const int64_t from = source_row(args, row) * args.in_stride + l * 8;
  uint4 x[kCount];
  float square[kCount];
#pragma unroll
  for (int n = 0; n < kCount; ++n) x[n] = half + n * kHalves < blocks ? load_row_piece(args.in, from + (half + n * kHalves) * 128) : uint4{};
  square_sums(x, square);
#pragma unroll
  for (int n = 0; n < kCount; ++n)
    if (l == 0 && half + n * kHalves < blocks) sums[half + n * kHalves] = square[n];
  struct Factors {
    float4 low, high;
  };
  const auto factors_of = [&](int n) {
    const auto* factors = reinterpret_cast<const float4*>(args.norm + min(half + n * kHalves, blocks - 1) * 128 + l * 8);
    return Factors{__ldg(factors), __ldg(factors + 1)};
  };
  constexpr int kEarly = kThreads == 128 ? kFirst : 0;  // factors that are asked for before all have come so far, where there are registers
  Factors early[kEarly > 0 ? kEarly : 1];
#pragma unroll
  for (int n = 0; n < kEarly; ++n) early[n] = factors_of(n);
  barrier();
  const float inverse = inverse_rms(sums, blocks, args.eps);
  const auto finish = [&]<int kFrom, int kTo>() {
    uint4 y[kTo - kFrom];
#pragma unroll
    for (int n = kFrom; n < kTo; ++n) {
      auto [low, high] = n < kEarly ? early[n < kEarly ? n : 0] : factors_of(n);
      if (args.norm_offset != 0) {
        low = {low.x + args.norm_offset, low.y + args.norm_offset, low.z + args.norm_offset, low.w + args.norm_offset};
        high = {high.x + args.norm_offset, high.y + args.norm_offset, high.z + args.norm_offset, high.w + args.norm_offset};
      }
      y[n - kFrom] = normed(x[n], inverse, low, high);
    }
    store_groups(args, row, half + kFrom * kHalves, kHalves, blocks, l, y);
  };
  finish.template operator()<0, kFirst>();
  if constexpr (kFirst < kCount)
    if (kFirst * kHalves < blocks) finish.template operator()<kFirst, kCount>();
}

/// The factors that a thread of kThreads needs for any row. They are asked for where this stands, before it is known that the rows are there.
template <int kThreads>
struct RowFactors {
  static constexpr int kHalves = kThreads / 16, kCount = kMaxNormWidth / 128 / kHalves;
  float4 low[kCount], high[kCount];

  RowFactors() = default;
  __device__ RowFactors(const float* norm, int blocks, int thread) {
#pragma unroll
    for (int n = 0; n < kCount; ++n)
      if (const int block = (thread >> 4) + n * kHalves; block < blocks) {
        const auto* from = reinterpret_cast<const float4*>(norm + block * 128 + (thread & 15) * 8);
        low[n] = load_here(from), high[n] = load_here(from + 1);
      }
  }
};
/// As norm_row, with factors that are there, for all of a row at once.
template <int kThreads>
__device__ __forceinline__ void norm_row(const QuantiseArgs& args, int row, int thread, float* sums, const RowFactors<kThreads>& factors, const auto& barrier) {
  constexpr int kHalves = kThreads / 16, kCount = RowFactors<kThreads>::kCount;
  const int half = thread >> 4, l = thread & 15, blocks = args.k_blocks;
  const int64_t from = source_row(args, row) * args.in_stride + l * 8;
  uint4 x[kCount];
  float square[kCount];
#pragma unroll
  for (int n = 0; n < kCount; ++n) x[n] = half + n * kHalves < blocks ? load_row_piece(args.in, from + (half + n * kHalves) * 128) : uint4{};
  square_sums(x, square);
#pragma unroll
  for (int n = 0; n < kCount; ++n)
    if (l == 0 && half + n * kHalves < blocks) sums[half + n * kHalves] = square[n];
  barrier();
  const float inverse = inverse_rms(sums, blocks, args.eps);
#pragma unroll
  for (int n = 0; n < kCount; ++n) x[n] = half + n * kHalves < blocks ? normed(x[n], inverse, factors.low[n], factors.high[n]) : uint4{};
  store_groups(args, row, half, kHalves, blocks, l, x);
}

/// The groups first, first + step, ... of rows without norm, counted row by row. The two halves of a warp have neighbours.
__device__ __forceinline__ void quantise_groups_of_rows(const QuantiseArgs& args, int rows, int first, int step) {
  constexpr int kCount = 4;
  const int l = threadIdx.x & 15, blocks = args.k_blocks, total = rows * blocks;
  for (; (first & ~1) < total; first += kCount * step) {
    uint4 x[kCount];
    uint2 bytes[kCount];
    float scales[kCount];
#pragma unroll
    for (int n = 0; n < kCount; ++n) {
      const int group = first + n * step, row = group / blocks;
      x[n] = group < total ? load_row_piece(args.in, row * args.in_stride + (group - row * blocks) * 128 + l * 8) : uint4{};
    }
    quantise_groups(x, bytes, scales);
#pragma unroll
    for (int n = 0; n < kCount; ++n) {
      const int group = first + n * step, row = group / blocks;
      if (group < total) store_group(args, row, group - row * blocks, l, x[n], bytes[n], scales[n]);
    }
  }
}

/// The same where a half-warp has many: the next are asked for before those at hand are quantised.
__device__ __forceinline__ void quantise_many_groups_of_rows(const QuantiseArgs& args, int rows, int first, int step) {
  constexpr int kCount = 4;
  struct Groups {
    uint4 x[kCount];
    int row[kCount], block[kCount];
  };
  const int l = threadIdx.x & 15, blocks = args.k_blocks, step_rows = step / blocks, step_blocks = step - step_rows * blocks;
  int row = first / blocks, block = first - row * blocks;
  const auto load = [&](Groups& groups) {
#pragma unroll
    for (int n = 0; n < kCount; ++n) {
      groups.row[n] = row, groups.block[n] = block;
      groups.x[n] = row < rows ? load_row_piece(args.in, row * args.in_stride + block * 128 + l * 8) : uint4{};
      row += step_rows, block += step_blocks;
      if (block >= blocks) block -= blocks, ++row;
    }
  };
  Groups groups;
  load(groups);
  while (__any_sync(0xffffffffu, groups.row[0] < rows)) {
    Groups next;
    load(next);
    uint2 bytes[kCount];
    float scales[kCount];
    quantise_groups(groups.x, bytes, scales);
#pragma unroll
    for (int n = 0; n < kCount; ++n)
      if (groups.row[n] < rows) store_group(args, groups.row[n], groups.block[n], l, groups.x[n], bytes[n], scales[n]);
    groups = next;
  }
}

/// Blocks [begin, end) of row `row`, which needs no norm.
template <int kThreads>
__device__ __forceinline__ void quantise_row(const QuantiseArgs& args, int row, int begin, int end) {
  constexpr int kHalves = kThreads / 16, kCount = 2;
  const int half = threadIdx.x >> 4, l = threadIdx.x & 15;
  const int64_t from = source_row(args, row) * args.in_stride + l * 8;
  for (int first = begin; first < end; first += kCount * kHalves) {
    uint4 x[kCount];
#pragma unroll
    for (int n = 0; n < kCount; ++n) {
      const int block = first + n * kHalves + half;
      x[n] = block < end ? load_row_piece(args.in, from + block * 128) : uint4{};
    }
    store_groups(args, row, first + half, kHalves, end, l, x);
  }
}

}  // namespace quern::cuda::sm90
