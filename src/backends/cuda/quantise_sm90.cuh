#pragma once

#include <cuda_bf16.h>
#include <cuda_fp8.h>

#include "backends/cuda/linear_sm90.h"

// Norm, quantisation and the side rows of a group of 128 activations, held by 16 lanes of 8 each: one order of every sum, wherever it is computed.

namespace quern::cuda::sm90 {

__device__ __forceinline__ float sum16(float v) {
#pragma unroll
  for (int lane = 8; lane > 0; lane /= 2) v = __fadd_rn(v, __shfl_xor_sync(0xffffffffu, v, lane, 16));
  return v;
}
__device__ __forceinline__ void unpack8(const uint4& packed, float (&x)[8]) {
  const uint32_t words[4] = {packed.x, packed.y, packed.z, packed.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    x[2 * i] = __uint_as_float(words[i] << 16);
    x[2 * i + 1] = __uint_as_float(words[i] & 0xffff0000u);
  }
}
__device__ __forceinline__ uint32_t bf16_pair(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&pair);
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
__device__ __forceinline__ uint32_t e4m3_pair(float low, float high) {
  return __nv_cvt_float2_to_fp8x2(make_float2(low, high), __NV_SATFINITE, __NV_E4M3);
}
// The quotients of quantisation, rounded as IEEE's: ties are common, and an approximation would break them at random. Divisions as such would branch, which keeps those
// of several groups from overlapping. (Equal for all that bf16 holds from 1e-10 on, and for every mantissa, whichever neighbour the reciprocal is.)

/// x / 448
__device__ __forceinline__ float over_448(float x) {
  constexpr float kReciprocal = 1.0f / 448.0f;
  const float quotient = __fmul_rn(x, kReciprocal);
  return __fmaf_rn(__fmaf_rn(-quotient, 448.0f, x), kReciprocal, quotient);
}
/// 448 / x for x >= 1e-10
__device__ __forceinline__ float from_448(float x) {
  const uint32_t bits = __float_as_uint(x);
  const float mantissa = __uint_as_float((bits & 0x007fffffu) | 0x3f800000u);
  float reciprocal;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(reciprocal) : "f"(mantissa));
  reciprocal = __fmaf_rn(reciprocal, __fmaf_rn(-mantissa, reciprocal, 1.0f), reciprocal);
  const float quotient = __fmul_rn(448.0f, reciprocal);
  return __uint_as_float(__float_as_uint(__fmaf_rn(__fmaf_rn(-quotient, mantissa, 448.0f), reciprocal, quotient)) - ((bits & 0x7f800000u) - 0x3f800000u));
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
__device__ __forceinline__ float dot8_lane(const uint4& a, const uint4& b) {
  float x[8], y[8], sum = 0;
  unpack8(a, x);
  unpack8(b, y);
#pragma unroll
  for (int i = 0; i < 8; ++i) sum = __fmaf_rn(x[i], y[i], sum);
  return sum;
}
__device__ __forceinline__ float dot8(const uint4& a, const uint4& b) { return sum16(dot8_lane(a, b)); }
template <int kDistance>
__device__ __forceinline__ void scatter(float (&values)[16], int l) {
  const bool upper = (l & kDistance) != 0;
#pragma unroll
  for (int i = 0; i < kDistance; ++i) {
    const float keep = upper ? values[i + kDistance] : values[i], give = upper ? values[i] : values[i + kDistance];
    values[i] = __fadd_rn(keep, __shfl_xor_sync(0xffffffffu, give, kDistance, 16));
  }
}
/// sum16 of 16 values at once: lane l of 16 gets that of values[l]. Lanes pair up in the same order, so the bits are sum16's.
__device__ __forceinline__ float sum16_scattered(float (&values)[16]) {
  const int l = static_cast<int>(threadIdx.x) & 15;
  scatter<8>(values, l);
  scatter<4>(values, l);
  scatter<2>(values, l);
  scatter<1>(values, l);
  return values[0];
}
/// Byte of column byte `at` of row `row` among rows of 128 bytes in the matrix units' order.
__device__ __forceinline__ int swizzled(int row, int at) { return row * kTileRowBytes + (at ^ ((row & 7) << 4)); }

/// Eight columns, the ones of lane l of 16, of block `block` (of `blocks`) of a side row.
__device__ __forceinline__ uint4 side_weight(const SideRows& side, int weight_row, int block, int blocks, int l) {
  const bool is_b = weight_row < side.num_b;
  const int row = is_b ? weight_row : weight_row - side.num_b, packed_row = row / 16 * 16 + row % 2 * 8 + row % 16 / 2;
  const auto* tile = static_cast<const char*>(side.weight) + ((is_b ? 0 : 2 * blocks) + 2 * block + (l >> 3)) * kTileBytes;
  return __ldg(reinterpret_cast<const uint4*>(tile + swizzled(packed_row, (l & 7) * 16)));
}
__device__ __forceinline__ void store_side(const SideRows& side, int weight_row, int row, const float* sums, int blocks) {
  float sum = 0;
#pragma unroll 8
  for (int i = 0; i < blocks; ++i) sum = __fadd_rn(sum, sums[i]);
  if (weight_row < side.num_b) static_cast<__nv_bfloat16*>(side.b)[int64_t{row} * side.num_b + weight_row] = __float2bfloat16_rn(sum);
  else static_cast<__nv_bfloat16*>(side.a)[int64_t{row} * side.num_a + weight_row - side.num_b] = __float2bfloat16_rn(sum);
}
__device__ __forceinline__ uint4 load_row_piece(const void* in, int64_t element) {
  return __ldcg(reinterpret_cast<const uint4*>(static_cast<const __nv_bfloat16*>(in) + element));  // never from an L1 line older than the predecessor
}

// ---- whole rows, by a block ----

__device__ __forceinline__ int64_t source_row(const QuantiseArgs& args, int row) {
  return args.rows_of == nullptr ? row : max(0, __ldg(args.rows_of + row));
}
/// Stores lane l's eight columns of the blocks first, first + step, ... below `end` in every form that is asked for.
template <int kCount>
__device__ __forceinline__ void store_groups(const QuantiseArgs& args, int row, int first, int step, int end, int l, const uint4 (&groups)[kCount]) {
  uint2 bytes[kCount];
  float scales[kCount];
  quantise_groups(groups, bytes, scales);
#pragma unroll
  for (int n = 0; n < kCount; ++n) {
    const int block = first + n * step;
    if (block >= end) continue;
    const int64_t to = args.first_block + block;
    if (args.x8 != nullptr) {
      *reinterpret_cast<uint2*>(static_cast<char*>(args.x8) + (to * args.x_rows + row) * kTileRowBytes + ((l * 8) ^ ((row & 7) << 4))) = bytes[n];
      if (l == 0) args.x_scale[to * args.x_rows + row] = scales[n];
    }
    if (args.x16 != nullptr)
      *reinterpret_cast<uint4*>(static_cast<char*>(args.x16) + ((2 * to + (l >> 3)) * args.x_rows + row) * kTileRowBytes + (((l & 7) * 16) ^ ((row & 7) << 4))) =
          groups[n];
    if (args.out != nullptr) reinterpret_cast<uint4*>(static_cast<__nv_bfloat16*>(args.out) + (int64_t{row} * args.k_blocks + block) * 128)[l] = groups[n];
  }
}

/// Row `row` by kThreads threads; `sums` [k_blocks]. Up to kMaxNormWidth columns.
template <int kThreads>
__device__ __forceinline__ void norm_row(const QuantiseArgs& args, int row, float* sums, const auto& barrier) {
  constexpr int kHalves = kThreads / 16, kCount = kMaxNormWidth / 128 / kHalves;
  const int half = threadIdx.x >> 4, l = threadIdx.x & 15, blocks = args.k_blocks;
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
  for (int n = 0; n < kCount; ++n) {
    const auto* factors = reinterpret_cast<const float4*>(args.norm + min(half + n * kHalves, blocks - 1) * 128 + l * 8);
    float4 low = __ldg(factors), high = __ldg(factors + 1);
    if (args.norm_offset != 0) {
      low = {low.x + args.norm_offset, low.y + args.norm_offset, low.z + args.norm_offset, low.w + args.norm_offset};
      high = {high.x + args.norm_offset, high.y + args.norm_offset, high.z + args.norm_offset, high.w + args.norm_offset};
    }
    x[n] = normed(x[n], inverse, low, high);
  }
  store_groups(args, row, half, kHalves, blocks, l, x);
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
