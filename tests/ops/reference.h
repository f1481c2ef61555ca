#pragma once

#include <cmath>
#include <vector>

// What each op computes, in double precision and without any rounding between steps; written for reading, from model-spec.md.

namespace quern::ops::testing {

using Vector = std::vector<double>;

inline double sigmoid(double x) { return 1.0 / (1.0 + std::exp(-x)); }
inline double silu(double x) { return x * sigmoid(x); }
inline double softplus(double x) { return x > 20 ? x : std::log1p(std::exp(x)); }

inline double dot(const double* a, const double* b, size_t n) {
  double sum = 0;
  for (size_t i = 0; i < n; ++i) sum += a[i] * b[i];
  return sum;
}

/// x / rms(x) * (offset + weight); offset is 1 for the zero-centred norms.
inline Vector rms_norm(const Vector& x, const Vector& weight, double eps, double offset) {
  const double factor = 1.0 / std::sqrt(dot(x.data(), x.data(), x.size()) / static_cast<double>(x.size()) + eps);
  Vector y(x.size());
  for (size_t i = 0; i < x.size(); ++i) y[i] = x[i] * factor * (offset + weight[i]);
  return y;
}

/// W x, W [out, x.size()]
inline Vector multiply(const Vector& w, const Vector& x) {
  Vector y(x.empty() ? 0 : w.size() / x.size());
  for (size_t n = 0; n < y.size(); ++n) y[n] = dot(w.data() + n * x.size(), x.data(), x.size());
  return y;
}

inline Vector row(const Vector& x, size_t i, size_t width) {
  return {x.begin() + static_cast<std::ptrdiff_t>(i * width), x.begin() + static_cast<std::ptrdiff_t>((i + 1) * width)};
}

/// Rotates the first 2 * inv_freq.size() elements; position and frequency are multiplied in f32, as the model does.
inline void rotate(double* x, const std::vector<float>& inv_freq, const std::vector<int>& position_of_frequency) {
  const size_t half = inv_freq.size();
  for (size_t i = 0; i < half; ++i) {
    const double angle = static_cast<float>(position_of_frequency[i]) * inv_freq[i];
    const double a = x[i], b = x[i + half];
    x[i] = a * std::cos(angle) - b * std::sin(angle);
    x[i + half] = b * std::cos(angle) + a * std::sin(angle);
  }
}

/// Gated DeltaNet of one sequence by the plain recurrence (model-spec.md 1.6), one token after the other.
struct GdnReference {
  size_t nk, nv, dk, dv;
  std::vector<int> k_head;
  Vector conv1d;  // [channels, 4]
  Vector a_log, dt_bias, norm;
  double eps = 1e-6;

  std::vector<Vector> columns = {};  // raw qkv of all tokens so far
  Vector state = {};                 // [nv, dk, dv]

  Vector next(const Vector& qkv, const Vector& z, const Vector& b, const Vector& a) {
    const size_t channels = 2 * nk * dk + nv * dv;
    if (state.empty()) state.assign(nv * dk * dv, 0.0);
    columns.push_back(qkv);
    Vector y(channels);
    for (size_t c = 0; c < channels; ++c) {
      double sum = 0;
      for (size_t tap = 0; tap < 4; ++tap)
        if (columns.size() + tap >= 4) sum += conv1d[c * 4 + tap] * columns[columns.size() + tap - 4][c];
      y[c] = silu(sum);
    }
    const auto normalized = [&](size_t first) {
      Vector x(y.begin() + static_cast<std::ptrdiff_t>(first), y.begin() + static_cast<std::ptrdiff_t>(first + dk));
      const double factor = 1.0 / std::sqrt(dot(x.data(), x.data(), dk) + 1e-6);
      for (double& value : x) value *= factor;
      return x;
    };
    Vector out;
    for (size_t head = 0; head < nv; ++head) {
      const auto kh = static_cast<size_t>(k_head[head]);
      const Vector q = normalized(kh * dk), k = normalized(nk * dk + kh * dk);
      const double* v = y.data() + 2 * nk * dk + head * dv;
      double* s = state.data() + head * dk * dv;
      const double decay = std::exp(-std::exp(a_log[head]) * softplus(a[head] + dt_bias[head])), beta = sigmoid(b[head]);
      for (size_t i = 0; i < dk * dv; ++i) s[i] *= decay;
      Vector o(dv, 0.0);
      for (size_t c = 0; c < dv; ++c) {
        double predicted = 0;
        for (size_t i = 0; i < dk; ++i) predicted += s[i * dv + c] * k[i];
        for (size_t i = 0; i < dk; ++i) s[i * dv + c] += beta * k[i] * (v[c] - predicted);
        for (size_t i = 0; i < dk; ++i) o[c] += s[i * dv + c] * q[i] / std::sqrt(static_cast<double>(dk));
      }
      const Vector normed = rms_norm(o, norm, eps, 0.0);
      for (size_t c = 0; c < dv; ++c) out.push_back(normed[c] * silu(z[head * dv + c]));
    }
    return out;
  }
};

}  // namespace quern::ops::testing
