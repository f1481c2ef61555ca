#include "weights/encode_fp8.h"

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

[[gnu::always_inline]] inline float find_largest(const float* values, size_t size) {
  uint32_t largest = 0;  // of non-negative floats, the bits order as the values do
  for (size_t i = 0; i < size; ++i) largest = std::max(largest, std::bit_cast<uint32_t>(values[i]) & 0x7fffffffu);
  return std::bit_cast<float>(largest);
}

[[gnu::always_inline]] inline void encode(const float* values, size_t size, float scale, uint8_t* codes) {
  for (size_t i = 0; i < size; ++i) codes[i] = encode_bounded(values[i] / scale);
}

#if defined(__x86_64__)
[[gnu::target("avx2")]] float find_largest_avx2(const float* values, size_t size) { return find_largest(values, size); }
[[gnu::target("avx2")]] void encode_avx2(const float* values, size_t size, float scale, uint8_t* codes) {
  encode(values, size, scale, codes);
}
const bool kHasAvx2 = __builtin_cpu_supports("avx2") != 0;
#endif

}  // namespace

float largest_magnitude(const float* values, size_t size) {
#if defined(__x86_64__)
  if (kHasAvx2) return find_largest_avx2(values, size);
#endif
  return find_largest(values, size);
}

void encode_e4m3(const float* values, size_t size, float scale, uint8_t* codes) {
#if defined(__x86_64__)
  if (kHasAvx2) return encode_avx2(values, size, scale, codes);
#endif
  encode(values, size, scale, codes);
}

float quantize_row_fp8(const float* row, size_t size, uint8_t* codes) {
  const float scale = std::max(largest_magnitude(row, size) / kE4M3Max, std::numeric_limits<float>::min());
  encode_e4m3(row, size, scale, codes);
  return scale;
}

float stored_scale(float largest) {
  return largest == 0 ? 1.0f : std::max(round_bf16(largest / kE4M3Max), std::numeric_limits<float>::min());
}

}  // namespace quern::weights
