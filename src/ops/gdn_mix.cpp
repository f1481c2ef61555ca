#include "ops/gdn_mix.h"

#include <algorithm>
#include <bit>
#include <cstring>

#include "base/check.h"

namespace quern::ops {

namespace {

constexpr uint32_t kMagnitude = 0x7fffffff;

template <class Convert>
void each_head(std::span<float> state, int64_t head_size, const Convert& convert) {
  const auto size = static_cast<size_t>(head_size);
  CHECK(size > 0 && state.size() % size == 0);
  std::vector<uint16_t> halves(2 * size);
  for (size_t first = 0; first < state.size(); first += size) convert(state.subspan(first, size), halves);
}

}  // namespace

void to_layout(GdnStateLayout layout, std::span<float> state, int64_t head_size) {
  if (layout == GdnStateLayout::kF32) return;
  each_head(state, head_size, [](std::span<float> head, std::vector<uint16_t>& halves) {
    for (size_t i = 0; i < head.size(); ++i) {
      const auto bits = std::bit_cast<uint32_t>(head[i]);
      const uint32_t rounded = std::min((bits & kMagnitude) + 0x8000, kMagnitude) | (bits & ~kMagnitude);
      halves[i] = static_cast<uint16_t>(rounded >> 16);
      halves[head.size() + i] = static_cast<uint16_t>(bits);
    }
    std::memcpy(head.data(), halves.data(), head.size_bytes());
  });
}

void from_layout(GdnStateLayout layout, std::span<float> state, int64_t head_size) {
  if (layout == GdnStateLayout::kF32) return;
  each_head(state, head_size, [](std::span<float> head, std::vector<uint16_t>& halves) {
    std::memcpy(halves.data(), head.data(), head.size_bytes());
    for (size_t i = 0; i < head.size(); ++i) {
      const auto lower = static_cast<uint32_t>(static_cast<int16_t>(halves[head.size() + i]));  // its sign goes on
      head[i] = std::bit_cast<float>((uint32_t{halves[i]} << 16) + lower);
    }
  });
}

}  // namespace quern::ops
