#pragma once

#include <array>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>

// Exact conversions between f32 and the small floats of checkpoints and activations (model-spec.md section 3).

namespace quern {

/// Storage of one bfloat16; arithmetic is done in f32.
struct bf16 {
  uint16_t bits;
  friend bool operator==(bf16, bf16) = default;
};

constexpr float to_f32(bf16 x) { return std::bit_cast<float>(static_cast<uint32_t>(x.bits) << 16); }

/// Round to nearest even; NaN stays a quiet NaN.
constexpr bf16 to_bf16(float x) {
  const uint32_t u = std::bit_cast<uint32_t>(x);
  if ((u & 0x7fffffffu) > 0x7f800000u) return bf16{static_cast<uint16_t>((u >> 16) | 0x40u)};
  return bf16{static_cast<uint16_t>((u + 0x7fffu + ((u >> 16) & 1u)) >> 16)};
}

/// f32 rounded to bf16 and widened again.
constexpr float round_bf16(float x) { return to_f32(to_bf16(x)); }

constexpr float f16_to_f32(uint16_t h) {
  const uint32_t sign = static_cast<uint32_t>(h & 0x8000u) << 16;
  const uint32_t exponent = (h >> 10) & 31u, mantissa = h & 0x3ffu;
  if (exponent == 31) return std::bit_cast<float>(sign | 0x7f800000u | (mantissa << 13));
  if (exponent != 0) return std::bit_cast<float>(sign | ((exponent + 112u) << 23) | (mantissa << 13));
  const float value = static_cast<float>(mantissa) * 0x1p-24f;
  return sign ? -value : value;
}

/// Value of one E4M3FN code: no infinities, 0x7F and 0xFF are NaN, largest finite 448, smallest subnormal 2^-9.
constexpr float e4m3_decode(uint8_t code) {
  const int exponent = (code >> 3) & 15, mantissa = code & 7;
  if (exponent == 15 && mantissa == 7) return std::numeric_limits<float>::quiet_NaN();
  float value = exponent == 0 ? static_cast<float>(mantissa) * 0x1p-9f
                              : std::bit_cast<float>(static_cast<uint32_t>((exponent + 120) << 23 | mantissa << 20));
  return code & 0x80 ? -value : value;
}

constexpr std::array<float, 256> make_e4m3_table() {
  std::array<float, 256> table{};
  for (int i = 0; i < 256; ++i) table[i] = e4m3_decode(static_cast<uint8_t>(i));
  return table;
}
/// Value of every E4M3 code.
inline constexpr std::array<float, 256> kE4M3Table = make_e4m3_table();

inline constexpr float kE4M3Max = 448.0f;

/// Round to nearest even, saturate to +-448, NaN stays NaN.
constexpr uint8_t e4m3_encode(float x) {
  const uint32_t u = std::bit_cast<uint32_t>(x);
  const uint8_t sign = static_cast<uint8_t>((u >> 24) & 0x80u);
  const uint32_t magnitude = u & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return sign | 0x7f;
  if (magnitude >= std::bit_cast<uint32_t>(kE4M3Max)) return sign | 0x7e;
  if (magnitude < std::bit_cast<uint32_t>(0x1p-6f)) {  // subnormal: a multiple of 2^-9, and 8 of them are the smallest normal
    const float scaled = std::bit_cast<float>(magnitude) * 0x1p9f;
    const float shifted = scaled + 0x1p23f;            // rounds to an integer, ties to even
    return sign | static_cast<uint8_t>(std::bit_cast<uint32_t>(shifted) & 0xffu);
  }
  const uint32_t rounded = magnitude + 0x7ffffu + ((magnitude >> 20) & 1u);
  const uint32_t code = (rounded >> 20) - (120u << 3);
  return sign | static_cast<uint8_t>(code > 0x7e ? 0x7e : code);
}

constexpr bool e4m3_is_nan(uint8_t code) { return (code & 0x7f) == 0x7f; }

/// E5M2 is the upper byte of f16.
constexpr float e5m2_decode(uint8_t code) { return f16_to_f32(static_cast<uint16_t>(code << 8)); }

}  // namespace quern
