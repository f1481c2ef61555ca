#pragma once

#include "backends/cpu/numeric.h"
#include "backends/cpu/packed_linear.h"
#include "backends/cpu/thread_pool.h"
#include "backends/cpu/vector_math.h"

namespace quern::cpu {

/// Factors 1 + w of a zero-centred norm weight, in f32.
inline void load_norm_1p(const ops::TensorView& weight, float* factors) {
  load_f32(weight, factors);
  for (int64_t i = 0; i < weight.shape.num_elements(); ++i) factors[i] += 1.0f;
}

/// out[row * stride] = RMSNorm1p of rows [first, first + rows) of x [., n], rounded to the activation dtype and multiplied by `scale`, held in f32.
inline void norm_rows(ThreadPool& pool, const VectorMath& math, const ops::TensorView& x, int64_t first, int64_t rows, int64_t n,
                      const float* factors, float eps, float scale, float* out, int64_t stride) {
  pool.parallel_for(rows, n, [&](int64_t begin, int64_t end, int) {
    for (int64_t row = begin; row < end; ++row) {
      float* y = out + row * stride;
      math.load(row_address(x, first + row, n), x.dtype, n, y);
      math.rms_norm(y, factors, n, eps, y);
      math.round(x.dtype, scale, y, n);
    }
  });
}

/// The last step before rows are multiplied on `path`: where it takes bf16, each row shrinks to the first half of its place.
inline void prepare_inputs(ThreadPool& pool, const VectorMath& math, LinearPath path, int64_t rows, int64_t n, float* values, int64_t stride) {
  if (!multiplies_bf16(path)) return;
  pool.parallel_for(rows, n / 4, [&](int64_t begin, int64_t end, int) {
    for (int64_t row = begin; row < end; ++row) math.store(values + row * stride, n, DType::kBF16, reinterpret_cast<std::byte*>(values + row * stride));
  });
}

}  // namespace quern::cpu
