#pragma once

#include "backends/cuda/mma.cuh"
#include "backends/cuda/numeric.cuh"

// Tiles of keys and values in shared memory, for the attention kernels on matrix units. Device code only.

namespace quern::cuda {

constexpr int kDim = 256, kPieces = kDim / 8;  // of 16 bytes, in a row of bf16
constexpr int kKeys = 64;                      // of a tile: one KV block
constexpr int kTileBytes = kKeys * kDim * 2;

/// exp(x - max), where max may be that of no key at all.
__device__ inline float weight(float x, float max) { return x == -INFINITY ? 0.0f : expf(x - max); }

/// Rows [begin, end) of a block of keys or values to a bf16 tile in which `place(row, piece)` is the byte offset of 16 bytes; the others are zero, since what stands in their place may be no
/// number. By kThreads threads, of which this is number `thread`; what is not e4m3 arrives with the thread's asynchronous copies.
template <int kThreads, class Place>
__device__ void load_tile(unsigned char* tile, const Place& place, int thread, const void* cache, DType dtype, int64_t first_element, int begin, int end) {
  if (dtype == DType::kBF16) {
    const auto* from = static_cast<const unsigned char*>(cache) + first_element * 2;
    for (int item = thread; item < kKeys * kPieces; item += kThreads) {
      const int row = item / kPieces, piece = item % kPieces;
      unsigned char* to = tile + place(row, piece);
      if (row >= begin && row < end)
        copy_async(to, from + item * 16);
      else
        *reinterpret_cast<uint4*>(to) = make_uint4(0, 0, 0, 0);
    }
  } else {
    const auto* from = static_cast<const unsigned char*>(cache) + first_element;
    for (int item = thread; item < kKeys * kPieces / 2; item += kThreads) {
      const int row = item / (kPieces / 2), pair = item % (kPieces / 2);
      uint32_t wide[8] = {};
      if (row >= begin && row < end) {
        const uint4 bits = *reinterpret_cast<const uint4*>(from + item * 16);
        const uint32_t words[] = {bits.x, bits.y, bits.z, bits.w};
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          const auto codes = static_cast<__nv_fp8x2_storage_t>(words[i / 2] >> (i % 2 * 16));
          const float2 two = __half22float2(__half2(__nv_cvt_fp8x2_to_halfraw2(codes, __NV_E4M3)));
          wide[i] = bf16_pair(two.x, two.y);
        }
      }
      *reinterpret_cast<uint4*>(tile + place(row, 2 * pair)) = make_uint4(wide[0], wide[1], wide[2], wide[3]);
      *reinterpret_cast<uint4*>(tile + place(row, 2 * pair + 1)) = make_uint4(wide[4], wide[5], wide[6], wide[7]);
    }
  }
}

}  // namespace quern::cuda
