#pragma once

#include "backends/cuda/numeric.cuh"

// How activations become e4m3, wherever that is done: of a row's group of 128 the scale is s = max |x| / 448, at least 1e-10 / 448, and the codes are e4m3(x (448 / max |x|)). Device code only.

namespace quern::cuda {

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

}  // namespace quern::cuda
