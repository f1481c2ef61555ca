#include <immintrin.h>

#include <algorithm>

#include "backends/cpu/e4m3_bytes.h"
#include "backends/cpu/fma_tile.h"
#include "base/float_convert.h"

// multiply_tile for AMX: rows and weights in bf16, which holds both exactly, sums in f32. Only functions below the pragma use these instructions.
//
// For each block of 128 columns the tile's weights are spread into a panel of column pairs, which all rows share; tile registers hold 16 features of up to
// 64 rows. A row is added up in the order of the columns, in the units' own way, then  total = fma(scale, sum, total)  block after block. Up to 16 rows cost
// about what one costs, so that decode, verify and prompt rows share this arithmetic.
// A compiler sees neither what tile instructions read nor what a configuration reads: a barrier stands before each (g++ 12 drops the stores otherwise).

#pragma GCC push_options
#pragma GCC target("amx-tile,amx-bf16,avx512f,avx512bw,avx512vl,avx512dq,avx512vbmi,fma")

namespace quern::cpu {

namespace {

constexpr int64_t kTileRows = 16, kTileColumns = 32, kGroupRows = 4 * kTileRows;
constexpr int64_t kLine = 64;  // bytes of a tile's row
constexpr int64_t kPrefetchBytes = 4096;  // ahead in the stream of one tile

inline void barrier() { asm volatile("" ::: "memory"); }

struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};
};

/// Two column pairs of 16 features from a group of four columns.
void spread_e4m3(const std::byte* group, std::byte* to) {
  const __m512i low_0 = _mm512_load_si512(kE4m3Bytes.low.data()), low_1 = _mm512_load_si512(kE4m3Bytes.low.data() + 64);
  const __m512i high_0 = _mm512_load_si512(kE4m3Bytes.high.data()), high_1 = _mm512_load_si512(kE4m3Bytes.high.data() + 64);
  const __m512i codes = _mm512_loadu_si512(group);
  const __m512i sign = _mm512_and_si512(codes, _mm512_set1_epi8(static_cast<char>(0x80)));
  const __m512i low = _mm512_permutex2var_epi8(low_0, codes, low_1);
  const __m512i high = _mm512_or_si512(_mm512_permutex2var_epi8(high_0, codes, high_1), sign);
  // In each lane of 16 bytes: pairs 0 and 1 of features 0 and 1, and of features 2 and 3.
  const __m512 first = _mm512_castsi512_ps(_mm512_unpacklo_epi8(low, high)), second = _mm512_castsi512_ps(_mm512_unpackhi_epi8(low, high));
  _mm512_store_ps(to, _mm512_shuffle_ps(first, second, _MM_SHUFFLE(2, 0, 2, 0)));
  _mm512_store_ps(to + kLine, _mm512_shuffle_ps(first, second, _MM_SHUFFLE(3, 1, 3, 1)));
}
void spread_bf16(const std::byte* group, std::byte* to) {
  const auto column = [&](int64_t j) { return _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(group + j * 2 * kFeatureTile))); };
  for (int64_t pair = 0; pair < 2; ++pair)
    _mm512_store_si512(to + pair * kLine, _mm512_or_si512(column(2 * pair), _mm512_slli_epi32(column(2 * pair + 1), 16)));
}

constexpr int64_t kTileFloats = kTileRows * kFeatureTile;
constexpr int64_t kPanelBytes = ops::kScaleBlock / 2 * kLine;

/// The tile registers of this thread: 0 to 3 hold sums, 4 weights, 5 to 7 rows. Where there are no more than 16 rows, those of the rows are as short.
void configure(int64_t rows) {
  static thread_local int64_t configured = 0;
  const int64_t tile_rows = std::min(rows, kTileRows);
  if (configured == tile_rows) return;
  configured = tile_rows;
  TileConfig config;
  for (int i = 0; i < 8; ++i) {
    config.row_bytes[i] = kLine;
    config.rows[i] = static_cast<uint8_t>(i == 4 ? kTileRows : tile_rows);
  }
  asm volatile("" ::"r"(&config) : "memory");
  _tile_loadconfig(&config);
}

/// sums[tile][row * 16 + n] of R tiles of rows: `steps` times 32 columns of x, rows `stride` bytes apart, and of the panel.
template <int R>
void multiply_rows(const std::byte* panel, const std::byte* x, int64_t stride, int64_t steps, float* sums) {
  _tile_zero(0);
  if constexpr (R > 1) _tile_zero(1);
  if constexpr (R > 2) _tile_zero(2);
  if constexpr (R > 3) _tile_zero(3);
  const std::byte* x_1 = x + kTileRows * stride;
  const std::byte* x_2 = x_1 + kTileRows * stride;
  const std::byte* x_3 = x_2 + kTileRows * stride;
  for (int64_t s = 0; s < steps; ++s) {
    const int64_t at = s * kLine;
    _tile_loadd(4, panel + s * kTileRows * kLine, kLine);
    _tile_loadd(5, x + at, stride);
    _tile_dpbf16ps(0, 5, 4);
    if constexpr (R > 1) {
      _tile_loadd(6, x_1 + at, stride);
      _tile_dpbf16ps(1, 6, 4);
    }
    if constexpr (R > 2) {
      _tile_loadd(7, x_2 + at, stride);
      _tile_dpbf16ps(2, 7, 4);
    }
    if constexpr (R > 3) {
      _tile_loadd(5, x_3 + at, stride);
      _tile_dpbf16ps(3, 5, 4);
    }
  }
  _tile_stored(0, sums, kLine);
  if constexpr (R > 1) _tile_stored(1, sums + kTileFloats, kLine);
  if constexpr (R > 2) _tile_stored(2, sums + 2 * kTileFloats, kLine);
  if constexpr (R > 3) _tile_stored(3, sums + 3 * kTileFloats, kLine);
  barrier();
}

/// The same for one tile of rows and four blocks: sums[block][row * 16 + n]. No product waits for the one before it.
void multiply_four_blocks(const std::byte* panels, const std::byte* x, int64_t stride, float* sums) {
  constexpr int64_t kSteps = ops::kScaleBlock / kTileColumns, kBlockBytes = kSteps * kLine;
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int64_t s = 0; s < kSteps; ++s) {
    const std::byte* panel = panels + s * kTileRows * kLine;
    const std::byte* rows = x + s * kLine;
    _tile_loadd(4, panel, kLine);
    _tile_loadd(5, rows, stride);
    _tile_dpbf16ps(0, 5, 4);
    _tile_loadd(4, panel + kPanelBytes, kLine);
    _tile_loadd(6, rows + kBlockBytes, stride);
    _tile_dpbf16ps(1, 6, 4);
    _tile_loadd(4, panel + 2 * kPanelBytes, kLine);
    _tile_loadd(7, rows + 2 * kBlockBytes, stride);
    _tile_dpbf16ps(2, 7, 4);
    _tile_loadd(4, panel + 3 * kPanelBytes, kLine);
    _tile_loadd(5, rows + 3 * kBlockBytes, stride);
    _tile_dpbf16ps(3, 5, 4);
  }
  _tile_stored(0, sums, kLine);
  _tile_stored(1, sums + kTileFloats, kLine);
  _tile_stored(2, sums + 2 * kTileFloats, kLine);
  _tile_stored(3, sums + 3 * kTileFloats, kLine);
  barrier();
}

void spread(const FmaTile& tile, const FmaTile::Block& block, std::byte* panel) {
  const bool fp8 = tile.stored() == DType::kE4M3;
  const int64_t group_bytes = kTileGroup * kFeatureTile * (fp8 ? 1 : 2);
  for (int64_t g = 0; g < block.groups; ++g) {
    const std::byte* group = block.weight + g * group_bytes;
    for (int64_t line = 0; line < group_bytes; line += kLine) _mm_prefetch(reinterpret_cast<const char*>(group) + kPrefetchBytes + line, _MM_HINT_T0);
    if (fp8) spread_e4m3(group, panel + g * 2 * kLine);
    else spread_bf16(group, panel + g * 2 * kLine);
  }
  barrier();
}

/// totals += scale * sums of `rows` rows.
void add_block(const FmaTile& tile, const FmaTile::Block& block, const float* sums, int64_t rows, float* totals) {
  const __m512 carried = block.mixed_scales != nullptr ? _mm512_loadu_ps(block.mixed_scales) : _mm512_set1_ps(block.scale);
  const __m512 scale = _mm512_mul_ps(carried, _mm512_set1_ps(1.0f / tile.unit()));  // powers of two: exact
  for (int64_t row = 0; row < rows; ++row) {
    float* total = totals + row * kFeatureTile;
    _mm512_store_ps(total, _mm512_fmadd_ps(scale, _mm512_load_ps(sums + row * kFeatureTile), _mm512_load_ps(total)));
  }
}

}  // namespace

void multiply_tile_amx(const FmaTile& tile, const bf16* x, int64_t stride_bytes, int64_t rows, float* totals) {
  configure(rows);
  alignas(64) std::byte panels[4 * kPanelBytes];
  alignas(64) float sums[4 * kTileFloats];
  const auto input = [&](const FmaTile::Block& block) { return reinterpret_cast<const std::byte*>(x + block.begin); };
  const int64_t num_blocks = tile.num_blocks();
  for (int64_t b = 0; b < num_blocks;) {
    if (rows <= kTileRows && b + 4 <= num_blocks) {
      const FmaTile::Block four[] = {tile.block(b), tile.block(b + 1), tile.block(b + 2), tile.block(b + 3)};
      if (std::all_of(std::begin(four), std::end(four), [](const FmaTile::Block& block) { return block.groups * kTileGroup == ops::kScaleBlock && block.mixed_scales == nullptr; })) {
        for (int64_t i = 0; i < 4; ++i) spread(tile, four[i], panels + i * kPanelBytes);
        multiply_four_blocks(panels, input(four[0]), stride_bytes, sums);
        for (int64_t i = 0; i < 4; ++i) add_block(tile, four[i], sums + i * kTileFloats, rows, totals);
        b += 4;
        continue;
      }
    }
    const FmaTile::Block block = tile.block(b++);
    spread(tile, block, panels);
    const int64_t steps = block.groups * kTileGroup / kTileColumns;
    for (int64_t first = 0; first < rows; first += kGroupRows) {
      const std::byte* from = input(block) + first * stride_bytes;
      const int64_t count = std::min(kGroupRows, rows - first);
      switch ((count + kTileRows - 1) / kTileRows) {
        case 1: multiply_rows<1>(panels, from, stride_bytes, steps, sums); break;
        case 2: multiply_rows<2>(panels, from, stride_bytes, steps, sums); break;
        case 3: multiply_rows<3>(panels, from, stride_bytes, steps, sums); break;
        default: multiply_rows<4>(panels, from, stride_bytes, steps, sums); break;
      }
      add_block(tile, block, sums, count, totals + first * kFeatureTile);
    }
  }
}

}  // namespace quern::cpu

#pragma GCC pop_options
