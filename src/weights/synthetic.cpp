#include "weights/synthetic.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <utility>

#include "base/check.h"
#include "base/float_convert.h"
#include "base/hash.h"

// This file is compiled with -O3.

namespace quern::weights {
namespace {

constexpr size_t kLevels = SyntheticTensor::kLevels;
constexpr uint64_t kGolden = 0x9e3779b97f4a7c15ull;

/// The z with P(N(0, 1) < z) = p, by bisection: it runs once per level.
double normal_quantile(double p) {
  double low = -10, high = 10;
  for (int i = 0; i < 80; ++i) {
    const double middle = (low + high) / 2;
    (0.5 * std::erfc(-middle / std::sqrt(2.0)) < p ? low : high) = middle;
  }
  return (low + high) / 2;
}

const std::array<double, kLevels>& normal_levels() {
  static const std::array<double, kLevels> levels = [] {
    std::array<double, kLevels> z{};
    for (size_t i = 0; i < kLevels; ++i) z[i] = normal_quantile((static_cast<double>(i) + 0.5) / kLevels);
    return z;
  }();
  return levels;
}

struct Recipe {
  bool uniform = false;
  double a = 0, b = 1;  // mean and standard deviation, or lower and upper bound
};

Recipe recipe_of(std::string_view name, const Shape& shape) {
  if (name.ends_with("A_log")) return {true, -5.5, -1.0};  // exp: 0.004 .. 0.37
  if (name.ends_with("dt_bias")) return {true, -6.0, 4.0};
  if (name.ends_with("linear_attn.norm.weight")) return {false, 1.0, 0.1};
  if (name.ends_with("conv1d.weight")) return {false, 0.0, 0.4};
  if (name.ends_with("norm.weight") || name.find("norm_") != std::string_view::npos || shape.rank() == 1)
    return {false, 0.0, 0.1};  // y = x (1 + w)
  const double fan_in = std::sqrt(static_cast<double>(std::max<int64_t>(shape[shape.rank() - 1], 1)));
  const bool vocabulary = name == "embed_tokens.weight" || name == "lm_head.weight";
  return {false, 0.0, (vocabulary ? 2.0 : 1.0) / fan_in};
}

const std::array<uint8_t, kLevels>& code_levels() {
  static const std::array<uint8_t, kLevels> codes = [] {
    std::array<uint8_t, kLevels> table{};
    const double largest = normal_levels()[kLevels - 1];
    for (size_t i = 0; i < kLevels; ++i) table[i] = e4m3_encode(static_cast<float>(normal_levels()[i] / largest * kE4M3Max));
    return table;
  }();
  return codes;
}

/// Round to nearest even, to f16; for values that f16 has as normal numbers or near zero.
uint16_t to_f16(float x) {
  const float magnitude = std::fabs(x);
  if (magnitude < 0x1p-14f)
    return static_cast<uint16_t>((std::signbit(x) ? 0x8000 : 0) | static_cast<uint16_t>(std::nearbyint(magnitude * 0x1p24f)));
  const uint32_t u = std::bit_cast<uint32_t>(magnitude), rounded = u + 0xfffu + ((u >> 13) & 1u);
  return static_cast<uint16_t>((std::signbit(x) ? 0x8000 : 0) | ((rounded >> 13) - (112u << 10)));
}

}  // namespace

SyntheticTensor::SyntheticTensor(std::string_view name, const Shape& shape, uint64_t seed)
    : key_(hash_combine(seed, fnv1a(name))), scale_key_(hash_combine(key_, 1)) {
  const Recipe recipe = recipe_of(name, shape);
  for (size_t i = 0; i < kLevels; ++i) {
    const double at = recipe.uniform ? (static_cast<double>(i) + 0.5) / kLevels : normal_levels()[i];
    values_[i] = static_cast<float>(recipe.uniform ? recipe.a + (recipe.b - recipe.a) * at : recipe.a + recipe.b * at);
  }
  base_scale_ = static_cast<float>((recipe.uniform ? 1.0 : recipe.b) * normal_levels()[kLevels - 1] / kE4M3Max);
}

template <class T>
void SyntheticTensor::fill_from(const std::array<T, kLevels>& table, int64_t begin, int64_t count, std::byte* out) const {
  constexpr int64_t kGroup = 8;  // elements of one 64-bit draw
  const auto draw = [&](int64_t group) { return mix64(key_ + static_cast<uint64_t>(group) * kGolden); };
  const auto put = [&](int64_t i, uint64_t bits) {
    const T value = table[(bits >> (8 * static_cast<uint64_t>(i % kGroup))) & 0xff];
    std::memcpy(out + static_cast<size_t>(i - begin) * sizeof(T), &value, sizeof(T));
  };
  const int64_t end = begin + count;
  int64_t i = begin;
  for (; i < end && i % kGroup != 0; ++i) put(i, draw(i / kGroup));
  for (; i + kGroup <= end; i += kGroup) {
    uint64_t bits = draw(i / kGroup);
    std::array<T, kGroup> values;
    for (T& value : values) {
      value = table[bits & 0xff];
      bits >>= 8;
    }
    std::memcpy(out + static_cast<size_t>(i - begin) * sizeof(T), values.data(), sizeof values);
  }
  for (; i < end; ++i) put(i, draw(i / kGroup));
}

void SyntheticTensor::fill(DType dtype, int64_t begin, int64_t count, std::byte* out) const {
  const auto converted = [&](auto&& convert) {
    std::array<decltype(convert(0.0f)), kLevels> table;
    for (size_t i = 0; i < kLevels; ++i) table[i] = convert(values_[i]);
    fill_from(table, begin, count, out);
  };
  switch (dtype) {
    case DType::kF32: return fill_from(values_, begin, count, out);
    case DType::kBF16: return converted(to_bf16);
    case DType::kF16: return converted(to_f16);
    default: CHECK_UNREACHABLE();
  }
}

void SyntheticTensor::fill_codes(int64_t begin, int64_t count, std::byte* out) const { fill_from(code_levels(), begin, count, out); }

float SyntheticTensor::scale(int64_t index) const {
  const uint64_t bits = mix64(scale_key_ + static_cast<uint64_t>(index) * kGolden);
  return round_bf16(base_scale_ * (0.75f + 0.5f * static_cast<float>(bits >> 40) * 0x1p-24f));
}

std::vector<float> SyntheticTensor::scales(int64_t count) const {
  std::vector<float> list(static_cast<size_t>(count));
  for (size_t i = 0; i < list.size(); ++i) list[i] = scale(static_cast<int64_t>(i));
  return list;
}

}  // namespace quern::weights
