#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "backends/cpu/packed_linear.h"
#include "base/float_convert.h"

// The arithmetic "cpu.fma" of linear layers, shared by all vector instruction sets, by prompt and decode rows, and by any number of rows.
//
// For output feature n and row x, within each block of 128 columns (a scale block), with one fused multiply-add a column:
//   phase_j = sum over the columns k = j mod 4 of the block, in order          j = 0 .. 3
//   total   = fma(scale, (phase_0 + phase_1) + (phase_2 + phase_3), total)     block after block
// Vector lanes are features, so a wider machine has more lanes and the same bits.
//
// Rows come multiplied by 2^60 (kInputScale), and e4m3 weights enter as their value times 2^-120: that is what their bits are when they are
// moved to the places of an f32's sign, exponent and mantissa, subnormals included, without a table or a product. `scale` takes both powers
// back. Powers of two change no bits of a sum while nothing leaves the range of f32, so inputs may be as large as 2^67 (1e20).
//
// Packed weights follow it: tiles of 16 features, in a tile groups of 4 columns. Elements of 2 and 4 bytes stand as [column][feature] in a group;
// e4m3 codes as [feature][column], so that four columns of a feature are one 32-bit element.

namespace quern::cpu {

inline constexpr int64_t kTileGroup = 4;  // columns

/// Where the code of (column j of the group, feature n of the tile) stands in a group of e4m3.
constexpr int64_t e4m3_place(int64_t column, int64_t feature) { return feature * kTileGroup + column; }

/// The weights of 16 output features, block by block.
class FmaTile {
 public:
  struct Block {
    int64_t begin = 0, groups = 0;          // first column, number of groups
    const std::byte* weight = nullptr;
    float scale = 1.0f;                     // with the powers of two that inputs and weights carry
    const float* mixed_scales = nullptr;    // [16] where the tile's features lie in two rows of scale blocks; `scale` is then unused
  };

  FmaTile(const LinearView& weight, int64_t tile, float* scale_memory) : weight_(weight), first_(tile * kFeatureTile), scale_memory_(scale_memory) {
    const auto element = static_cast<int64_t>(dtype_size(stored_dtype(weight.scheme)));
    column_bytes_ = kFeatureTile * element;
    base_ = weight.weight + first_ * weight.in_features * element;
    const int64_t last = std::min(first_ + kFeatureTile, weight.out_features) - 1;
    unit_ = (ops::is_fp8(weight.scheme) ? 0x1p120f : 1.0f) / kInputScale;
    per_block_ = weight.scheme == ops::WeightScheme::kFp8Block;
    mixed_ = per_block_ && (weight.row_offset + first_) / ops::kScaleBlock != (weight.row_offset + last) / ops::kScaleBlock;
  }

  /// The powers of two in Block::scale.
  [[nodiscard]] float unit() const { return unit_; }
  [[nodiscard]] DType stored() const { return stored_dtype(weight_.scheme); }
  [[nodiscard]] int64_t num_blocks() const { return (weight_.column_offset + weight_.in_features + ops::kScaleBlock - 1) / ops::kScaleBlock; }
  [[nodiscard]] Block block(int64_t index) const {
    const int64_t begin = std::max<int64_t>(index * ops::kScaleBlock - weight_.column_offset, 0);
    const int64_t end = std::min((index + 1) * ops::kScaleBlock - weight_.column_offset, weight_.in_features);
    Block block{begin, (end - begin) / kTileGroup, base_ + begin * column_bytes_, unit_, nullptr};
    if (mixed_) {
      for (int64_t n = 0; n < kFeatureTile; ++n) scale_memory_[n] = unit_ * weight_.block_scale(std::min(first_ + n, weight_.out_features - 1), begin);
      block.mixed_scales = scale_memory_;
    } else if (per_block_) {
      block.scale = unit_ * weight_.block_scale(first_, begin);
    }
    return block;
  }

 private:
  const LinearView& weight_;
  int64_t first_;
  float* scale_memory_;  // [16], aligned to 64 bytes
  int64_t column_bytes_ = 0;
  const std::byte* base_ = nullptr;
  float unit_ = 1.0f;
  bool per_block_ = false, mixed_ = false;
};

/// totals[row * 16 + n] += the products of `rows` rows; x f32 times kInputScale, a row every `stride` elements; totals aligned to 64 bytes.
void multiply_tile_avx2(const FmaTile& tile, const float* x, int64_t stride, int64_t rows, float* totals);
void multiply_tile_avx512(const FmaTile& tile, const float* x, int64_t stride, int64_t rows, float* totals);
/// The same sums by other arithmetics, of f32 sums of bf16 products: x bf16 and not multiplied.
/// "cpu.avx512_bf16": a row every `stride` elements.
void multiply_tile_avx512_bf16(const FmaTile& tile, const bf16* x, int64_t stride, int64_t rows, float* totals);
/// "cpu.amx": a row every `stride_bytes`, readable up to the next multiple of 16 rows.
void multiply_tile_amx(const FmaTile& tile, const bf16* x, int64_t stride_bytes, int64_t rows, float* totals);

}  // namespace quern::cpu
