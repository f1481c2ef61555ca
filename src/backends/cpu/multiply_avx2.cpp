#include <immintrin.h>

#include "backends/cpu/fma_tile.h"
#include "base/check.h"

// multiply_tile for AVX2 with FMA and F16C (x86-64-v3). Only functions below the pragma use these instructions, as in multiply_avx512.cpp.

#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")

namespace quern::cpu {

namespace {

constexpr int64_t kPanelRows = 2;
constexpr int64_t kPrefetchBytes = 1024;

/// f32 values of 8 e4m3 codes in the low half of `codes`. The code's 7 magnitude bits, moved to an f16's exponent and mantissa, are the value times 2^-8,
/// subnormals included; the conversion to f32 and the product with 2^8 are exact.
inline __m256 decode_e4m3(__m128i codes) {
  const __m128i wide = _mm_slli_epi16(_mm_cvtepu8_epi16(codes), 8);
  const __m128i sign = _mm_and_si128(wide, _mm_set1_epi16(static_cast<int16_t>(0x8000)));
  const __m128i magnitude = _mm_srli_epi16(_mm_and_si128(wide, _mm_set1_epi16(0x7f00)), 1);
  return _mm256_mul_ps(_mm256_cvtph_ps(_mm_or_si128(sign, magnitude)), _mm256_set1_ps(256.0f));
}

/// Four columns x 16 features of a group into panel [4, 16].
template <DType kStored>
inline void decode(const std::byte* group, float* panel) {
  if constexpr (kStored == DType::kE4M3) {
    // Quarter q holds features 4 q .. 4 q + 3 of columns 0 .. 3: a transposition of 32-bit elements brings a column's features together.
    __m128i quarter[4];
    for (int q = 0; q < 4; ++q) quarter[q] = _mm_loadu_si128(reinterpret_cast<const __m128i*>(group) + q);
    const __m128i a = _mm_unpacklo_epi32(quarter[0], quarter[1]), b = _mm_unpackhi_epi32(quarter[0], quarter[1]);
    const __m128i c = _mm_unpacklo_epi32(quarter[2], quarter[3]), d = _mm_unpackhi_epi32(quarter[2], quarter[3]);
    const __m128i column[4] = {_mm_unpacklo_epi64(a, c), _mm_unpackhi_epi64(a, c), _mm_unpacklo_epi64(b, d), _mm_unpackhi_epi64(b, d)};
    for (int j = 0; j < 4; ++j) {
      _mm256_store_ps(panel + j * kFeatureTile, decode_e4m3(column[j]));
      _mm256_store_ps(panel + j * kFeatureTile + 8, decode_e4m3(_mm_unpackhi_epi64(column[j], column[j])));
    }
  } else {
    for (int64_t half = 0; half < 8; ++half) {
      const std::byte* stored = group + half * 8 * static_cast<int64_t>(dtype_size(kStored));
      __m256 w;
      if constexpr (kStored == DType::kF32) {
        w = _mm256_loadu_ps(reinterpret_cast<const float*>(stored));
      } else {
        const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(stored));
        w = kStored == DType::kF16 ? _mm256_cvtph_ps(bits) : _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
      }
      _mm256_store_ps(panel + half * 8, w);
    }
  }
}

inline __m256 sum_phases(const __m256 (&phase)[4]) { return _mm256_add_ps(_mm256_add_ps(phase[0], phase[1]), _mm256_add_ps(phase[2], phase[3])); }

/// totals += scale * block for R rows and 8 of the features, from a panel of decoded weights [groups * 4, 16].
template <int R>
inline void half_block(const float* panel, int64_t half, const FmaTile::Block& block, const float* x, int64_t stride, float* totals) {
  __m256 phase[R][4];
  for (int r = 0; r < R; ++r)
    for (auto& p : phase[r]) p = _mm256_setzero_ps();
  for (int64_t g = 0; g < block.groups; ++g)
    for (int j = 0; j < 4; ++j) {
      const __m256 w = _mm256_load_ps(panel + (g * 4 + j) * kFeatureTile + half * 8);
      for (int r = 0; r < R; ++r) phase[r][j] = _mm256_fmadd_ps(w, _mm256_set1_ps(x[r * stride + block.begin + g * 4 + j]), phase[r][j]);
    }
  const __m256 scale = block.mixed_scales != nullptr ? _mm256_load_ps(block.mixed_scales + half * 8) : _mm256_set1_ps(block.scale);
  for (int r = 0; r < R; ++r) {
    float* total = totals + r * kFeatureTile + half * 8;
    _mm256_store_ps(total, _mm256_fmadd_ps(scale, sum_phases(phase[r]), _mm256_load_ps(total)));
  }
}

template <DType kStored>
void multiply(const FmaTile& tile, const float* x, int64_t stride, int64_t rows, float* totals) {
  constexpr int64_t kGroupBytes = kTileGroup * kFeatureTile * static_cast<int64_t>(dtype_size(kStored));
  alignas(64) float panel[ops::kScaleBlock * kFeatureTile];
  for (int64_t b = 0; b < tile.num_blocks(); ++b) {
    const FmaTile::Block block = tile.block(b);
    for (int64_t g = 0; g < block.groups; ++g) {
      const std::byte* group = block.weight + g * kGroupBytes;
      for (int64_t line = 0; line < kGroupBytes; line += 64) _mm_prefetch(reinterpret_cast<const char*>(group) + kPrefetchBytes + line, _MM_HINT_T0);
      decode<kStored>(group, panel + g * kTileGroup * kFeatureTile);
    }
    int64_t row = 0;
    for (; row + kPanelRows <= rows; row += kPanelRows)
      for (int64_t half = 0; half < 2; ++half) half_block<kPanelRows>(panel, half, block, x + row * stride, stride, totals + row * kFeatureTile);
    for (; row < rows; ++row)
      for (int64_t half = 0; half < 2; ++half) half_block<1>(panel, half, block, x + row * stride, stride, totals + row * kFeatureTile);
  }
}

}  // namespace

void multiply_tile_avx2(const FmaTile& tile, const float* x, int64_t stride, int64_t rows, float* totals) {
  switch (tile.stored()) {
    case DType::kE4M3: return multiply<DType::kE4M3>(tile, x, stride, rows, totals);
    case DType::kBF16: return multiply<DType::kBF16>(tile, x, stride, rows, totals);
    case DType::kF16: return multiply<DType::kF16>(tile, x, stride, rows, totals);
    case DType::kF32: return multiply<DType::kF32>(tile, x, stride, rows, totals);
    case DType::kE5M2: case DType::kI64: case DType::kI32: case DType::kU8: case DType::kBool: break;
  }
  CHECK_UNREACHABLE();
}

}  // namespace quern::cpu

#pragma GCC pop_options
