#pragma once

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>

#include "base/float_convert.h"

namespace quern::cpu {

/// The bytes of the bf16 of every positive e4m3 code, for byte permutations. A constant: code of a file for one instruction set must not run before the
/// processor was asked.
struct alignas(64) E4m3Bytes {
  std::array<uint8_t, 128> low{}, high{};
  consteval E4m3Bytes() {
    for (size_t code = 0; code < 128; ++code) {
      const uint32_t bits = std::bit_cast<uint32_t>(kE4M3Table[code]) >> 16;
      low[code] = static_cast<uint8_t>(bits);
      high[code] = static_cast<uint8_t>(bits >> 8);
    }
  }
};
inline constexpr E4m3Bytes kE4m3Bytes;

}  // namespace quern::cpu
