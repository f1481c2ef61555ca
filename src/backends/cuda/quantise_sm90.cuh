#pragma once

#include "backends/cuda/async.cuh"
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
/// Of each of four values, as sum16: lane l of 16 gets that of value l / 4. Lanes halve what they add in each of the first two steps.
__device__ __forceinline__ float sum16_of_four(const float (&v)[4]) {
  const bool upper = (threadIdx.x & 8) != 0, odd = (threadIdx.x & 4) != 0;
  const float a = __fadd_rn(upper ? v[2] : v[0], __shfl_xor_sync(0xffffffffu, upper ? v[0] : v[2], 8, 16));
  const float b = __fadd_rn(upper ? v[3] : v[1], __shfl_xor_sync(0xffffffffu, upper ? v[1] : v[3], 8, 16));
  float sum = __fadd_rn(odd ? b : a, __shfl_xor_sync(0xffffffffu, odd ? a : b, 4, 16));
  sum = __fadd_rn(sum, __shfl_xor_sync(0xffffffffu, sum, 2, 16));
  return __fadd_rn(sum, __shfl_xor_sync(0xffffffffu, sum, 1, 16));
}
/// A lane's share of a group's square sum.
__device__ __forceinline__ float square_sum(const uint4& group) {
  float x[8], sum = 0;
  unpack8(group, x);
#pragma unroll
  for (int i = 0; i < 8; ++i) sum = __fmaf_rn(x[i], x[i], sum);
  return sum;
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
/// Of kRows rows, `blocks` sums each, at most 16 kMost. To be called by whole warps.
template <int kMost, int kRows>
__device__ __forceinline__ void inverse_rms_of_rows(float (&inverse)[kRows], const float* sums, int blocks, float eps) {
  const int l = static_cast<int>(threadIdx.x) & 15;
  const float part = __fdividef(1.0f, static_cast<float>(128 * blocks));
  float v[kRows] = {};
#pragma unroll
  for (int i = 0; i < kMost; ++i)
#pragma unroll
    for (int row = 0; row < kRows; ++row)
      if (l + 16 * i < blocks) v[row] = __fadd_rn(v[row], sums[row * blocks + l + 16 * i]);
  if constexpr (kRows == 4) {
    const float of_lane = rsqrtf(__fmaf_rn(sum16_of_four(v), part, eps));
#pragma unroll
    for (int row = 0; row < 4; ++row) inverse[row] = __shfl_sync(0xffffffffu, of_lane, row * 4, 16);
  } else {
#pragma unroll
    for (int row = 0; row < kRows; ++row) inverse[row] = rsqrtf(__fmaf_rn(sum16(v[row]), part, eps));
  }
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
/// max |x| of two pairs of bf16, place by place, with a sign that is nobody's.
__device__ __forceinline__ uint32_t max_magnitudes(uint32_t a, uint32_t b) {
  uint32_t most;
  asm("max.xorsign.abs.bf16x2 %0, %1, %2;" : "=r"(most) : "r"(a), "r"(b));
  return most;
}
/// As quantise_groups, the same bits for fewer instructions: `scales` of group 4 i + l / 4 in lane l of 16.
template <int kCount>
__device__ __forceinline__ void quantise_by_fours(const uint4 (&groups)[kCount], uint2 (&bytes)[kCount], float (&scales)[(kCount + 3) / 4]) {
  const bool upper = (threadIdx.x & 8) != 0, odd = (threadIdx.x & 4) != 0;
#pragma unroll
  for (int first = 0; first < kCount; first += 4) {
    uint32_t most[4];
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      const uint4 x = groups[min(first + n, kCount - 1)];
      most[n] = max_magnitudes(max_magnitudes(x.x, x.y), max_magnitudes(x.z, x.w));
    }
    const uint32_t low = max_magnitudes(__byte_perm(most[0], most[1], 0x5410), __byte_perm(most[0], most[1], 0x7632));   // of groups 0 and 1
    const uint32_t high = max_magnitudes(__byte_perm(most[2], most[3], 0x5410), __byte_perm(most[2], most[3], 0x7632));  // 2 and 3
    uint32_t mine = max_magnitudes(upper ? high : low, __shfl_xor_sync(0xffffffffu, upper ? low : high, 8, 16));
    mine = max_magnitudes(mine, __shfl_xor_sync(0xffffffffu, mine, 4, 16));
    mine = max_magnitudes(mine, __shfl_xor_sync(0xffffffffu, mine, 2, 16));
    mine = max_magnitudes(mine, __shfl_xor_sync(0xffffffffu, mine, 1, 16));
    const float of_group = fmaxf(1e-10f, fabsf(__uint_as_float(odd ? mine & 0xffff0000u : mine << 16))), inverse = from_448(of_group);
    scales[first / 4] = over_448(of_group);
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      if (first + n >= kCount) continue;
      const float of = __shfl_sync(0xffffffffu, inverse, n * 4, 16);
      float x[8];
      unpack8(groups[first + n], x);
#pragma unroll
      for (int i = 0; i < 8; ++i) x[i] = __fmul_rn(x[i], of);
      bytes[first + n] = {e4m3_pair(x[0], x[1]) | e4m3_pair(x[2], x[3]) << 16, e4m3_pair(x[4], x[5]) | e4m3_pair(x[6], x[7]) << 16};
    }
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
  const int to = args.first_block + block;
  const auto place = [&](int of) { return static_cast<uint32_t>(of * args.x_rows + row); };  // rows of 128 bytes: products of 64 bits are many instructions
  if (args.x8 != nullptr) {
    *reinterpret_cast<uint2*>(static_cast<char*>(args.x8) + int64_t{place(to)} * kTileRowBytes + ((l * 8) ^ ((row & 7) << 4))) = bytes;
    if (l == 0) args.x_scale[place(to)] = scale;
  }
  if (args.x16 != nullptr)
    *reinterpret_cast<uint4*>(static_cast<char*>(args.x16) + int64_t{place(2 * to + (l >> 3))} * kTileRowBytes + (((l & 7) * 16) ^ ((row & 7) << 4))) = group;
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
  barrier();
  const float inverse = inverse_rms(sums, blocks, args.eps);
  const auto finish = [&]<int kFrom, int kTo>() {
    uint4 y[kTo - kFrom];
#pragma unroll
    for (int n = kFrom; n < kTo; ++n) {
      auto [low, high] = factors_of(n);
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

/// What kThreads threads need besides rows, each for its columns of any row: the factors of a norm, or the places of the groups that it takes of rows without. It is asked for and computed where this
/// stands, before it is known that the rows are there.
template <int kThreads>
struct RowsAhead {
  static constexpr int kHalves = kThreads / 16, kCount = kMaxNormWidth / 128 / kHalves, kGroups = 5;
  float4 low[kCount], high[kCount];
  const char* from[kGroups];
  int row[kGroups], block[kGroups];  // of rows without a norm; -1: none

  RowsAhead() = default;
  /// The first row of this block has place `row` of `in`.
  __device__ static RowsAhead of_norm(const QuantiseArgs& args, int row, int thread) {
    RowsAhead ahead;
    const int half = thread >> 4, l = thread & 15;
    ahead.from[0] = static_cast<const char*>(args.in) + (row * args.in_stride + half * 128 + l * 8) * 2;
    asm volatile("" : "+l"(ahead.from[0]));  // computed here
#pragma unroll
    for (int n = 0; n < kCount; ++n)
      if (const int block = half + n * kHalves; block < args.k_blocks) {
        const auto* factors = reinterpret_cast<const float4*>(args.norm + block * 128 + l * 8);
        ahead.low[n] = load_here(factors), ahead.high[n] = load_here(factors + 1);
      }
    return ahead;
  }
  /// The groups first, first + step, ... of `rows` rows, counted row by row: the first kGroups of them.
  __device__ static RowsAhead of_groups(const QuantiseArgs& args, int rows, int first, int step, int thread) {
    RowsAhead ahead;
    const int l = thread & 15, blocks = args.k_blocks;
#pragma unroll
    for (int n = 0; n < kGroups; ++n) {
      const int group = first + n * step, row = group / blocks;
      ahead.row[n] = row < rows ? row : -1;
      ahead.block[n] = group - row * blocks;
      ahead.from[n] = static_cast<const char*>(args.in) + (row * args.in_stride + ahead.block[n] * 128 + l * 8) * 2;
      asm volatile("" : "+l"(ahead.from[n]), "+r"(ahead.row[n]), "+r"(ahead.block[n]));
    }
    return ahead;
  }
};
__device__ __forceinline__ uint4 load_piece(const char* from) { return __ldcg(reinterpret_cast<const uint4*>(from)); }  // never from an L1 line older than the predecessor

/// As store_group, of decode rows, and without the scale.
__device__ __forceinline__ void store_decode_group(const QuantiseArgs& args, int row, int block, int l, const uint4& group, const uint2& bytes) {
  if (args.x8 != nullptr)
    *reinterpret_cast<uint2*>(static_cast<char*>(args.x8) + static_cast<uint32_t>((block * args.x_rows + row) * kTileRowBytes + ((l * 8) ^ ((row & 7) << 4)))) = bytes;
  if (args.x16 != nullptr)
    *reinterpret_cast<uint4*>(static_cast<char*>(args.x16) + static_cast<uint32_t>(((2 * block + (l >> 3)) * args.x_rows + row) * kTileRowBytes + (((l & 7) * 16) ^ ((row & 7) << 4)))) = group;
}
__device__ __forceinline__ void store_decode_scale(const QuantiseArgs& args, int row, int block, float scale) {
  if (args.x8 != nullptr) args.x_scale[static_cast<uint32_t>(block * args.x_rows + row)] = scale;
}
/// As norm_row, with factors that are there, for all of a row at once. `from`: this thread's columns of its first group.
template <int kThreads>
__device__ __forceinline__ void norm_row(const QuantiseArgs& args, int row, const char* from, int thread, float* sums, const RowsAhead<kThreads>& ahead, const auto& barrier) {
  constexpr int kHalves = kThreads / 16, kCount = RowsAhead<kThreads>::kCount;
  static_assert(kCount == 4);
  const int half = thread >> 4, l = thread & 15, blocks = args.k_blocks;
  uint4 x[kCount];
  float square[kCount];
#pragma unroll
  for (int n = 0; n < kCount; ++n) x[n] = half + n * kHalves < blocks ? load_piece(from + n * kHalves * 256) : uint4{};
#pragma unroll
  for (int n = 0; n < kCount; ++n) square[n] = square_sum(x[n]);
  const float sum = sum16_of_four(square);
  const int mine = half + (l >> 2) * kHalves;
  if ((l & 3) == 0 && mine < blocks) sums[mine] = sum;
  barrier();
  float inverse[1];
  inverse_rms_of_rows<kCount>(inverse, sums, blocks, args.eps);
#pragma unroll
  for (int n = 0; n < kCount; ++n) x[n] = half + n * kHalves < blocks ? normed(x[n], inverse[0], ahead.low[n], ahead.high[n]) : uint4{};
  uint2 bytes[kCount];
  float scale[1];
  quantise_by_fours(x, bytes, scale);
#pragma unroll
  for (int n = 0; n < kCount; ++n)
    if (half + n * kHalves < blocks) store_decode_group(args, row, half + n * kHalves, l, x[n], bytes[n]);
  if ((l & 3) == 0 && mine < blocks) store_decode_scale(args, row, mine, scale[0]);
}
/// Quantises the groups that `ahead` knows.
template <int kThreads>
__device__ __forceinline__ void quantise_groups_ahead(const QuantiseArgs& args, int thread, const RowsAhead<kThreads>& ahead) {
  constexpr int kCount = RowsAhead<kThreads>::kGroups;
  const int l = thread & 15;
  uint4 x[kCount];
#pragma unroll
  for (int n = 0; n < kCount; ++n) x[n] = ahead.row[n] >= 0 ? load_piece(ahead.from[n]) : uint4{};
#pragma unroll
  for (int first = 0; first < kCount; first += 4) {
    if (!__any_sync(0xffffffffu, ahead.row[first] >= 0)) break;
    constexpr int kLast = kCount - 1;
    const uint4 group[4] = {x[first], x[min(first + 1, kLast)], x[min(first + 2, kLast)], x[min(first + 3, kLast)]};
    uint2 bytes[4];
    float scale[1];
    quantise_by_fours(group, bytes, scale);
#pragma unroll
    for (int n = 0; n < 4; ++n)
      if (first + n < kCount && ahead.row[min(first + n, kLast)] >= 0) store_decode_group(args, ahead.row[first + n], ahead.block[first + n], l, group[n], bytes[n]);
#pragma unroll
    for (int n = 0; n < 4; ++n)
      if (first + n < kCount && l == n * 4 && ahead.row[min(first + n, kLast)] >= 0) store_decode_scale(args, ahead.row[first + n], ahead.block[first + n], scale[0]);
  }
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
/// As norm_row, with factors that are there.
template <int kThreads>
__device__ __forceinline__ void norm_row(const QuantiseArgs& args, int row, int thread, float* sums, const RowFactors<kThreads>& factors, const auto& barrier) {
  constexpr int kHalves = kThreads / 16, kCount = RowFactors<kThreads>::kCount, kFirst = kCount > 4 ? 5 : kCount;  // as there
  const int half = thread >> 4, l = thread & 15, blocks = args.k_blocks;
  const auto* from = static_cast<const __nv_bfloat16*>(args.in) + source_row(args, row) * args.in_stride + half * 128 + l * 8;
  uint4 x[kCount];
  float square[kCount];
#pragma unroll
  for (int n = 0; n < kCount; ++n) x[n] = half + n * kHalves < blocks ? load_row_piece(from, n * kHalves * 128) : uint4{};
  square_sums(x, square);
#pragma unroll
  for (int n = 0; n < kCount; ++n)
    if (l == 0 && half + n * kHalves < blocks) sums[half + n * kHalves] = square[n];
  barrier();
  const float inverse = inverse_rms(sums, blocks, args.eps);
  const auto finish = [&]<int kFrom, int kTo>() {
    uint4 y[kTo - kFrom];
#pragma unroll
    for (int n = kFrom; n < kTo; ++n) y[n - kFrom] = half + n * kHalves < blocks ? normed(x[n], inverse, factors.low[n], factors.high[n]) : uint4{};
    store_groups(args, row, half + kFrom * kHalves, kHalves, blocks, l, y);
  };
  finish.template operator()<0, kFirst>();
  if constexpr (kFirst < kCount)
    if (kFirst * kHalves < blocks) finish.template operator()<kFirst, kCount>();
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

/// The share that block `block` of `grid` has of such groups, counted along the rows of one block of K after the other, where a half-warp of kThreads threads has many. They come to shared memory, all on their way
/// at once: `slot(i)` are 16 bytes of this thread, of `slots`. Of kThreads / 16 rows or more.
template <int kThreads>
__device__ __forceinline__ void quantise_many_groups_of_rows(const QuantiseArgs& args, int rows, int block, int grid, int slots, const auto& slot) {
  constexpr int kHalves = kThreads / 16, kCount = 6;
  struct Place {
    int index, k, row;
    __device__ void advance(int num_rows) {
      index += kHalves, row += kHalves;
      if (row >= num_rows) row -= num_rows, ++k;
    }
  };
  const int half = static_cast<int>(threadIdx.x) >> 4, l = threadIdx.x & 15, total = rows * args.k_blocks;
  const int begin = total * block / grid, end = total * (block + 1) / grid, first = begin + half;
  Place at{first, first / rows, first % rows};
  const char* in = static_cast<const char*>(args.in) + l * 16;
  const int row_bytes = static_cast<int>(args.in_stride) * 2;
  for (int left = (end - begin - (half & ~1) + kHalves - 1) / kHalves; left > 0;) {  // of a warp
    const int batches = min((left + kCount - 1) / kCount, slots / kCount);
    Place ask = at;
#pragma unroll 1
    for (int b = 0; b < batches; ++b) {
#pragma unroll
      for (int n = 0; n < kCount; ++n) {
        if (ask.index < end) copy_async(slot(b * kCount + n), in + int64_t{ask.row} * row_bytes + ask.k * 256);
        ask.advance(rows);
      }
      commit_copies();
    }
#pragma unroll 1
    for (int b = 0; b < batches; ++b) {
      if (batches - b > 2) await_copies<2>();
      else if (batches - b == 2) await_copies<1>();
      else await_copies<0>();
      uint4 x[kCount];
      uint2 bytes[kCount];
      float scales[kCount];
#pragma unroll
      for (int n = 0; n < kCount; ++n) x[n] = *slot(b * kCount + n);  // of groups that there are not whatever was there
      quantise_groups(x, bytes, scales);
#pragma unroll
      for (int n = 0; n < kCount; ++n) {
        if (at.index < end) store_group(args, at.row, at.k, l, x[n], bytes[n], scales[n]);
        at.advance(rows);
      }
    }
    left -= batches * kCount;
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
