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
class Avx512 {
 public:
  using Register = __m512;
  static constexpr int64_t kWidth = 16;
  static constexpr int kDirectRows = 6;  // 24 sums, 4 weights, 2 masks
  static constexpr int kDirectSums = 24;
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
  /// Four columns of 16 features, or the even (First 0) or odd ones (1), each value times 2^-120: two codes at a time become the halves of bf16 pairs,
  /// which then part.
  template <int First, int C>
  static void decode_e4m3(const std::byte* codes, Register (&w)[C]) {
    const __m512i all = _mm512_loadu_si512(codes);
    if constexpr (C == 4) {
      part(pairs(_mm512_slli_epi16(all, 8)), w[0], w[2]);
      part(pairs(all), w[1], w[3]);
    } else {
      part(pairs(First == 0 ? _mm512_slli_epi16(all, 8) : all), w[0], w[1]);
    }
  }

 private:
  /// bf16 values of the codes in the upper bytes.
  static __m512i pairs(__m512i codes) {
    return _mm512_and_si512(_mm512_srai_epi16(codes, 4), _mm512_set1_epi16(static_cast<int16_t>(0x87f0)));
  }
  static void part(__m512i pairs, Register& first, Register& second) {
    first = _mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16));
    second = _mm512_castsi512_ps(_mm512_and_si512(pairs, _mm512_set1_epi32(static_cast<int>(0xffff0000))));
  }
};

}  // namespace

void multiply_tile_avx512(const FmaTile& tile, const float* x, int64_t stride, int64_t rows, float* totals) {
  MultiplyLoops<Avx512>::multiply(tile, x, stride, rows, totals);
}

}  // namespace quern::cpu

#pragma GCC pop_options
