#include <algorithm>
#include <limits>

#include "backends/cpu/numeric.h"
#include "backends/cpu/vector_math.h"

// VectorMath in portable loops, which the compiler vectorizes for the baseline of the architecture.

namespace quern::cpu {

namespace {

void dots(const float* a, int64_t a_stride, int64_t rows, const float* b, int64_t b_stride, int64_t columns, int64_t length, float* out,
          int64_t out_stride) {
  for (int64_t row = 0; row < rows; ++row)
    for (int64_t column = 0; column < columns; ++column)
      out[row * out_stride + column] = dot(a + row * a_stride, b + column * b_stride, length);
}

void add_products(const float* factors, int64_t row_step, int64_t term_step, int64_t rows, const float* terms, int64_t term_stride,
                  int64_t num_terms, int64_t width, float* out, int64_t out_stride) {
  for (int64_t row = 0; row < rows; ++row)
    for (int64_t j = 0; j < num_terms; ++j) {
      const float factor = factors[row * row_step + j * term_step];
      const float* term = terms + j * term_stride;
      float* sum = out + row * out_stride;
      for (int64_t i = 0; i < width; ++i) sum[i] += factor * term[i];
    }
}

float max(const float* x, int64_t n) {
  float result = -std::numeric_limits<float>::infinity();
  for (int64_t i = 0; i < n; ++i) result = std::max(result, x[i]);
  return result;
}

float exp_minus(float* x, int64_t n, float shift) {
  float sum = 0;
  for (int64_t i = 0; i < n; ++i) {
    x[i] = std::exp(x[i] - shift);
    sum += x[i];
  }
  return sum;
}

void round(DType dtype, float factor, float* x, int64_t n) {
  for (int64_t i = 0; i < n; ++i) x[i] = factor * round_to(dtype, x[i]);
}

void multiply_silu(DType dtype, float* x, const float* z, int64_t n) {
  for (int64_t i = 0; i < n; ++i) x[i] *= round_to(dtype, silu(z[i]));
}

void gate(DType dtype, float* x, float factor, const float* gate, int64_t n) {
  for (int64_t i = 0; i < n; ++i) x[i] = round_to(dtype, x[i] * factor) * round_to(dtype, sigmoid(gate[i]));
}

void convolve(const std::byte* const* columns, DType dtype, const float* taps, int64_t tap_stride, int64_t n, float* y) {
  constexpr int64_t kPiece = 64;
  std::fill_n(y, n, 0.0f);
  for (int64_t tap = 0; tap < 4; ++tap) {
    if (columns[tap] == nullptr) continue;
    const float* w = taps + tap * tap_stride;
    for (int64_t i = 0; i < n; i += kPiece) {
      float raw[kPiece];
      const int64_t m = std::min(kPiece, n - i);
      load_f32(columns[tap] + static_cast<size_t>(i) * dtype_size(dtype), dtype, m, raw);
      for (int64_t c = 0; c < m; ++c) y[i + c] += w[i + c] * raw[c];
    }
  }
  for (int64_t i = 0; i < n; ++i) y[i] = round_to(dtype, silu(y[i]));
}

constexpr VectorMath kPlainMath{
    .load = load_f32,
    .store = store_f32,
    .round = round,
    .dots = dots,
    .add_products = add_products,
    .max = max,
    .exp_minus = exp_minus,
    .rms_norm = rms_norm,
    .multiply_silu = multiply_silu,
    .gate = gate,
    .convolve = convolve,
};

}  // namespace

const VectorMath& plain_math() { return kPlainMath; }

}  // namespace quern::cpu
