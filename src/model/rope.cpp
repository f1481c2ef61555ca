#include "model/rope.h"

#include <algorithm>
#include <cmath>
#include <numbers>

namespace quern::model {
namespace {

/// The (fractional) dimension whose frequency turns `rotations` times over the original window.
double dimension_of(double rotations, const Yarn& yarn, double theta, int64_t rotary_dim) {
  const double window = static_cast<double>(yarn.original_max_position_embeddings);
  return static_cast<double>(rotary_dim) * std::log(window / (rotations * 2 * std::numbers::pi)) / (2 * std::log(theta));
}

}  // namespace

std::vector<float> rope_inv_freq(double theta, int64_t rotary_dim) {
  std::vector<float> inv_freq(static_cast<size_t>(rotary_dim / 2));
  for (size_t i = 0; i < inv_freq.size(); ++i) {
    const float exponent = static_cast<float>(2 * i) / static_cast<float>(rotary_dim);
    inv_freq[i] = 1.0f / std::pow(static_cast<float>(theta), exponent);
  }
  return inv_freq;
}

std::vector<float> yarn_inv_freq(const Yarn& yarn, double theta, int64_t rotary_dim) {
  double low = dimension_of(yarn.beta_fast, yarn, theta, rotary_dim), high = dimension_of(yarn.beta_slow, yarn, theta, rotary_dim);
  if (yarn.truncate) {
    low = std::floor(low);
    high = std::ceil(high);
  }
  low = std::max(low, 0.0);
  high = std::min(high, static_cast<double>(rotary_dim - 1));
  if (low == high) high += 0.001;
  std::vector<float> inv_freq = rope_inv_freq(theta, rotary_dim);
  for (size_t i = 0; i < inv_freq.size(); ++i) {
    const float ramp = std::clamp((static_cast<float>(i) - static_cast<float>(low)) / static_cast<float>(high - low), 0.0f, 1.0f);
    const float kept = 1.0f - ramp;
    inv_freq[i] = inv_freq[i] / static_cast<float>(yarn.factor) * (1.0f - kept) + inv_freq[i] * kept;
  }
  return inv_freq;
}

double yarn_mscale(double factor, double mscale) { return factor <= 1 ? 1.0 : 0.1 * mscale * std::log(factor) + 1.0; }

}  // namespace quern::model
