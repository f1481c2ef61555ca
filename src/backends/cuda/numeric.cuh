#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <cstdint>

#include "base/dtype.h"

// Element conversions, the pointwise functions of the model and sums in a fixed order, all in f32. Device code only.

namespace quern::cuda {

using quern::DType;

constexpr unsigned kAllLanes = 0xffffffffu;

__device__ inline float e4m3_to_f32(uint8_t code) {
  const __half_raw half = __nv_cvt_fp8_to_halfraw(code, __NV_E4M3);
  return __half2float(half);
}
/// Round to nearest even, saturate to +-448.
__device__ inline uint8_t f32_to_e4m3(float x) { return __nv_cvt_float_to_fp8(x, __NV_SATFINITE, __NV_E4M3); }

/// Eight neighbouring elements of bf16, widened.
__device__ __forceinline__ void unpack8(const uint4& packed, float (&x)[8]) {
  const uint32_t words[4] = {packed.x, packed.y, packed.z, packed.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    x[2 * i] = __uint_as_float(words[i] << 16);
    x[2 * i + 1] = __uint_as_float(words[i] & 0xffff0000u);
  }
}
/// Two floats as neighbouring elements of bf16.
__device__ __forceinline__ uint32_t bf16_pair(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&pair);
}

/// Element i of an array of `dtype`.
__device__ inline float load(const void* data, DType dtype, int64_t i) {
  switch (dtype) {
    case DType::kF32: return static_cast<const float*>(data)[i];
    case DType::kBF16: return __bfloat162float(static_cast<const __nv_bfloat16*>(data)[i]);
    case DType::kF16: return __half2float(static_cast<const __half*>(data)[i]);
    case DType::kE4M3: return e4m3_to_f32(static_cast<const uint8_t*>(data)[i]);
    default: return __int_as_float(0x7fc00000);
  }
}
__device__ inline void store(void* data, DType dtype, int64_t i, float x) {
  if (dtype == DType::kBF16)
    static_cast<__nv_bfloat16*>(data)[i] = __float2bfloat16_rn(x);
  else
    static_cast<float*>(data)[i] = x;
}
/// x as `dtype` (f32 or bf16) would hold it.
__device__ inline float round_to(DType dtype, float x) { return dtype == DType::kBF16 ? __bfloat162float(__float2bfloat16_rn(x)) : x; }

__device__ inline float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }
__device__ inline float silu(float x) { return x / (1.0f + expf(-x)); }
__device__ inline float softplus(float x) { return x > 20.0f ? x : log1pf(expf(x)); }

/// Sum over the lanes of a warp, in every lane; the order is a tree and always the same.
__device__ inline float warp_sum(float x) {
  for (int distance = 16; distance > 0; distance /= 2) x += __shfl_xor_sync(kAllLanes, x, distance);
  return x;
}
__device__ inline float warp_max(float x) {
  for (int distance = 16; distance > 0; distance /= 2) x = fmaxf(x, __shfl_xor_sync(kAllLanes, x, distance));
  return x;
}

/// Sum over a block of kThreads, in every thread; the order is fixed. `shared` holds kThreads / 32 floats and is free afterwards.
template <int kThreads>
__device__ float block_sum(float x, float* shared) {
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  x = warp_sum(x);
  __syncthreads();
  if (lane == 0) shared[warp] = x;
  __syncthreads();
  float sum = 0;
  for (int i = 0; i < kThreads / 32; ++i) sum += shared[i];
  return sum;
}

}  // namespace quern::cuda
