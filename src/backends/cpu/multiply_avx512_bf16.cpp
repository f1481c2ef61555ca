#include <immintrin.h>

#include <algorithm>

#include "backends/cpu/e4m3_bytes.h"
#include "backends/cpu/fma_tile.h"
#include "base/float_convert.h"

// multiply_tile for AVX-512 with bf16 dot products: rows and weights in bf16, which holds both exactly, sums in f32. Only functions below the pragma use these
// instructions.
//
// A lane is a pair of columns of one feature. For output feature n and a row, within each block of 128 columns:
//   even = dot products of the columns 4 g and 4 g + 1, g in order      odd = of the columns 4 g + 2 and 4 g + 3      (as vdpbf16ps adds: no subnormals)
//   total = fma(scale, even + odd, total)     block after block
// whatever the number of rows. Up to eight rows multiply weights decoded in registers; more share a panel of one block, decoded once into the first-level cache.

#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx512vbmi,avx512bf16,fma")

namespace quern::cpu {

namespace {

constexpr int64_t kLine = 64;
constexpr int64_t kMaxGroups = ops::kScaleBlock / kTileGroup;
constexpr int64_t kPrefetchBytes = 4096;  // ahead in the stream of one tile
constexpr int kDirectRows = 8, kPanelRows = 12;  // 16 sums, 2 weights, 4 tables, the rest to decode; 24 sums, 2 weights, 2 inputs

/// A group of four columns as bf16 pairs. In each 128 bits of `first`: both pairs of one feature, then of the next; the two features after those in `second`.
struct Pairs {
  __m512i first, second;
};

template <DType kStored>
class Decoder;

template <>
class Decoder<DType::kE4M3> {
 public:
  static constexpr int64_t kGroupBytes = kTileGroup * kFeatureTile;
  Decoder()  // not implicit: that one would not be compiled for these instructions
      : low_0_(_mm512_load_si512(kE4m3Bytes.low.data())),
        low_1_(_mm512_load_si512(kE4m3Bytes.low.data() + kLine)),
        high_0_(_mm512_load_si512(kE4m3Bytes.high.data())),
        high_1_(_mm512_load_si512(kE4m3Bytes.high.data() + kLine)) {}
  [[nodiscard]] Pairs operator()(const std::byte* group) const {
    const __m512i codes = _mm512_loadu_si512(group);
    const __m512i low = _mm512_permutex2var_epi8(low_0_, codes, low_1_);
    // 0xf8 = a | (b & c): the sign joins in one operation.
    const __m512i high = _mm512_ternarylogic_epi64(_mm512_permutex2var_epi8(high_0_, codes, high_1_), codes, _mm512_set1_epi8(static_cast<char>(0x80)), 0xf8);
    return {_mm512_unpacklo_epi8(low, high), _mm512_unpackhi_epi8(low, high)};
  }

 private:
  __m512i low_0_, low_1_, high_0_, high_1_;
};

template <>
class Decoder<DType::kBF16> {
 public:
  static constexpr int64_t kGroupBytes = kTileGroup * kFeatureTile * 2;
  [[nodiscard]] Pairs operator()(const std::byte* group) const {
    const auto column = [&](int64_t j) { return _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(group + j * 2 * kFeatureTile))); };
    const __m512i left = _mm512_or_si512(column(0), _mm512_slli_epi32(column(1), 16)), right = _mm512_or_si512(column(2), _mm512_slli_epi32(column(3), 16));
    return {_mm512_unpacklo_epi32(left, right), _mm512_unpackhi_epi32(left, right)};
  }
};

inline __m512 dot(__m512 sum, __m512i a, __m512i b) { return _mm512_dpbf16_ps(sum, reinterpret_cast<__m512bh>(a), reinterpret_cast<__m512bh>(b)); }

/// Sums of one row and block while it runs: pairs of columns side by side, as in Pairs.
struct Sums {
  __m512 first, second;

  Sums() : first(_mm512_setzero_ps()), second(_mm512_setzero_ps()) {}  // an implicit constructor would not be compiled for these instructions
  /// `x`: four columns of the row.
  void add(const Pairs& weights, const bf16* x) {
    int64_t columns;
    __builtin_memcpy(&columns, x, sizeof(columns));
    const __m512i input = _mm512_set1_epi64(columns);
    first = dot(first, weights.first, input);
    second = dot(second, weights.second, input);
  }
  /// even + odd, a lane a feature.
  [[nodiscard]] __m512 features() const {
    return _mm512_add_ps(_mm512_shuffle_ps(first, second, _MM_SHUFFLE(2, 0, 2, 0)), _mm512_shuffle_ps(first, second, _MM_SHUFFLE(3, 1, 3, 1)));
  }
};

__m512 block_scale(const FmaTile& tile, const FmaTile::Block& block) {
  const __m512 carried = block.mixed_scales != nullptr ? _mm512_loadu_ps(block.mixed_scales) : _mm512_set1_ps(block.scale);
  return _mm512_mul_ps(carried, _mm512_set1_ps(1.0f / tile.unit()));  // powers of two: exact
}
inline void add_to(float* total, __m512 scale, const Sums& sums) { _mm512_store_ps(total, _mm512_fmadd_ps(scale, sums.features(), _mm512_load_ps(total))); }

template <int64_t kBytes>
void prefetch(const std::byte* group) {
  for (int64_t line = 0; line < kBytes; line += kLine) _mm_prefetch(reinterpret_cast<const char*>(group) + kPrefetchBytes + line, _MM_HINT_T0);
}

template <DType kStored, int R>
void direct_rows(const FmaTile& tile, const bf16* x, int64_t stride, float* totals) {
  using Decode = Decoder<kStored>;
  const Decode decode;
  for (int64_t b = 0; b < tile.num_blocks(); ++b) {
    const FmaTile::Block block = tile.block(b);
    Sums sums[R];
    for (int64_t g = 0; g < block.groups; ++g) {
      const std::byte* group = block.weight + g * Decode::kGroupBytes;
      prefetch<Decode::kGroupBytes>(group);
      const Pairs weights = decode(group);
      for (int r = 0; r < R; ++r) sums[r].add(weights, x + r * stride + block.begin + g * kTileGroup);
    }
    const __m512 scale = block_scale(tile, block);
    for (int r = 0; r < R; ++r) add_to(totals + r * kFeatureTile, scale, sums[r]);
  }
}
/// All rows at once; there are at most R.
template <DType kStored, int R>
void direct(const FmaTile& tile, const bf16* x, int64_t stride, int64_t rows, float* totals) {
  if (rows == R) return direct_rows<kStored, R>(tile, x, stride, totals);
  if constexpr (R > 1) direct<kStored, R - 1>(tile, x, stride, rows, totals);
}

/// A panel is the Pairs of a block's groups.
template <int R>
void panel_rows(const std::byte* panel, const FmaTile::Block& block, __m512 scale, const bf16* x, int64_t stride, float* totals) {
  Sums sums[R];
  for (int64_t g = 0; g < block.groups; ++g) {
    const Pairs weights{_mm512_load_si512(panel + g * 2 * kLine), _mm512_load_si512(panel + (g * 2 + 1) * kLine)};
    for (int r = 0; r < R; ++r) sums[r].add(weights, x + r * stride + g * kTileGroup);
  }
  for (int r = 0; r < R; ++r) add_to(totals + r * kFeatureTile, scale, sums[r]);
}
/// As many rows at a time as the registers hold, then fewer.
template <int R>
void all_panel_rows(const std::byte* panel, const FmaTile::Block& block, __m512 scale, const bf16* x, int64_t stride, int64_t rows, float* totals) {
  int64_t row = 0;
  for (; row + R <= rows; row += R) {
    for (int r = 0; r < R; ++r)  // the block's columns of the next rows, which lie in the second-level cache
      for (int64_t column = 0; column < ops::kScaleBlock; column += kLine / 2) _mm_prefetch(reinterpret_cast<const char*>(x + (row + R + r) * stride + column), _MM_HINT_T0);
    panel_rows<R>(panel, block, scale, x + row * stride, stride, totals + row * kFeatureTile);
  }
  if constexpr (R > 1)
    if (row < rows) all_panel_rows<R - 1>(panel, block, scale, x + row * stride, stride, rows - row, totals + row * kFeatureTile);
}

template <DType kStored>
void multiply(const FmaTile& tile, const bf16* x, int64_t stride, int64_t rows, float* totals) {
  using Decode = Decoder<kStored>;
  if (rows <= kDirectRows) return direct<kStored, kDirectRows>(tile, x, stride, rows, totals);
  alignas(64) std::byte panel[kMaxGroups * 2 * kLine];
  const Decode decode;
  for (int64_t b = 0; b < tile.num_blocks(); ++b) {
    const FmaTile::Block block = tile.block(b);
    for (int64_t g = 0; g < block.groups; ++g) {
      const std::byte* group = block.weight + g * Decode::kGroupBytes;
      prefetch<Decode::kGroupBytes>(group);
      const Pairs weights = decode(group);
      _mm512_store_si512(panel + g * 2 * kLine, weights.first);
      _mm512_store_si512(panel + (g * 2 + 1) * kLine, weights.second);
    }
    all_panel_rows<kPanelRows>(panel, block, block_scale(tile, block), x + block.begin, stride, rows, totals);
  }
}

}  // namespace

void multiply_tile_avx512_bf16(const FmaTile& tile, const bf16* x, int64_t stride, int64_t rows, float* totals) {
  if (tile.stored() == DType::kE4M3) multiply<DType::kE4M3>(tile, x, stride, rows, totals);
  else multiply<DType::kBF16>(tile, x, stride, rows, totals);
}

}  // namespace quern::cpu

#pragma GCC pop_options
