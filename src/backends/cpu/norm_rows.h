#pragma once

#include "backends/cpu/numeric.h"
#include "backends/cpu/thread_pool.h"

namespace quern::cpu {

/// Factors 1 + w of a zero-centred norm weight, in f32.
inline void load_norm_1p(const ops::TensorView& weight, float* factors) {
  load_f32(weight, factors);
  for (int64_t i = 0; i < weight.shape.num_elements(); ++i) factors[i] += 1.0f;
}

/// out[row * stride] = RMSNorm1p of rows [first, first + rows) of x [., n], held in f32 but rounded to the activation dtype.
inline void norm_rows(ThreadPool& pool, const ops::TensorView& x, int64_t first, int64_t rows, int64_t n, const float* factors, float eps,
                      float* out, int64_t stride) {
  pool.parallel_for(rows, 4 * n, [&](int64_t begin, int64_t end, int) {
    for (int64_t row = begin; row < end; ++row) {
      float* y = out + row * stride;
      load_f32(row_address(x, first + row, n), x.dtype, n, y);
      rms_norm(y, factors, n, eps, y);
      round_to(x.dtype, y, n);
    }
  });
}

}  // namespace quern::cpu
