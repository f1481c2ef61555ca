#pragma once

#include <algorithm>
#include <array>
#include <string_view>

#include "backends/cpu/thread_pool.h"
#include "ops/linear.h"
#include "ops/rows.h"

namespace quern::cpu {

/// Which code multiplies, and so in which order weights are packed. kPlain keeps the rows as stored; the others share the tiles of fma_tile.h, and the vector paths
/// its arithmetic. kAvx512Bf16 takes all rows by dot products of bf16, kAmx by AMX, kAmxPrompt the prompt rows alone and the others by kAvx512Bf16.
enum class LinearPath : uint8_t { kPlain, kAvx2, kAvx512, kAvx512Bf16, kAmx, kAmxPrompt };
constexpr LinearPath path_of(LinearPath path, ops::RowKind kind) {
  if (path != LinearPath::kAmxPrompt) return path;
  return kind == ops::RowKind::kPrompt ? LinearPath::kAmx : LinearPath::kAvx512Bf16;
}
constexpr bool uses_amx(LinearPath path) { return path == LinearPath::kAmx || path == LinearPath::kAmxPrompt; }
/// Rows enter as bf16, weights as their bf16 value.
constexpr bool multiplies_bf16(LinearPath path) { return path == LinearPath::kAvx512Bf16 || uses_amx(path); }

/// Rows whose activations a linear layer takes at a time: each piece of weight is decoded once for so many rows.
inline constexpr int64_t kRowTile = 64, kMaxRowTile = 256;
constexpr int64_t row_tile(LinearPath path) { return multiplies_bf16(path) ? kMaxRowTile : kRowTile; }
/// Rows of scratch memory that the rows of a tile take: AMX reads whole tile registers.
constexpr int64_t rows_in_memory(LinearPath path, int64_t rows) { return uses_amx(path) ? (rows + 15) / 16 * 16 : rows; }
constexpr int64_t max_rows_in_memory(LinearPath path, int64_t max_rows) { return rows_in_memory(path, std::min(max_rows, row_tile(path))); }

/// visit(first, n, path) for tiles that cover all rows, each on the path of its rows' kind; padding goes with decode rows.
template <class Visit>
void for_each_row_tile(const ops::Rows& rows, LinearPath path, const Visit& visit) {
  const auto visit_rows = [&](int64_t first, int64_t end, ops::RowKind kind) {
    const LinearPath own = path_of(path, kind);
    for (; first < end; first += row_tile(own)) visit(first, std::min(row_tile(own), end - first), own);
  };
  if (path != LinearPath::kAmxPrompt) return visit_rows(0, rows.num_rows, ops::RowKind::kPrompt);
  int64_t done = 0, end = 0;  // prompt rows of successive runs are one stretch
  for (const ops::RowRun& run : rows.runs) {
    if (run.kind != ops::RowKind::kPrompt || run.num_rows == 0) continue;
    if (run.first_row != end) {
      visit_rows(done, end, ops::RowKind::kPrompt);
      visit_rows(end, run.first_row, ops::RowKind::kDecode);
      done = run.first_row;
    }
    end = run.first_row + run.num_rows;
  }
  visit_rows(done, end, ops::RowKind::kPrompt);
  visit_rows(end, rows.num_rows, ops::RowKind::kDecode);
}

/// What rows are multiplied with before a linear layer takes them (fma_tile.h).
inline constexpr float kInputScale = 0x1p60f;
constexpr float input_scale(LinearPath path) { return path == LinearPath::kAvx2 || path == LinearPath::kAvx512 ? kInputScale : 1.0f; }
/// Elements from one row to the next in the scratch memory of such rows: aligned, and no multiple of 4 KiB, which would put the same columns of all
/// rows into one set of the first-level cache.
constexpr int64_t row_stride(int64_t in_features) { return (in_features + 15) / 16 * 16 + 16; }

/// The tied embedding table is read by `embed` and `head`: both must know its order.
constexpr std::string_view table_layout(LinearPath path) { return path == LinearPath::kPlain ? "rows" : "cpu.tile16"; }

/// One linear weight as kernels read it.
struct LinearView {
  int64_t out_features = 0, in_features = 0;
  ops::WeightScheme scheme = ops::WeightScheme::kBF16;
  const std::byte* weight = nullptr;          // [out_features, in_features] as stored, or tiles
  const float* scale = nullptr;               // as in ops::LinearSource
  int64_t row_offset = 0, column_offset = 0;  // inside the first scale block, below 128
  int64_t scale_columns = 0;                  // of the block scheme
  LinearPath path = LinearPath::kPlain;

  /// The scale of the block that holds (row, column).
  [[nodiscard]] float block_scale(int64_t row, int64_t column) const {
    return scale[(row_offset + row) / ops::kScaleBlock * scale_columns + (column_offset + column) / ops::kScaleBlock];
  }
};

/// One weight's place in a packed buffer: the rows as stored or tiles of 16 features (the last one filled up with zeros), at the next multiple of 256 bytes the f32 scales, then the offsets into
/// the scale grid, which are known only when the weight is packed.
class PackedLinear {
 public:
  PackedLinear(const ops::LinearShape& shape, size_t offset_bytes, LinearPath path);

  /// One past the last byte, a multiple of 256: where the next weight begins.
  [[nodiscard]] size_t end_bytes() const { return end_; }
  void pack(const ops::LinearSource& source, ops::Buffer& packed, ThreadPool& pool) const;
  [[nodiscard]] LinearView view(const ops::Buffer& packed, LinearPath path) const;
  [[nodiscard]] LinearView view(const ops::Buffer& packed) const { return view(packed, path_of(path_, ops::RowKind::kDecode)); }

 private:
  void pack_tiles(const ops::LinearSource& source, std::byte* to, ThreadPool& pool) const;

  ops::LinearShape shape_;
  LinearPath path_;
  size_t weight_at_, scale_at_, offsets_at_, end_;
};

/// Value of weight row `row`, columns [begin, end), scale included.
void decode_row(const LinearView& weight, int64_t row, int64_t begin, int64_t end, float* out);

inline constexpr int64_t kFeatureTile = 16;

/// y[row * kFeatureTile + n] = sum_k W[first + n, k] x[row, k] for `features` <= 16 features and `rows` <= row_tile(path) rows; x f32 times
/// input_scale(path), a row every row_stride(in) elements, as prepare_inputs leaves it; y aligned to 64 bytes.
/// On the plain path: partial sums over the 128 columns of a scale block in 16 lanes, scaled and added in order of the blocks, per lane; then the lanes.
/// On the others: fma_tile.h. The arithmetic of a row knows nothing of other rows.
/// On kAvx512Bf16 and kAmx: multiply_avx512_bf16.cpp, multiply_amx.cpp.
void multiply_tile(const LinearView& weight, const float* x, int64_t rows, int64_t first, int64_t features, float* y);

/// store(w, row, first, features, y) for every weight w, row and tile: y holds the `features` output features from `first` on of W_w x; on the
/// pool's threads, each tile once. All weights take the same inputs.
template <size_t N, class Store>
void linear(ThreadPool& pool, const std::array<LinearView, N>& weights, const float* x, int64_t rows, const Store& store) {
  const auto num_tiles = [&](size_t w) { return (weights[w].out_features + kFeatureTile - 1) / kFeatureTile; };
  int64_t all_tiles = 0;
  for (size_t w = 0; w < N; ++w) all_tiles += num_tiles(w);
  pool.parallel_for(all_tiles, kFeatureTile * weights[0].in_features * (rows + 2), [&](int64_t begin, int64_t end, int) {
    alignas(64) float y[kMaxRowTile * kFeatureTile];
    for (size_t w = 0; w < N; begin = std::max<int64_t>(begin - num_tiles(w), 0), end -= num_tiles(w), ++w)
      for (int64_t tile = begin; tile < std::min(end, num_tiles(w)); ++tile) {
        const int64_t first = tile * kFeatureTile, features = std::min(kFeatureTile, weights[w].out_features - first);
        multiply_tile(weights[w], x, rows, first, features, y);
        for (int64_t row = 0; row < rows; ++row) store(w, row, first, features, y + row * kFeatureTile);
      }
  });
}

}  // namespace quern::cpu
