#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "backends/cpu/lanes.h"
#include "base/check.h"
#include "base/dtype.h"
#include "base/float_convert.h"
#include "ops/tensor.h"

// Element conversions and the pointwise functions of the model, all in f32.

namespace quern::cpu {

/// dst[i] = value of element i. `source` needs no alignment: it may lie in a mapped file.
inline void load_f32(const std::byte* source, DType dtype, int64_t n, float* dst) {
  switch (dtype) {
    case DType::kF32: std::memcpy(dst, source, static_cast<size_t>(n) * sizeof(float)); return;
    case DType::kBF16:
      for (int64_t i = 0; i < n; ++i) {
        bf16 x;
        std::memcpy(&x, source + 2 * i, 2);
        dst[i] = to_f32(x);
      }
      return;
    case DType::kF16:
      for (int64_t i = 0; i < n; ++i) {
        uint16_t x;
        std::memcpy(&x, source + 2 * i, 2);
        dst[i] = f16_to_f32(x);
      }
      return;
    case DType::kE4M3:
      for (int64_t i = 0; i < n; ++i) dst[i] = kE4M3Table[static_cast<uint8_t>(source[i])];
      return;
    case DType::kE5M2:
    case DType::kI64:
    case DType::kI32:
    case DType::kU8:
    case DType::kBool: break;
  }
  CHECK_UNREACHABLE();
}
inline void load_f32(const ops::TensorView& view, float* dst) {
  if (!view.empty()) load_f32(view.data<std::byte>(), view.dtype, view.shape.num_elements(), dst);
}

/// Stores in f32 or rounded to bf16.
inline void store_f32(const float* source, int64_t n, DType dtype, std::byte* dst) {
  switch (dtype) {
    case DType::kF32: std::memcpy(dst, source, static_cast<size_t>(n) * sizeof(float)); return;
    case DType::kBF16: {
      auto* out = reinterpret_cast<bf16*>(dst);
      for (int64_t i = 0; i < n; ++i) out[i] = to_bf16(source[i]);
      return;
    }
    case DType::kF16:
    case DType::kE4M3:
    case DType::kE5M2:
    case DType::kI64:
    case DType::kI32:
    case DType::kU8:
    case DType::kBool: break;
  }
  CHECK_UNREACHABLE();
}

/// Address of row `row` of a [rows, ...] view of `columns` elements a row.
inline std::byte* row_address(const ops::TensorView& view, int64_t row, int64_t columns) {
  return view.data<std::byte>() + static_cast<size_t>(row * columns) * dtype_size(view.dtype);
}

/// Address of element `column` of such a row.
inline std::byte* element_address(const ops::TensorView& view, int64_t row, int64_t columns, int64_t column) {
  return row_address(view, row * columns + column, 1);
}

/// x as the activation dtype would hold it.
inline float round_to(DType dtype, float x) { return dtype == DType::kBF16 ? round_bf16(x) : x; }
inline void round_to(DType dtype, float* x, int64_t n) {
  if (dtype != DType::kBF16) return;
  for (int64_t i = 0; i < n; ++i) x[i] = round_bf16(x[i]);
}

inline float sigmoid(float x) { return 1.0f / (1.0f + std::exp(-x)); }
inline float silu(float x) { return x / (1.0f + std::exp(-x)); }
inline float softplus(float x) { return x > 20.0f ? x : std::log1p(std::exp(x)); }

/// x * rsqrt(mean(x^2) + eps) * weight; `weight` is the factor itself (1 + w for the zero-centred norms). `out` may be `x`.
inline void rms_norm(const float* x, const float* weight, int64_t n, float eps, float* out) {
  const float scale = 1.0f / std::sqrt(dot(x, x, n) / static_cast<float>(n) + eps);
  for (int64_t i = 0; i < n; ++i) out[i] = x[i] * scale * weight[i];
}

}  // namespace quern::cpu
