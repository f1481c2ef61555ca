#include "weights/runtime_fp8.h"

#include <algorithm>
#include <bit>
#include <limits>

#include "base/float_convert.h"

// This file is compiled with -O3: its loops are free of branches so that they become vector instructions. Every operation is exact or
// rounded once, so wider vectors give the same bits.

namespace quern::weights {
namespace {

/// e4m3_encode without its cases for NaN and for values above 448.
[[gnu::always_inline]] inline uint8_t encode_bounded(float x) {
  const uint32_t u = std::bit_cast<uint32_t>(x), magnitude = u & 0x7fffffffu;
  const uint32_t normal = ((magnitude + 0x7ffffu + ((magnitude >> 20) & 1u)) >> 20) - (120u << 3);
  const uint32_t subnormal = std::bit_cast<uint32_t>(std::bit_cast<float>(magnitude) * 0x1p9f + 0x1p23f) & 0xffu;
  const uint32_t is_subnormal = 0u - static_cast<uint32_t>(magnitude < std::bit_cast<uint32_t>(0x1p-6f));
  const uint32_t code = (subnormal & is_subnormal) | (normal & ~is_subnormal);
  return static_cast<uint8_t>(std::min(code, 0x7eu) | ((u >> 24) & 0x80u));
}

[[gnu::always_inline]] inline float quantize(const float* row, size_t size, uint8_t* codes) {
  uint32_t largest = 0;  // of non-negative floats, the bits order as the values do
  for (size_t i = 0; i < size; ++i) largest = std::max(largest, std::bit_cast<uint32_t>(row[i]) & 0x7fffffffu);
  const float scale = std::max(std::bit_cast<float>(largest) / kE4M3Max, std::numeric_limits<float>::min());
  for (size_t i = 0; i < size; ++i) codes[i] = encode_bounded(row[i] / scale);
  return scale;
}

#if defined(__x86_64__)
[[gnu::target("avx2")]] float quantize_avx2(const float* row, size_t size, uint8_t* codes) { return quantize(row, size, codes); }
const bool kHasAvx2 = __builtin_cpu_supports("avx2") != 0;
#endif

}  // namespace

float quantize_row_fp8(const float* row, size_t size, uint8_t* codes) {
#if defined(__x86_64__)
  if (kHasAvx2) return quantize_avx2(row, size, codes);
#endif
  return quantize(row, size, codes);
}

}  // namespace quern::weights
