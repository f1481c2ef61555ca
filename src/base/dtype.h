#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string_view>

namespace quern {

/// Element types, with the names that safetensors headers use.
enum class DType : uint8_t { kF32, kBF16, kF16, kE4M3, kE5M2, kI64, kI32, kU8, kBool };

constexpr size_t dtype_size(DType dtype) {
  switch (dtype) {
    case DType::kF32: case DType::kI32: return 4;
    case DType::kBF16: case DType::kF16: return 2;
    case DType::kI64: return 8;
    case DType::kE4M3: case DType::kE5M2: case DType::kU8: case DType::kBool: return 1;
  }
  return 0;
}

/// Our spelling, for messages and logs: "f32", "bf16", "e4m3", ...
std::string_view dtype_name(DType dtype);
/// safetensors' spelling: "F32", "BF16", "F8_E4M3", ...
std::string_view safetensors_name(DType dtype);
std::optional<DType> dtype_from_safetensors(std::string_view name);

}  // namespace quern
