#pragma once

#include <cstdint>

// e4m3 codes as bf16, exactly and with few instructions on every architecture: bits are moved to where bf16 has them, which leaves exponents 120 too low. Device code only.

namespace quern::cuda {

__device__ __forceinline__ uint32_t times_2_120(uint32_t pair) {
  uint32_t result;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(result) : "r"(pair), "r"(0x7b807b80u), "r"(0x80008000u));
  return result;
}
/// Of four codes, none of which is NaN, those in bytes 0 and 2, and those in bytes 1 and 3.
__device__ __forceinline__ uint32_t even_codes(uint32_t word) { return times_2_120((word << 4 & 0x07f007f0u) | (word << 8 & 0x80008000u)); }
__device__ __forceinline__ uint32_t odd_codes(uint32_t word) { return times_2_120((word >> 4 & 0x07f007f0u) | (word & 0x80008000u)); }

/// Eight codes in their order; NaN stays NaN.
__device__ __forceinline__ uint4 widened(uint32_t first, uint32_t second) {
  uint32_t pairs[4];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const uint32_t word = __byte_perm(i == 0 ? first : second, 0, 0x3120);  // 0 and 1 become even, 2 and 3 odd
    pairs[2 * i] = even_codes(word);
    pairs[2 * i + 1] = odd_codes(word);
    if (const uint32_t nan = ((word & 0x7f7f7f7fu) + 0x01010101u) & 0x80808080u; nan != 0) {
      pairs[2 * i] |= (nan >> 7 & 0x00010001u) * 0x7fc0u;
      pairs[2 * i + 1] |= (nan >> 15 & 0x00010001u) * 0x7fc0u;
    }
  }
  return make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
}

}  // namespace quern::cuda
