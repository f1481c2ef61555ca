#pragma once

#include <cstdint>

// Sums in one fixed order. Term i goes to lane i mod 16, lanes are added as a balanced tree: the compiler may vectorize this without
// leave to reorder floating point, and bits depend on the length of a sum only.

namespace quern::cpu {

inline constexpr int64_t kLanes = 16;

inline float sum_lanes(const float* lanes) {
  float a[8], b[4];
  for (int i = 0; i < 8; ++i) a[i] = lanes[i] + lanes[i + 8];
  for (int i = 0; i < 4; ++i) b[i] = a[i] + a[i + 4];
  return (b[0] + b[2]) + (b[1] + b[3]);
}

/// lanes[i mod 16] += a[i] * b[i]
inline void accumulate_dot(const float* a, const float* b, int64_t n, float* lanes) {
  int64_t i = 0;
  float sum[kLanes];
  for (int64_t l = 0; l < kLanes; ++l) sum[l] = lanes[l];
  for (; i + kLanes <= n; i += kLanes)
    for (int64_t l = 0; l < kLanes; ++l) sum[l] += a[i + l] * b[i + l];
  for (int64_t l = 0; i + l < n; ++l) sum[l] += a[i + l] * b[i + l];
  for (int64_t l = 0; l < kLanes; ++l) lanes[l] = sum[l];
}

/// sum_i a[i] * b[i]
inline float dot(const float* a, const float* b, int64_t n) {
  float lanes[kLanes] = {};
  accumulate_dot(a, b, n, lanes);
  return sum_lanes(lanes);
}

}  // namespace quern::cpu
