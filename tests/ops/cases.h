#pragma once

#include <array>
#include <cstdint>
#include <string>

#include "ops/linear.h"

// The problems on which every op is checked: shapes of the model scaled down, and nasty ones.

namespace quern::ops::testing {

inline constexpr std::array kSchemes = {WeightScheme::kF32,      WeightScheme::kBF16,       WeightScheme::kF16,
                                        WeightScheme::kFp8Block, WeightScheme::kFp8Channel, WeightScheme::kFp8Tensor};

/// Extent of a linear layer and where it lies in its scale grid (a shard's cut need not be on a block for the kernels).
struct LinearExtent {
  int64_t out, in, row_offset, column_offset;
};
inline constexpr std::array kLinearExtents = {
    LinearExtent{256, 384, 0, 0},     // whole blocks
    LinearExtent{200, 300, 0, 0},     // ragged in both directions
    LinearExtent{200, 300, 64, 100},  // begins inside a block
    LinearExtent{1, 1, 0, 0},         // one element
    LinearExtent{17, 129, 127, 1},    // one past a tile, one past a block
    LinearExtent{48, 640, 0, 0},      // in_proj_a of 48 heads
    LinearExtent{0, 128, 0, 0},       // an empty shard
};
/// Nothing, one, a few, a tile, one past a tile, several tiles.
inline constexpr std::array<int64_t, 6> kRowCounts = {0, 1, 3, 64, 65, 130};

/// Heads of a GDN layer: nv / nk of 1, 2, 3 and maps that begin in the middle of a group (uneven tensor parallelism).
struct GdnExtent {
  int64_t nk, nv, dk, dv;
  std::array<int, 48> k_head;
};
inline constexpr std::array kGdnExtents = {
    GdnExtent{2, 6, 16, 16, {0, 0, 0, 1, 1, 1}},  // r = 3
    GdnExtent{2, 4, 16, 24, {0, 0, 1, 1}},        // r = 2, d_k != d_v
    GdnExtent{3, 3, 20, 16, {0, 1, 2}},           // r = 1, d_k not a multiple of the lanes
    GdnExtent{2, 4, 16, 16, {0, 1, 1, 1}},        // a shard that begins inside a group of three
};
/// Heads of the model's size, three value heads to a key head.
inline constexpr GdnExtent kGdnRealHeads{1, 3, 128, 128, {0, 0, 0}};
/// All heads of a layer of Qwen3.6-27B.
inline constexpr GdnExtent kGdnLayer = [] {
  GdnExtent extent{16, 48, 128, 128, {}};
  for (int head = 0; head < 48; ++head) extent.k_head[static_cast<size_t>(head)] = head / 3;
  return extent;
}();
/// Shards of it: one head, one that begins inside a group of three, one that has parts of three groups.
inline constexpr std::array kGdnRealShards = {GdnExtent{1, 1, 128, 128, {0}}, GdnExtent{2, 4, 128, 128, {0, 1, 1, 1}}, GdnExtent{3, 5, 128, 128, {0, 1, 1, 1, 2}}};
/// Sequence lengths around the 64-grid.
inline constexpr std::array<int64_t, 6> kGdnLengths = {1, 63, 64, 65, 128, 200};

/// Keys per row around the split of 512.
inline constexpr std::array<int64_t, 6> kAttentionLengths = {1, 63, 511, 512, 513, 1100};

}  // namespace quern::ops::testing
