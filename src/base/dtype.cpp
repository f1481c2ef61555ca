#include "base/dtype.h"

#include <array>

#include "base/check.h"

namespace quern {
namespace {

struct Names {
  DType dtype;
  std::string_view ours, safetensors;
};
constexpr std::array kNames = {
    Names{DType::kF32, "f32", "F32"},      Names{DType::kBF16, "bf16", "BF16"},     Names{DType::kF16, "f16", "F16"},
    Names{DType::kE4M3, "e4m3", "F8_E4M3"}, Names{DType::kE5M2, "e5m2", "F8_E5M2"}, Names{DType::kI64, "i64", "I64"},
    Names{DType::kI32, "i32", "I32"},      Names{DType::kU8, "u8", "U8"},           Names{DType::kBool, "bool", "BOOL"},
};

}  // namespace

std::string_view dtype_name(DType dtype) {
  for (const Names& n : kNames)
    if (n.dtype == dtype) return n.ours;
  CHECK_UNREACHABLE();
}

std::string_view safetensors_name(DType dtype) {
  for (const Names& n : kNames)
    if (n.dtype == dtype) return n.safetensors;
  CHECK_UNREACHABLE();
}

std::optional<DType> dtype_from_safetensors(std::string_view name) {
  for (const Names& n : kNames)
    if (n.safetensors == name) return n.dtype;
  return std::nullopt;
}

}  // namespace quern
