// multiply_tile (fma_tile.h) for one kind of vector register. Included below a target pragma, after everything that is to stay portable: see
// multiply_avx2.cpp. Nothing here is shared between instruction sets, since every function has Vector in its type.
//
// Few rows multiply weights decoded in registers: integer units decode beside the multipliers. More rows share a panel of one block of columns, decoded
// once into the first-level cache; of a panel one phase is summed at a time, which leaves all registers to rows.

namespace quern::cpu {

template <class Vector>
class MultiplyLoops {
 public:
  static void multiply(const FmaTile& tile, const float* x, int64_t stride, int64_t rows, float* totals) {
    switch (tile.stored()) {
      case DType::kE4M3: return multiply_stored<DType::kE4M3>(tile, x, stride, rows, totals);
      case DType::kBF16: return multiply_stored<DType::kBF16>(tile, x, stride, rows, totals);
      case DType::kF16: return multiply_stored<DType::kF16>(tile, x, stride, rows, totals);
      case DType::kF32: return multiply_stored<DType::kF32>(tile, x, stride, rows, totals);
      case DType::kE5M2: case DType::kI64: case DType::kI32: case DType::kU8: case DType::kBool: break;
    }
    CHECK_UNREACHABLE();
  }

 private:
  using Register = typename Vector::Register;
  static constexpr int64_t kWidth = Vector::kWidth;
  static constexpr int kPieces = static_cast<int>(kFeatureTile / kWidth);  // registers a tile
  static constexpr int64_t kPrefetchBytes = 2048;  // ahead in the stream of one tile; 1 to 4 KiB measure alike (Xeon, 2 cores, 2026-11-30)

  template <DType kStored>
  static constexpr int64_t group_bytes() { return kTileGroup * kFeatureTile * static_cast<int64_t>(dtype_size(kStored)); }

  template <DType kStored>
  static void prefetch(const std::byte* group) {
    for (int64_t line = 0; line < group_bytes<kStored>(); line += 64)
      _mm_prefetch(reinterpret_cast<const char*>(group) + kPrefetchBytes + line, _MM_HINT_T0);
  }
  /// Weights of the columns First, First + 4 / C, ... of a group, `piece` of the tile: all four, or the two even or odd ones.
  template <DType kStored, int First, int C>
  static void decode(const std::byte* group, int piece, Register (&w)[C]) {
    if constexpr (kStored == DType::kE4M3) {
      Vector::template decode_e4m3<First>(group + piece * kWidth * kTileGroup, w);
    } else {
      constexpr auto kElement = static_cast<int64_t>(dtype_size(kStored));
      for (int i = 0; i < C; ++i) w[i] = Vector::template load<kStored>(group + ((First + i * 4 / C) * kFeatureTile + piece * kWidth) * kElement);
    }
  }
  /// totals += scale * sum of one block for a piece of the tile.
  static void add_block(const FmaTile::Block& block, int piece, Register sum, float* totals) {
    const Register scale = block.mixed_scales != nullptr ? Vector::load_f32(block.mixed_scales + piece * kWidth) : Vector::broadcast(block.scale);
    float* total = totals + piece * kWidth;
    Vector::store(total, Vector::fma(scale, sum, Vector::load_f32(total)));
  }

  /// Sums over one block of R rows and C columns of each group.
  template <DType kStored, int R, int First, int C>
  static void sum_columns(const FmaTile::Block& block, int piece, const float* x, int64_t stride, Register (&sum)[R][C]) {
    for (int r = 0; r < R; ++r)
      for (int i = 0; i < C; ++i) sum[r][i] = Vector::zero();
    x += block.begin + First;
    const std::byte* group = block.weight;
    for (int64_t g = 0; g < block.groups; ++g, x += kTileGroup, group += group_bytes<kStored>()) {
      if (First == 0 && piece == 0) prefetch<kStored>(group);
      Register w[C];
      decode<kStored, First>(group, piece, w);
      for (int r = 0; r < R; ++r)
        for (int i = 0; i < C; ++i) sum[r][i] = Vector::fma(w[i], Vector::broadcast(x[r * stride + i * 4 / C]), sum[r][i]);
    }
  }
  /// R rows, weights decoded in registers: a piece of the tile after the other, and where the sums of R rows fill the registers even columns
  /// after odd ones, which costs no decoding.
  template <DType kStored, int R>
  static void direct_rows(const FmaTile& tile, const float* x, int64_t stride, float* totals) {
    for (int64_t b = 0; b < tile.num_blocks(); ++b) {
      const FmaTile::Block block = tile.block(b);
      for (int piece = 0; piece < kPieces; ++piece) {
        if constexpr (R * 4 <= Vector::kDirectSums) {
          Register sum[R][4];
          sum_columns<kStored, R, 0>(block, piece, x, stride, sum);
          for (int r = 0; r < R; ++r)
            add_block(block, piece, Vector::add(Vector::add(sum[r][0], sum[r][1]), Vector::add(sum[r][2], sum[r][3])), totals + r * kFeatureTile);
        } else {
          Register even[R][2], odd[R][2];
          sum_columns<kStored, R, 0>(block, piece, x, stride, even);
          sum_columns<kStored, R, 1>(block, piece, x, stride, odd);
          for (int r = 0; r < R; ++r)
            add_block(block, piece, Vector::add(Vector::add(even[r][0], odd[r][0]), Vector::add(even[r][1], odd[r][1])), totals + r * kFeatureTile);
        }
      }
    }
  }

  /// All rows at once; there are at most R.
  template <DType kStored, int R>
  static void direct(const FmaTile& tile, const float* x, int64_t stride, int64_t rows, float* totals) {
    if (rows == R) return direct_rows<kStored, R>(tile, x, stride, totals);
    if constexpr (R > 1) direct<kStored, R - 1>(tile, x, stride, rows, totals);
  }

  /// R rows and all pieces of one phase of a panel. A panel is [4 phases][groups][16].
  template <int R>
  static void sum_phase(const float* panel, const float* x, int64_t stride, int64_t groups, Register (&sum)[R][kPieces]) {
    for (auto& row : sum)
      for (Register& s : row) s = Vector::zero();
    for (int64_t g = 0; g < groups; ++g, panel += kFeatureTile, x += kTileGroup) {
      Register w[kPieces];
      for (int p = 0; p < kPieces; ++p) w[p] = Vector::load_f32(panel + p * kWidth);
      for (int r = 0; r < R; ++r) {
        const Register input = Vector::broadcast(x[r * stride]);
        for (int p = 0; p < kPieces; ++p) sum[r][p] = Vector::fma(w[p], input, sum[r][p]);
      }
    }
  }
  template <int R>
  static void panel_rows(const float* panel, const FmaTile::Block& block, const float* x, int64_t stride, float* totals) {
    alignas(64) float first[2][R * kFeatureTile];  // of phases 0 and 1, and of 2 and 3
    for (int phase = 0; phase < 4; ++phase) {
      for (int r = 0; r < R; ++r)  // a quarter of the block's columns of the next rows, which lie in the second-level cache
        for (int64_t column = 0; column < ops::kScaleBlock / 4; column += 16)
          _mm_prefetch(reinterpret_cast<const char*>(x + (R + r) * stride + phase * ops::kScaleBlock / 4 + column), _MM_HINT_T0);
      Register sum[R][kPieces];
      sum_phase<R>(panel + phase * block.groups * kFeatureTile, x + phase, stride, block.groups, sum);
      float* pair = first[phase / 2];
      for (int r = 0; r < R; ++r)
        for (int p = 0; p < kPieces; ++p) {
          float* place = pair + r * kFeatureTile + p * kWidth;
          if (phase % 2 == 0) Vector::store(place, sum[r][p]);
          else Vector::store(place, Vector::add(Vector::load_f32(place), sum[r][p]));
        }
    }
    for (int r = 0; r < R; ++r)
      for (int p = 0; p < kPieces; ++p) {
        const int64_t place = r * kFeatureTile + p * kWidth;
        add_block(block, p, Vector::add(Vector::load_f32(first[0] + place), Vector::load_f32(first[1] + place)), totals + r * kFeatureTile);
      }
  }
  /// As many rows at a time as the registers hold, then fewer.
  template <int R>
  static void all_panel_rows(const float* panel, const FmaTile::Block& block, const float* x, int64_t stride, int64_t rows, float* totals) {
    int64_t row = 0;
    for (; row + R <= rows; row += R) panel_rows<R>(panel, block, x + row * stride, stride, totals + row * kFeatureTile);
    if constexpr (R > 1)
      if (row < rows) all_panel_rows<R - 1>(panel, block, x + row * stride, stride, rows - row, totals + row * kFeatureTile);
  }

  template <DType kStored>
  static void multiply_stored(const FmaTile& tile, const float* x, int64_t stride, int64_t rows, float* totals) {
    if (rows <= Vector::kDirectRows) return direct<kStored, Vector::kDirectRows>(tile, x, stride, rows, totals);
    alignas(64) float panel[ops::kScaleBlock * kFeatureTile];
    for (int64_t b = 0; b < tile.num_blocks(); ++b) {
      const FmaTile::Block block = tile.block(b);
      for (int64_t g = 0; g < block.groups; ++g) {
        const std::byte* group = block.weight + g * group_bytes<kStored>();
        prefetch<kStored>(group);
        for (int piece = 0; piece < kPieces; ++piece) {
          Register w[4];
          decode<kStored, 0>(group, piece, w);
          for (int j = 0; j < 4; ++j) Vector::store(panel + (j * block.groups + g) * kFeatureTile + piece * kWidth, w[j]);
        }
      }
      all_panel_rows<Vector::kPanelRows>(panel, block, x + block.begin, stride, rows, totals);
    }
  }
};

}  // namespace quern::cpu
