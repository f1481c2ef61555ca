// Included below a target pragma: see vector_math_avx2.cpp.

namespace quern::cpu {

/// Sixteen f32 in two registers.
struct Avx2Lanes {
  __m256 low, high;

  // Tiles whose sums fit the 16 registers.
  static constexpr int kDotRows = 2, kDotColumns = 3;
  static constexpr int kSumRows = 3, kSumPieces = 2;

  static Avx2Lanes broadcast(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
  static Avx2Lanes load(const float* x) { return {_mm256_loadu_ps(x), _mm256_loadu_ps(x + 8)}; }
  static Avx2Lanes load(const float* x, int64_t n) {
    return {_mm256_maskload_ps(x, mask(n)), n > 8 ? _mm256_maskload_ps(x + 8, mask(n - 8)) : _mm256_setzero_ps()};
  }
  void store(float* x) const {
    _mm256_storeu_ps(x, low);
    _mm256_storeu_ps(x + 8, high);
  }
  void store(float* x, int64_t n) const {
    _mm256_maskstore_ps(x, mask(n), low);
    if (n > 8) _mm256_maskstore_ps(x + 8, mask(n - 8), high);
  }
  /// The first n lanes, 0 in the others.
  [[nodiscard]] Avx2Lanes first(int64_t n) const {
    return {_mm256_and_ps(low, _mm256_castsi256_ps(mask(n))), _mm256_and_ps(high, _mm256_castsi256_ps(mask(n - 8)))};
  }

  static Avx2Lanes load_bf16(const std::byte* x) { return {widen(x), widen(x + 16)}; }
  static Avx2Lanes load_e4m3(const std::byte* x) { return {decode(x), decode(x + 8)}; }
  void store_bf16(std::byte* x) const {
    const __m256i packed = _mm256_packus_epi32(_mm256_srli_epi32(rounded_bits(low), 16), _mm256_srli_epi32(rounded_bits(high), 16));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(x), _mm256_permute4x64_epi64(packed, 0xd8));
  }
  [[nodiscard]] Avx2Lanes rounded_bf16() const { return {round_half(low), round_half(high)}; }

  [[nodiscard]] Avx2Lanes nearest_integer() const {
    return {_mm256_round_ps(low, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC), _mm256_round_ps(high, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
  }
  /// *this * 2^n in two exact steps and one rounding; n a whole number, from -250 to 250.
  [[nodiscard]] Avx2Lanes times_power_of_two(const Avx2Lanes& n) const { return {scale(low, n.low), scale(high, n.high)}; }

  /// Lane i + 8 to lane i, then 4, 2 and 1.
  [[nodiscard]] float sum() const {
    const __m256 eight = _mm256_add_ps(low, high);
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
  }
  [[nodiscard]] float largest() const {
    const __m256 eight = _mm256_max_ps(low, high);
    const __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
  }

 private:
  static __m256i mask(int64_t n) {
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(static_cast<int>(n)), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
  }
  static __m256 widen(const std::byte* x) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(x))), 16));
  }
  /// Sign and magnitude of the codes moved to an f32's places are the values times 2^-120, subnormals included.
  static __m256 decode(const std::byte* x) {
    const __m256i codes = _mm256_slli_epi32(_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(x))), 24);
    const __m256i bits = _mm256_and_si256(_mm256_srai_epi32(codes, 4), _mm256_set1_epi32(static_cast<int>(0x87f00000)));
    const __m256i nan = _mm256_cmpeq_epi32(_mm256_and_si256(codes, _mm256_set1_epi32(0x7f000000)), _mm256_set1_epi32(0x7f000000));
    return _mm256_or_ps(_mm256_mul_ps(_mm256_castsi256_ps(bits), _mm256_set1_ps(0x1p120f)), _mm256_castsi256_ps(nan));
  }
  /// Bits of x rounded to nearest even in the upper half; NaN stays a quiet NaN. The lower half is left over.
  static __m256i rounded_bits(__m256 x) {
    const __m256i bits = _mm256_castps_si256(x);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
    const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
    return _mm256_blendv_epi8(rounded, quiet, _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q)));
  }
  static __m256 round_half(__m256 x) {
    return _mm256_castsi256_ps(_mm256_and_si256(rounded_bits(x), _mm256_set1_epi32(static_cast<int>(0xffff0000))));
  }
  static __m256 scale(__m256 x, __m256 n) {
    const __m256i whole = _mm256_cvtps_epi32(n), half = _mm256_srai_epi32(whole, 1), rest = _mm256_sub_epi32(whole, half);
    return _mm256_mul_ps(_mm256_mul_ps(x, power_of_two(half)), power_of_two(rest));
  }
  static __m256 power_of_two(__m256i n) { return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(n, _mm256_set1_epi32(127)), 23)); }
};

inline Avx2Lanes operator+(const Avx2Lanes& a, const Avx2Lanes& b) { return {_mm256_add_ps(a.low, b.low), _mm256_add_ps(a.high, b.high)}; }
inline Avx2Lanes operator-(const Avx2Lanes& a, const Avx2Lanes& b) { return {_mm256_sub_ps(a.low, b.low), _mm256_sub_ps(a.high, b.high)}; }
inline Avx2Lanes operator*(const Avx2Lanes& a, const Avx2Lanes& b) { return {_mm256_mul_ps(a.low, b.low), _mm256_mul_ps(a.high, b.high)}; }
inline Avx2Lanes operator/(const Avx2Lanes& a, const Avx2Lanes& b) { return {_mm256_div_ps(a.low, b.low), _mm256_div_ps(a.high, b.high)}; }
/// a * b + c with one rounding.
inline Avx2Lanes fma(const Avx2Lanes& a, const Avx2Lanes& b, const Avx2Lanes& c) {
  return {_mm256_fmadd_ps(a.low, b.low, c.low), _mm256_fmadd_ps(a.high, b.high, c.high)};
}
/// The second operand where either is NaN.
inline Avx2Lanes min(const Avx2Lanes& a, const Avx2Lanes& b) { return {_mm256_min_ps(a.low, b.low), _mm256_min_ps(a.high, b.high)}; }
inline Avx2Lanes max(const Avx2Lanes& a, const Avx2Lanes& b) { return {_mm256_max_ps(a.low, b.low), _mm256_max_ps(a.high, b.high)}; }

}  // namespace quern::cpu
