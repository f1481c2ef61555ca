// Included below a target pragma: see vector_math_avx512.cpp.

namespace quern::cpu {

/// Sixteen f32 in one register; the same operations and bits as Avx2Lanes.
struct Avx512Lanes {
  __m512 all;

  // Tiles whose sums leave room in the 32 registers.
  static constexpr int kDotRows = 4, kDotColumns = 4;
  static constexpr int kSumRows = 4, kSumPieces = 4;

  static Avx512Lanes broadcast(float x) { return {_mm512_set1_ps(x)}; }
  static Avx512Lanes load(const float* x) { return {_mm512_loadu_ps(x)}; }
  static Avx512Lanes load(const float* x, int64_t n) { return {_mm512_maskz_loadu_ps(mask(n), x)}; }
  void store(float* x) const { _mm512_storeu_ps(x, all); }
  void store(float* x, int64_t n) const { _mm512_mask_storeu_ps(x, mask(n), all); }
  /// The first n lanes, 0 in the others.
  [[nodiscard]] Avx512Lanes first(int64_t n) const { return {_mm512_maskz_mov_ps(mask(n), all)}; }

  static Avx512Lanes load_bf16(const std::byte* x) {
    return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(x))), 16))};
  }
  static Avx512Lanes load_e4m3(const std::byte* x) {
    const __m512i codes = _mm512_slli_epi32(_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(x))), 24);
    const __m512i bits = _mm512_and_si512(_mm512_srai_epi32(codes, 4), _mm512_set1_epi32(static_cast<int>(0x87f00000)));
    const __mmask16 nan = _mm512_cmpeq_epi32_mask(_mm512_and_si512(codes, _mm512_set1_epi32(0x7f000000)), _mm512_set1_epi32(0x7f000000));
    const __m512i value = _mm512_castps_si512(_mm512_mul_ps(_mm512_castsi512_ps(bits), _mm512_set1_ps(0x1p120f)));
    return {_mm512_castsi512_ps(_mm512_mask_mov_epi32(value, nan, _mm512_set1_epi32(-1)))};
  }
  void store_bf16(std::byte* x) const {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(x), _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded_bits(), 16)));
  }
  [[nodiscard]] Avx512Lanes rounded_bf16() const {
    return {_mm512_castsi512_ps(_mm512_and_si512(rounded_bits(), _mm512_set1_epi32(static_cast<int>(0xffff0000))))};
  }

  [[nodiscard]] Avx512Lanes nearest_integer() const {
    return {_mm512_roundscale_ps(all, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
  }
  /// *this * 2^n in two exact steps and one rounding; n a whole number, from -250 to 250.
  [[nodiscard]] Avx512Lanes times_power_of_two(const Avx512Lanes& n) const {
    const __m512i whole = _mm512_cvtps_epi32(n.all), half = _mm512_srai_epi32(whole, 1), rest = _mm512_sub_epi32(whole, half);
    return {_mm512_mul_ps(_mm512_mul_ps(all, power_of_two(half)), power_of_two(rest))};
  }

  /// Lane i + 8 to lane i, then 4, 2 and 1.
  [[nodiscard]] float sum() const {
    const __m256 eight = _mm256_add_ps(_mm512_castps512_ps256(all), _mm512_extractf32x8_ps(all, 1));
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
  }
  [[nodiscard]] float largest() const {
    const __m256 eight = _mm256_max_ps(_mm512_castps512_ps256(all), _mm512_extractf32x8_ps(all, 1));
    const __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
  }

 private:
  static __mmask16 mask(int64_t n) { return static_cast<__mmask16>((1u << n) - 1u); }
  /// Bits rounded to nearest even in the upper half; NaN stays a quiet NaN. The lower half is left over.
  [[nodiscard]] __m512i rounded_bits() const {
    const __m512i bits = _mm512_castps_si512(all);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
    return _mm512_mask_or_epi32(rounded, _mm512_cmp_ps_mask(all, all, _CMP_UNORD_Q), bits, _mm512_set1_epi32(0x400000));
  }
  static __m512 power_of_two(__m512i n) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_add_epi32(n, _mm512_set1_epi32(127)), 23)); }
};

inline Avx512Lanes operator+(const Avx512Lanes& a, const Avx512Lanes& b) { return {_mm512_add_ps(a.all, b.all)}; }
inline Avx512Lanes operator-(const Avx512Lanes& a, const Avx512Lanes& b) { return {_mm512_sub_ps(a.all, b.all)}; }
inline Avx512Lanes operator*(const Avx512Lanes& a, const Avx512Lanes& b) { return {_mm512_mul_ps(a.all, b.all)}; }
inline Avx512Lanes operator/(const Avx512Lanes& a, const Avx512Lanes& b) { return {_mm512_div_ps(a.all, b.all)}; }
/// a * b + c with one rounding.
inline Avx512Lanes fma(const Avx512Lanes& a, const Avx512Lanes& b, const Avx512Lanes& c) { return {_mm512_fmadd_ps(a.all, b.all, c.all)}; }
/// The second operand where either is NaN.
inline Avx512Lanes min(const Avx512Lanes& a, const Avx512Lanes& b) { return {_mm512_min_ps(a.all, b.all)}; }
inline Avx512Lanes max(const Avx512Lanes& a, const Avx512Lanes& b) { return {_mm512_max_ps(a.all, b.all)}; }

}  // namespace quern::cpu
