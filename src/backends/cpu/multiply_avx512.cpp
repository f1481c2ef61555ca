#include <immintrin.h>

#include <algorithm>
#include <array>

#include "backends/cpu/fma_tile.h"
#include "base/check.h"
#include "base/float_convert.h"

// multiply_tile for AVX-512 with VBMI. Only functions below the pragma use these instructions: what headers define stays portable, so that the
// program starts on any x86-64 and asks CPUID before it comes here.

#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx512vbmi,fma,f16c")

namespace quern::cpu {

namespace {

constexpr int64_t kDirectRows = 4;   // up to here weights are decoded in registers, beyond into a panel in L1
constexpr int64_t kPanelRows = 6;    // 24 of 32 registers are sums
constexpr int64_t kPrefetchBytes = 2048;  // ahead in the stream of one tile; 1 to 4 KiB measure alike (Xeon, 2 cores, 2026-11-30)

/// bf16 bytes of the 128 positive codes, low and high, for vpermi2b.
struct DecodeTable {
  __m512i low[2], high[2];
};
struct DecodeBytes {
  alignas(64) std::array<uint8_t, 128> low{}, high{};
};
constexpr DecodeBytes make_decode_bytes() {
  DecodeBytes bytes;
  for (size_t code = 0; code < 128; ++code) {
    const uint16_t bits = to_bf16(e4m3_decode(static_cast<uint8_t>(code))).bits;
    bytes.low[code] = static_cast<uint8_t>(bits);
    bytes.high[code] = static_cast<uint8_t>(bits >> 8);
  }
  return bytes;
}
constexpr DecodeBytes kDecodeBytes = make_decode_bytes();

inline DecodeTable load_table() {
  DecodeTable table;
  for (size_t half = 0; half < 2; ++half) {
    table.low[half] = _mm512_load_si512(kDecodeBytes.low.data() + 64 * half);
    table.high[half] = _mm512_load_si512(kDecodeBytes.high.data() + 64 * half);
  }
  return table;
}

/// Values of a group of four columns x 16 features. Exact: every e4m3 value is a bf16 value, and a bf16 value the upper half of an f32.
inline void decode_e4m3(const DecodeTable& table, const std::byte* group, __m512 (&w)[4]) {
  const __m512i codes = _mm512_loadu_si512(group);
  const __m512i low = _mm512_permutex2var_epi8(table.low[0], codes, table.low[1]);
  __m512i high = _mm512_permutex2var_epi8(table.high[0], codes, table.high[1]);
  high = _mm512_ternarylogic_epi32(high, codes, _mm512_set1_epi8(static_cast<char>(0x80)), 0xf8);  // high | (codes & 0x80)
  const __m512i zero = _mm512_setzero_si512();
  const __m512i first = _mm512_unpacklo_epi8(low, high), second = _mm512_unpackhi_epi8(low, high);
  w[0] = _mm512_castsi512_ps(_mm512_unpacklo_epi16(zero, first));
  w[1] = _mm512_castsi512_ps(_mm512_unpackhi_epi16(zero, first));
  w[2] = _mm512_castsi512_ps(_mm512_unpacklo_epi16(zero, second));
  w[3] = _mm512_castsi512_ps(_mm512_unpackhi_epi16(zero, second));
}

template <DType kStored>
inline void decode(const DecodeTable& table, const std::byte* group, __m512 (&w)[4]) {
  if constexpr (kStored == DType::kE4M3) {
    decode_e4m3(table, group, w);
  } else {
    for (int64_t j = 0; j < 4; ++j) {
      const std::byte* column = group + j * kFeatureTile * static_cast<int64_t>(dtype_size(kStored));
      if constexpr (kStored == DType::kF32) {
        w[j] = _mm512_loadu_ps(column);
      } else {
        const __m256i stored = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(column));
        w[j] = kStored == DType::kF16 ? _mm512_cvtph_ps(stored) : _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(stored), 16));
      }
    }
  }
}

inline __m512 sum_phases(const __m512 (&phase)[4]) { return _mm512_add_ps(_mm512_add_ps(phase[0], phase[1]), _mm512_add_ps(phase[2], phase[3])); }

/// One block of columns for R rows, weights decoded in registers.
template <DType kStored, int R>
inline void direct_block(const DecodeTable& table, const std::byte* weight, const float* x, int64_t stride, int64_t groups, __m512 (&sum)[R]) {
  constexpr int64_t kGroupBytes = kTileGroup * kFeatureTile * static_cast<int64_t>(dtype_size(kStored));
  __m512 phase[R][4];
  for (int r = 0; r < R; ++r)
    for (auto& p : phase[r]) p = _mm512_setzero_ps();
  for (int64_t g = 0; g < groups; ++g) {
    const std::byte* group = weight + g * kGroupBytes;
    for (int64_t line = 0; line < kGroupBytes; line += 64) _mm_prefetch(reinterpret_cast<const char*>(group) + kPrefetchBytes + line, _MM_HINT_T0);
    __m512 w[4];
    decode<kStored>(table, group, w);
    for (int r = 0; r < R; ++r)
      for (int j = 0; j < 4; ++j) phase[r][j] = _mm512_fmadd_ps(w[j], _mm512_set1_ps(x[r * stride + g * 4 + j]), phase[r][j]);
  }
  for (int r = 0; r < R; ++r) sum[r] = sum_phases(phase[r]);
}

/// The same from a panel of decoded weights [groups * 4, 16].
template <int R>
inline void panel_block(const float* panel, const float* x, int64_t stride, int64_t groups, __m512 (&sum)[R]) {
  __m512 phase[R][4];
  for (int r = 0; r < R; ++r)
    for (auto& p : phase[r]) p = _mm512_setzero_ps();
  for (int64_t g = 0; g < groups; ++g)
    for (int j = 0; j < 4; ++j) {
      const __m512 w = _mm512_load_ps(panel + (g * 4 + j) * kFeatureTile);
      for (int r = 0; r < R; ++r) phase[r][j] = _mm512_fmadd_ps(w, _mm512_set1_ps(x[r * stride + g * 4 + j]), phase[r][j]);
    }
  for (int r = 0; r < R; ++r) sum[r] = sum_phases(phase[r]);
}

inline __m512 scale_of(const FmaTile::Block& block) {
  return block.mixed_scales != nullptr ? _mm512_load_ps(block.mixed_scales) : _mm512_set1_ps(block.scale);
}

/// total += scale * sum of one block, for R rows.
template <int R>
inline void add_block(const __m512 (&sum)[R], __m512 scale, float* totals) {
  for (int r = 0; r < R; ++r) {
    float* total = totals + r * kFeatureTile;
    _mm512_store_ps(total, _mm512_fmadd_ps(scale, sum[r], _mm512_load_ps(total)));
  }
}

template <DType kStored, int R>
void direct_rows(const FmaTile& tile, const float* x, int64_t stride, float* totals) {
  const DecodeTable table = load_table();
  for (int64_t b = 0; b < tile.num_blocks(); ++b) {
    const FmaTile::Block block = tile.block(b);
    __m512 sum[R];
    direct_block<kStored, R>(table, block.weight, x + block.begin, stride, block.groups, sum);
    add_block<R>(sum, scale_of(block), totals);
  }
}

template <int R>
void panel_rows(const float* panel, const FmaTile::Block& block, const float* x, int64_t stride, int64_t rows, float* totals) {
  int64_t row = 0;
  const __m512 scale = scale_of(block);
  for (; row + R <= rows; row += R) {
    __m512 sum[R];
    panel_block<R>(panel, x + row * stride + block.begin, stride, block.groups, sum);
    add_block<R>(sum, scale, totals + row * kFeatureTile);
  }
  for (; row < rows; ++row) {
    __m512 sum[1];
    panel_block<1>(panel, x + row * stride + block.begin, stride, block.groups, sum);
    add_block<1>(sum, scale, totals + row * kFeatureTile);
  }
}

template <DType kStored>
void multiply(const FmaTile& tile, const float* x, int64_t stride, int64_t rows, float* totals) {
  switch (rows) {
    case 1: return direct_rows<kStored, 1>(tile, x, stride, totals);
    case 2: return direct_rows<kStored, 2>(tile, x, stride, totals);
    case 3: return direct_rows<kStored, 3>(tile, x, stride, totals);
    case kDirectRows: return direct_rows<kStored, 4>(tile, x, stride, totals);
    default: break;
  }
  constexpr int64_t kGroupBytes = kTileGroup * kFeatureTile * static_cast<int64_t>(dtype_size(kStored));
  const DecodeTable table = load_table();
  alignas(64) float panel[ops::kScaleBlock * kFeatureTile];
  for (int64_t b = 0; b < tile.num_blocks(); ++b) {
    const FmaTile::Block block = tile.block(b);
    for (int64_t g = 0; g < block.groups; ++g) {
      __m512 w[4];
      decode<kStored>(table, block.weight + g * kGroupBytes, w);
      for (int j = 0; j < 4; ++j) _mm512_store_ps(panel + (g * 4 + j) * kFeatureTile, w[j]);
    }
    panel_rows<kPanelRows>(panel, block, x, stride, rows, totals);
  }
}

}  // namespace

void multiply_tile_avx512(const FmaTile& tile, const float* x, int64_t stride, int64_t rows, float* totals) {
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
