// multiply_tile (fma_tile.h) for one kind of vector register. Included below a target pragma, after everything that is to stay portable: see
// multiply_avx2.cpp. Nothing here is shared between instruction sets, since every function has Vector in its type.
//
// Few rows multiply weights decoded in registers. More rows share a panel of one block of columns, decoded once into the first-level cache; of a
// panel one phase is summed at a time, which leaves all registers to rows.

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

  /// Weights of a group's four columns, `piece` of the tile.
  template <DType kStored>
  static void decode(const std::byte* group, int piece, Register (&w)[4]) {
    if constexpr (kStored == DType::kE4M3) {
      Vector::decode_e4m3(group + piece * kWidth * kTileGroup, w);
    } else {
      constexpr auto kElement = static_cast<int64_t>(dtype_size(kStored));
      for (int j = 0; j < 4; ++j) w[j] = Vector::template load<kStored>(group + (j * kFeatureTile + piece * kWidth) * kElement);
    }
  }
  static Register sum_phases(const Register (&phase)[4]) { return Vector::add(Vector::add(phase[0], phase[1]), Vector::add(phase[2], phase[3])); }

  /// totals += scale * sum of one block for a piece of the tile.
  static void add_block(const FmaTile::Block& block, int piece, Register sum, float* totals) {
    const Register scale = block.mixed_scales != nullptr ? Vector::load_f32(block.mixed_scales + piece * kWidth) : Vector::broadcast(block.scale);
    float* total = totals + piece * kWidth;
    Vector::store(total, Vector::fma(scale, sum, Vector::load_f32(total)));
  }

  /// R rows, weights decoded in registers, P pieces of the tile at a time.
  template <DType kStored, int R, int P>
  static void direct_rows(const FmaTile& tile, const float* x, int64_t stride, float* totals) {
    for (int64_t b = 0; b < tile.num_blocks(); ++b) {
      const FmaTile::Block block = tile.block(b);
      for (int piece = 0; piece < kPieces; piece += P) {
        Register phase[P][R][4];
        for (auto& pieces : phase)
          for (auto& row : pieces)
            for (Register& p : row) p = Vector::zero();
        const float* inputs = x + block.begin;
        for (int64_t g = 0; g < block.groups; ++g, inputs += kTileGroup) {
          const std::byte* group = block.weight + g * group_bytes<kStored>();
          if (piece == 0)
            for (int64_t line = 0; line < group_bytes<kStored>(); line += 64)
              _mm_prefetch(reinterpret_cast<const char*>(group) + kPrefetchBytes + line, _MM_HINT_T0);
          for (int p = 0; p < P; ++p) {
            Register w[4];
            decode<kStored>(group, piece + p, w);
            for (int r = 0; r < R; ++r)
              for (int j = 0; j < 4; ++j) phase[p][r][j] = Vector::fma(w[j], Vector::broadcast(inputs[r * stride + j]), phase[p][r][j]);
          }
        }
        for (int p = 0; p < P; ++p)
          for (int r = 0; r < R; ++r) add_block(block, piece + p, sum_phases(phase[p][r]), totals + r * kFeatureTile);
      }
    }
  }
  template <DType kStored, int R>
  static void direct(const FmaTile& tile, const float* x, int64_t stride, float* totals) {
    constexpr int kFit = kPieces * R * 4 <= Vector::kDirectSums ? kPieces : 1;
    direct_rows<kStored, R, kFit>(tile, x, stride, totals);
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
    if (rows == 1) return direct<kStored, 1>(tile, x, stride, totals);
    if (rows == 2) return direct<kStored, 2>(tile, x, stride, totals);
    if constexpr (Vector::kDirectSums >= 16) {
      if (rows == 3) return direct<kStored, 3>(tile, x, stride, totals);
      if (rows == 4) return direct<kStored, 4>(tile, x, stride, totals);
    }
    alignas(64) float panel[ops::kScaleBlock * kFeatureTile];
    for (int64_t b = 0; b < tile.num_blocks(); ++b) {
      const FmaTile::Block block = tile.block(b);
      for (int64_t g = 0; g < block.groups; ++g) {
        const std::byte* group = block.weight + g * group_bytes<kStored>();
        for (int64_t line = 0; line < group_bytes<kStored>(); line += 64)
          _mm_prefetch(reinterpret_cast<const char*>(group) + kPrefetchBytes + line, _MM_HINT_T0);
        for (int piece = 0; piece < kPieces; ++piece) {
          Register w[4];
          decode<kStored>(group, piece, w);
          for (int j = 0; j < 4; ++j) Vector::store(panel + (j * block.groups + g) * kFeatureTile + piece * kWidth, w[j]);
        }
      }
      all_panel_rows<Vector::kPanelRows>(panel, block, x + block.begin, stride, rows, totals);
    }
  }
};

}  // namespace quern::cpu
