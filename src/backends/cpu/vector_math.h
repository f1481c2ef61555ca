#pragma once

#include <cstddef>
#include <cstdint>

#include "backends/cpu/packed_linear.h"
#include "base/dtype.h"

// Loops over f32 rows, once in portable code and once per vector instruction set. The vector versions come from one source
// (vector_loops.h): 16 lanes wherever a sum is split, one fused multiply-add a term, their own exp. So all of them give the same bits
// ("cpu.fma"); the portable ones round each product and call the C library ("cpu.plain").

namespace quern::cpu {

struct VectorMath {
  /// out[i] = element i of `source`.
  void (*load)(const std::byte* source, DType dtype, int64_t n, float* out);
  /// Stores in f32 or rounded to bf16.
  void (*store)(const float* source, int64_t n, DType dtype, std::byte* out);
  /// x[i] = factor * x[i] rounded to `dtype`
  void (*round)(DType dtype, float factor, float* x, int64_t n);

  /// out[r * out_stride + c] = dot(row r of a, row c of b) for `rows` and `columns` of them, each of `length` elements.
  void (*dots)(const float* a, int64_t a_stride, int64_t rows, const float* b, int64_t b_stride, int64_t columns, int64_t length, float* out,
               int64_t out_stride);
  /// out[r][i] += sum_j factors[r * row_step + j * term_step] * terms[j][i], in order of j, for `rows` outputs of `width` elements.
  void (*add_products)(const float* factors, int64_t row_step, int64_t term_step, int64_t rows, const float* terms, int64_t term_stride,
                       int64_t num_terms, int64_t width, float* out, int64_t out_stride);
  float (*max)(const float* x, int64_t n);  // -infinity of nothing
  /// x[i] = exp(x[i] - shift); their sum.
  float (*exp_minus)(float* x, int64_t n, float shift);

  /// out = x * rsqrt(mean(x^2) + eps) * weight; `out` may be `x`.
  void (*rms_norm)(const float* x, const float* weight, int64_t n, float eps, float* out);
  /// x[i] *= silu(z[i]), rounded to `dtype` before it multiplies
  void (*multiply_silu)(DType dtype, float* x, const float* z, int64_t n);
  /// x[i] = round(x[i] * factor) * round(sigmoid(gate[i])), rounded to `dtype`.
  void (*gate)(DType dtype, float* x, float factor, const float* gate, int64_t n);
  /// y[i] = round(silu(sum_t taps[t * tap_stride + i] * columns[t][i])) of four columns of `dtype`; a column that is null counts as zeros.
  void (*convolve)(const std::byte* const* columns, DType dtype, const float* taps, int64_t tap_stride, int64_t n, float* y);
};

const VectorMath& plain_math();
const VectorMath& avx2_math();
const VectorMath& avx512_math();

inline const VectorMath& vector_math(LinearPath path) {
  switch (path) {
    case LinearPath::kPlain: return plain_math();
    case LinearPath::kAvx2: return avx2_math();
    case LinearPath::kAvx512:
    case LinearPath::kAvx512Bf16:
    case LinearPath::kAmx:
    case LinearPath::kAmxPrompt: return avx512_math();
  }
  CHECK_UNREACHABLE();
}

}  // namespace quern::cpu
