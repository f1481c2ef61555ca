#pragma once

#include <cstdint>

// What the host and the device code of the Hopper linear layers (linear_sm90.cuh) agree on.
//
// Weights are kept in tiles of 128 rows by 128 bytes of K (128 e4m3 or 64 bf16 columns), 16 KB each, in the order that the matrix units read from shared
// memory (rows of 128 bytes, their 16-byte pieces permuted by the row's low three bits), so that a tile is one contiguous copy; the tiles of a row follow K.
// Activations stand the same way: [K / 128 bytes][rows][128 bytes]. One packing serves decode and prompt rows.
//
// Within each group of 16 packed rows the matrix units give a thread rows g and g + 8. Packing therefore puts features 2g and 2g + 1 there or, in mlp_in, the
// gate and the up row of one feature.

namespace quern::cuda::sm90 {

inline constexpr int kTileRows = 128;
inline constexpr int kTileRowBytes = 128;
inline constexpr int kTileBytes = kTileRows * kTileRowBytes;
inline constexpr int kTileScales = 4;  // floats: scale of the even and odd features, or of gate and up; two unused
inline constexpr int kMaxSegments = 4;
inline constexpr int kResidentRows = 4;    // as many decode rows are quantised by every block for itself
inline constexpr int kResidentColumns = 8; // the matrix units take them as
inline constexpr int kMaxPacedColumns = 64;  // up to so many columns the rows of a stage have a barrier of their own
inline constexpr int kMaxResidentBlocks = 46;  // groups of 128 of each of them, at most
inline constexpr int kMaxDecodeRows = 256; // of one launch
/// Places of DecodeArgs::arrivals: of blocks that have quantised their rows, and of those that have finished. Place 0 is nobody's: without it kernels would have other registers.
inline constexpr int kQuantisedAt = 1, kFinishedAt = 2, kNumArrivals = 3;
inline constexpr uint32_t kNothing = 0xffffffffu;  // no sum has these bits: a NaN of arithmetic is 0x7fffffff
inline constexpr int kMaxNormWidth = 8192;
inline constexpr int kQuantisedGroups = 4;  // of a thread of quantise_prompt_rows, at a time
inline constexpr int kMaxQuantisers = 512;  // its threads
inline constexpr int kSideSlice = 5;        // blocks of 128 of K of which side rows are multiplied by one block of threads
inline constexpr int kSideGroups = 12;      // groups of eight of them that a block without tiles multiplies

enum class Epilogue : int32_t {
  kStore,     // bf16
  kResidual,  // bf16(out + bf16(y))
  kSiluUp,    // bf16(bf16(silu(gate)) * up); tiles hold 64 features of both
  kLogits,    // f32
};

/// Consecutive tiles whose features go to one tensor.
struct OutputSegment {
  void* out = nullptr;
  int64_t stride = 0;  // elements between rows
  int32_t first_tile = 0;
  int32_t features = 0;
};

/// in_proj_b and in_proj_a, which decode rows multiply beside the others (side_rows_sm90.cuh): a tile row of bf16 each, b's first.
struct SideRows {
  const void* weight = nullptr;
  int32_t num_b = 0, num_a = 0;
  void *b = nullptr, *a = nullptr;
  float* parts = nullptr;  // [side_units][kMaxDecodeRows][8], kNothing between launches: sums over slices of K
  int32_t blocks = 0;      // where consumers multiply them: so many blocks, the last of a launch, which have no tiles; 0: all
};

/// Groups of eight packed rows that hold `features`; slices of `blocks` of 128 of K; the pairs of both.
constexpr int side_groups(int features) { return (features + 15) / 16 * 2; }
constexpr int side_slices(int blocks) { return (blocks + kSideSlice - 1) / kSideSlice; }
constexpr int side_units(const SideRows& side, int blocks) { return (side_groups(side.num_b) + side_groups(side.num_a)) * side_slices(blocks); }

/// One linear layer.
struct LinearLayer {
  const void* weight = nullptr;      // [tiles][k_blocks] tiles
  const float* scale = nullptr;      // [tiles][k_blocks][kTileScales], e4m3 only
  const float* row_scale = nullptr;  // [tiles * 128] in packed order, where the scheme has one scale a row or a tensor; null otherwise
  int32_t tiles = 0, k_blocks = 0;
  int32_t blocks = 0;                // decode rows: among how many blocks the list of tiles is cut
  Epilogue epilogue = Epilogue::kStore;
  int32_t num_segments = 0;
  OutputSegment segments[kMaxSegments];
  // Decode rows only.
  const void* in = nullptr;     // bf16 [rows][K]; null: x is filled already
  int64_t in_stride = 0;
  const float* norm = nullptr;  // factors 1 + w, or null
  float eps = 0;
  SideRows side;
};

/// One linear layer for up to kMaxDecodeRows decode rows. A launch has one: layers that follow each other in a launch are slower than in launches of their own (decision 0037).
struct DecodeArgs {
  LinearLayer linear;
  int32_t rows = 0;
  int32_t x_rows = 0;              // rows of x, a multiple of 8
  void* x = nullptr;               // e4m3 or bf16 [k_blocks][x_rows] pieces of 128 bytes; not in resident mode
  float* x_scale = nullptr;        // [k_blocks][x_rows], e4m3 only
  void* x16 = nullptr;             // bf16, for side rows
  float* parts = nullptr;          // [grid][2][128][kMaxDecodeRows] at most, kNothing between launches: parts of tiles that several blocks share, left for others to add
  int32_t* arrivals = nullptr;     // [kNumArrivals], zero between launches
  int32_t stages = 0;
  int32_t resident_blocks = 0;
  int32_t norm_floats = 0;         // resident mode: widest norm
};

/// One linear layer for prompt rows.
struct PromptArgs {
  LinearLayer linear;
  int32_t rows = 0, x_rows = 0;
  const void* x = nullptr;
  const float* x_scale = nullptr;
  int32_t stages = 0;
};

/// Norm and quantisation of rows, a block a row.
struct QuantiseArgs {
  const void* in = nullptr;  // bf16 [rows][K]
  int64_t in_stride = 0;
  const int32_t* rows_of = nullptr;  // row i reads this row of `in` (row 0 where it is negative); null: row i
  const float* norm = nullptr;       // factors, or null
  float norm_offset = 0;             // added to each factor: 1 where `norm` holds weights
  float eps = 0;
  int32_t rows = 0, x_rows = 0, k_blocks = 0;  // k_blocks of 128 columns
  int32_t first_block = 0;       // where these columns begin in x
  void* x8 = nullptr;            // e4m3 [blocks][x_rows][128], or null
  float* x_scale = nullptr;      // [blocks][x_rows]
  void* x16 = nullptr;           // bf16 [2 blocks][x_rows][64], or null
  void* out = nullptr;           // bf16 [rows][K], or null
};

/// Tiles that pack_tiles fills from a weight as stored.
struct PackArgs {
  const void* source = nullptr;  // [rows][row_bytes]
  const void* second = nullptr;  // up rows of mlp_in: tiles then hold 64 features of each
  int64_t row_bytes = 0;
  int32_t rows = 0;
  int32_t tiles = 0, k_blocks = 0;
  void* packed = nullptr;
};

/// Scales of tiles: from a grid of blocks (`row_scale` null) or from one value a row or a tensor.
struct PackScalesArgs {
  const float* source = nullptr;   // [blocks][k_blocks], [rows] or [1]
  const float* second = nullptr;
  int32_t rows = 0, tiles = 0, k_blocks = 0;
  int32_t per_row = 0;             // 0: blocks, 1: rows, 2: a tensor
  float* scale = nullptr;          // [tiles][k_blocks][kTileScales]
  float* row_scale = nullptr;      // [tiles * 128]
};

/// Factors 1 + w in f32.
struct PackNormArgs {
  const void* weight = nullptr;
  int32_t is_bf16 = 0;
  int32_t count = 0;
  float* factors = nullptr;
};

/// Blocks of K that one of `grid` blocks meets.
constexpr int resident_blocks(int tiles, int k_blocks, int grid) {
  const int64_t total = int64_t{tiles} * k_blocks;
  const int64_t most = (total + grid - 1) / grid;
  return most < k_blocks ? static_cast<int>(most) : k_blocks;
}
/// Resident mode: rows that a block of K has room for, and the bytes of all of them. The matrix units read kResidentColumns rows: behind a block's own the next one's, which gives columns that nobody looks at.
constexpr int resident_rows(int rows) { return rows <= 2 ? rows : kResidentRows; }
constexpr int resident_bytes(int blocks, int rows) {
  return blocks == 0 ? 0 : (((blocks - 1) * resident_rows(rows) + kResidentColumns) * kTileRowBytes + 1023) / 1024 * 1024;
}
/// Shared memory of a ring stage, and of everything else in a block. Barriers and scales of tiles stand in front, at places that no parameter is needed for.
inline constexpr int kMaxStages = 16, kFrontBytes = 1024;
/// With e4m3 tiles and rows of 33 to 64 rows have rings of their own, so that more tiles are on their way (decision 0048): the rows' has so many stages.
inline constexpr int kRowStages = 5, kSplitColumns = 64;
constexpr bool is_split(int columns, bool e4m3, bool resident) { return columns == kSplitColumns && e4m3 && !resident; }
constexpr int row_stages_bytes(int columns, bool e4m3, bool resident) { return is_split(columns, e4m3, resident) ? kRowStages * (columns * kTileRowBytes + columns * 4) : 0; }
constexpr int stage_bytes(int columns, bool e4m3, bool resident) {
  return kTileBytes + (resident || is_split(columns, e4m3, resident) ? 0 : columns * kTileRowBytes + (e4m3 ? (columns * 4 + 127) / 128 * 128 : 0));
}
constexpr int fixed_bytes(int resident_blocks, int rows, int norm_floats, int sums) {
  return 1024 + kFrontBytes + resident_bytes(resident_blocks, rows) + resident_blocks * kResidentColumns * 4 + norm_floats * 4 + sums * 4;
}

}  // namespace quern::cuda::sm90
