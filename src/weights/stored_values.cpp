#include "weights/stored_values.h"

#include <array>
#include <cmath>
#include <cstring>

#include "base/float_convert.h"

namespace quern::weights {
namespace {

/// Where the exponent (for e4m3: exponent and mantissa) is all ones, adding its lowest bit carries into the sign's place.
struct LanePattern {
  uint64_t mask, add, carry;
};
constexpr LanePattern lane_pattern(DType dtype) {
  switch (dtype) {
    case DType::kE4M3: return {0x7f7f7f7f7f7f7f7f, 0x0101010101010101, 0x8080808080808080};
    case DType::kBF16: return {0x7f807f807f807f80, 0x0080008000800080, 0x8000800080008000};
    case DType::kF16: return {0x7c007c007c007c00, 0x0400040004000400, 0x8000800080008000};
    case DType::kF32: return {0x7f8000007f800000, 0x0080000000800000, 0x8000000080000000};
    default: return {};
  }
}

uint64_t carries(const std::byte* at, size_t size, const LanePattern& p) {
  uint64_t word = 0;
  std::memcpy(&word, at, size);
  return ((word & p.mask) + p.add) & p.carry;
}

}  // namespace

std::optional<size_t> find_non_finite(std::span<const std::byte> bytes, DType dtype) {
  const LanePattern pattern = lane_pattern(dtype);
  if (pattern.mask == 0) return std::nullopt;
  constexpr size_t kChunk = 4096, kWord = sizeof(uint64_t);
  for (size_t chunk = 0; chunk < bytes.size(); chunk += kChunk) {
    const size_t end = std::min(chunk + kChunk, bytes.size());
    uint64_t any = 0;
    size_t i = chunk;
    for (; i + kWord <= end; i += kWord) any |= carries(&bytes[i], kWord, pattern);
    if (i < end) any |= carries(&bytes[i], end - i, pattern);
    if (any == 0) continue;
    const size_t element = dtype_size(dtype);
    for (i = chunk; i < end; i += element)
      if (carries(&bytes[i], element, pattern) != 0) return i / element;
  }
  return std::nullopt;
}

void widen(const std::byte* source, DType dtype, size_t count, float* out) {
  const auto each = [&]<class T>(T /*type*/, auto&& convert) {
    for (size_t i = 0; i < count; ++i) {
      T stored;
      std::memcpy(&stored, source + i * sizeof(T), sizeof(T));
      out[i] = convert(stored);
    }
  };
  switch (dtype) {
    case DType::kF32: std::memcpy(out, source, count * sizeof(float)); return;
    case DType::kBF16: return each(bf16{}, [](bf16 x) { return to_f32(x); });
    case DType::kF16: return each(uint16_t{}, [](uint16_t x) { return f16_to_f32(x); });
    default: CHECK_UNREACHABLE();
  }
}

Result<std::vector<float>> read_scales(const TensorRef& ref, size_t begin, size_t count) {
  const DType dtype = ref.tensor->dtype.value_or(DType::kU8);
  if (dtype != DType::kF32 && dtype != DType::kBF16 && dtype != DType::kF16) {
    return invalid_argument("{}: a scale stored as {} is not supported, only F32, BF16 and F16", ref.name, ref.tensor->dtype_text);
  }
  std::vector<float> values(count);
  widen(ref.bytes().data() + begin * dtype_size(dtype), dtype, count, values.data());
  for (size_t i = 0; i < count; ++i) {
    if (!std::isfinite(values[i])) return invalid_argument("{}: element {} is {}", ref.name, begin + i, values[i]);
  }
  return values;
}

Result<std::vector<float>> read_scales(const TensorRef& ref) {
  return read_scales(ref, 0, static_cast<size_t>(ref.tensor->shape.num_elements()));
}

}  // namespace quern::weights
