#include <immintrin.h>

#include "backends/cpu/fma_tile.h"
#include "base/check.h"

// multiply_tile for AVX-512. Only functions below the pragma use these instructions, as in multiply_avx2.cpp.

#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,fma,f16c")

#include "backends/cpu/multiply_loops.h"

namespace quern::cpu {

namespace {

/// Sixteen f32.
struct Avx512 {
  using Register = __m512;
  static constexpr int64_t kWidth = 16;
  static constexpr int kDirectSums = 16;
  static constexpr int kPanelRows = 12;

  static Register zero() { return _mm512_setzero_ps(); }
  static Register broadcast(float x) { return _mm512_set1_ps(x); }
  static Register load_f32(const float* x) { return _mm512_loadu_ps(x); }
  static void store(float* x, Register a) { _mm512_storeu_ps(x, a); }
  static Register add(Register a, Register b) { return _mm512_add_ps(a, b); }
  static Register fma(Register a, Register b, Register c) { return _mm512_fmadd_ps(a, b, c); }

  template <DType kStored>
  static Register load(const std::byte* x) {
    if constexpr (kStored == DType::kF32) {
      return _mm512_loadu_ps(x);
    } else {
      const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x));
      if constexpr (kStored == DType::kF16) return _mm512_cvtph_ps(bits);
      return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
    }
  }
  /// Four columns of 16 features, each value times 2^-120: two codes at a time become the halves of bf16 pairs, which then part.
  static void decode_e4m3(const std::byte* codes, Register (&w)[4]) {
    const __m512i mask = _mm512_set1_epi16(static_cast<int16_t>(0x87f0)), upper = _mm512_set1_epi32(static_cast<int>(0xffff0000));
    const __m512i all = _mm512_loadu_si512(codes);
    const __m512i odd = _mm512_and_si512(_mm512_srai_epi16(all, 4), mask);
    const __m512i even = _mm512_and_si512(_mm512_srai_epi16(_mm512_slli_epi16(all, 8), 4), mask);
    w[0] = _mm512_castsi512_ps(_mm512_slli_epi32(even, 16));
    w[1] = _mm512_castsi512_ps(_mm512_slli_epi32(odd, 16));
    w[2] = _mm512_castsi512_ps(_mm512_and_si512(even, upper));
    w[3] = _mm512_castsi512_ps(_mm512_and_si512(odd, upper));
  }
};

}  // namespace

void multiply_tile_avx512(const FmaTile& tile, const float* x, int64_t stride, int64_t rows, float* totals) {
  MultiplyLoops<Avx512>::multiply(tile, x, stride, rows, totals);
}

}  // namespace quern::cpu

#pragma GCC pop_options
