#include <immintrin.h>

#include "backends/cpu/fma_tile.h"
#include "base/check.h"

// multiply_tile for AVX2 with FMA and F16C (x86-64-v3). Only functions below the pragma use these instructions: what headers define stays portable, so
// that the program starts on any x86-64 and asks CPUID before it comes here.

#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")

#include "backends/cpu/multiply_loops.h"

namespace quern::cpu {

namespace {

/// Eight f32.
class Avx2 {
 public:
  using Register = __m256;
  static constexpr int64_t kWidth = 8;
  static constexpr int kDirectRows = 6;  // all columns of 2 rows or half of them of 6: 12 sums, 2 weights, 2 masks
  static constexpr int kDirectSums = 8;
  static constexpr int kPanelRows = 6;   // 12 of 16 registers are sums

  static Register zero() { return _mm256_setzero_ps(); }
  static Register broadcast(float x) { return _mm256_set1_ps(x); }
  static Register load_f32(const float* x) { return _mm256_loadu_ps(x); }
  static void store(float* x, Register a) { _mm256_storeu_ps(x, a); }
  static Register add(Register a, Register b) { return _mm256_add_ps(a, b); }
  static Register fma(Register a, Register b, Register c) { return _mm256_fmadd_ps(a, b, c); }

  template <DType kStored>
  static Register load(const std::byte* x) {
    if constexpr (kStored == DType::kF32) {
      return _mm256_loadu_ps(reinterpret_cast<const float*>(x));
    } else {
      const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(x));
      if constexpr (kStored == DType::kF16) return _mm256_cvtph_ps(bits);
      return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
    }
  }
  /// Four columns of 8 features, or the even (First 0) or odd ones (1), each value times 2^-120: two codes at a time become the halves of bf16 pairs,
  /// which then part.
  template <int First, int C>
  static void decode_e4m3(const std::byte* codes, Register (&w)[C]) {
    const __m256i all = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes));
    if constexpr (C == 4) {
      part(pairs(_mm256_slli_epi16(all, 8)), w[0], w[2]);
      part(pairs(all), w[1], w[3]);
    } else {
      part(pairs(First == 0 ? _mm256_slli_epi16(all, 8) : all), w[0], w[1]);
    }
  }

 private:
  /// bf16 values of the codes in the upper bytes.
  static __m256i pairs(__m256i codes) {
    return _mm256_and_si256(_mm256_srai_epi16(codes, 4), _mm256_set1_epi16(static_cast<int16_t>(0x87f0)));
  }
  static void part(__m256i pairs, Register& first, Register& second) {
    first = _mm256_castsi256_ps(_mm256_slli_epi32(pairs, 16));
    second = _mm256_castsi256_ps(_mm256_and_si256(pairs, _mm256_set1_epi32(static_cast<int>(0xffff0000))));
  }
};

}  // namespace

void multiply_tile_avx2(const FmaTile& tile, const float* x, int64_t stride, int64_t rows, float* totals) {
  MultiplyLoops<Avx2>::multiply(tile, x, stride, rows, totals);
}

}  // namespace quern::cpu

#pragma GCC pop_options
