#pragma once

#include "backends/cuda/gdn_prompt.cuh"
#include "backends/cuda/ptx_sm90.cuh"

// What the kernels for prompt rows of GDN layers on Hopper share. Device code only.

namespace quern::cuda {

/// Image row of a chunk's row, and column of a matrix's column: the blocks of 16 stand in reverse order, so that what a lower triangular matrix [64, 64] leaves of a block of 16 columns is a
/// prefix of the rows, and of registers.
__device__ __forceinline__ int reversed(int row) { return row ^ 48; }

/// silu within a few ulps, before it is rounded to bf16.
__device__ __forceinline__ float silu_of(float x) {
  float power, result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(x * -1.4426950408889634f));
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(1.0f + power));
  return x * result;
}

__device__ __forceinline__ uint4 pack_eight(const float (&x)[8]) { return make_uint4(bf16_pair(x[0], x[1]), bf16_pair(x[2], x[3]), bf16_pair(x[4], x[5]), bf16_pair(x[6], x[7])); }

/// Eight raw channels of kCount rows from row `first` of a chunk on, which may stand before it.
template <int kCount>
__device__ __forceinline__ void load_raw(uint4 (&raw)[kCount], const GdnArgs& g, const Tile& t, int first, int channel, int channels) {
  if (t.base + first >= t.cursor && first + kCount <= t.rows) {
    const uint16_t* from = static_cast<const uint16_t*>(g.qkv) + (int64_t{t.first_row} + t.base + first - t.cursor) * channels + channel;
#pragma unroll
    for (int r = 0; r < kCount; ++r) raw[r] = *reinterpret_cast<const uint4*>(from + int64_t{r} * channels);
    return;
  }
#pragma unroll 1
  for (int r = 0; r < kCount; ++r) {
    const int index = t.base + first + r, window = 3 + g.k_max + 1;
    uint4 words = {0, 0, 0, 0};
    if (index >= 0 && first + r < t.rows) {
      const void* from = index >= t.cursor ? g.qkv : g.conv_window;
      const int64_t row = index >= t.cursor ? int64_t{t.first_row} + index - t.cursor : int64_t{t.slot} * window + index % window;
      words = *reinterpret_cast<const uint4*>(static_cast<const uint16_t*>(from) + row * channels + channel);
    }
#pragma unroll
    for (int i = 0; i < kCount; ++i)
      if (i == r) raw[i] = words;
  }
}
/// The taps of eight channels.
__device__ __forceinline__ void load_taps(float (&weight)[4][8], const GdnArgs& g, int channel, int channels) {
#pragma unroll
  for (int tap = 0; tap < 4; ++tap)
#pragma unroll
    for (int i = 0; i < 8; i += 4) *reinterpret_cast<float4*>(&weight[tap][i]) = *reinterpret_cast<const float4*>(g.conv + int64_t{tap} * channels + channel + i);
}
/// The conv of eight channels: x holds the raw columns of the row and of the three before it, tap 0 at place `oldest`.
__device__ __forceinline__ void convolve(float (&y)[8], const float (&weight)[4][8], const float (&x)[4][8], int oldest) {
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    float sum = 0;
#pragma unroll
    for (int tap = 0; tap < 4; ++tap) sum = fmaf(weight[tap][i], x[(oldest + tap) % 4][i], sum);
    y[i] = silu_of(sum);
  }
}

/// Four 8 x 8 matrices of 16-bit elements to shared memory, as load_matrices reads them; and each transposed.
__device__ __forceinline__ void store_matrices(uint32_t address, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}
__device__ __forceinline__ void store_matrices_transposed(uint32_t address, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}

}  // namespace quern::cuda
