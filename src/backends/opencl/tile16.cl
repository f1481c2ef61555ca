// Packing for the matrix units. "tile16": for each 16 output features (missing ones are zeros), a row of 64 bytes for every 4 codes of K (e4m3, in the order k0, k2, k1, k3)
// or every 2 elements of K (16 bits): 16 features x one dword. So 8 rows are one block read that lands as B operands, and one packing serves every row count.
#include "backends/opencl/numeric.clh"
#include "backends/opencl/weight.clh"

// Tile number t of a weight becomes tile t * tile_step + tile_offset of the packing, so that two weights may alternate.

// An item per dword: axis 0 within a tile, axis 1 the tile. Codes of a block whose scale is zero become zeros, and its scale one, so that scales may be divided.
__kernel void tile_weights(PLACE(const uchar, weight), PLACE(const float, scale), int scales, long row_offset, long out_features, long in_features, int is_e4m3,
                           int tile_step, int tile_offset, PLACE(uint, tiles)) {
  FIND(const uchar, weight);
  FIND(const float, scale);
  FIND(uint, tiles);
  const long per_tile = in_features * 16 / (is_e4m3 ? 4 : 2), at = (long)get_global_id(0), tile = (long)get_global_id(1);
  if (at >= per_tile) return;
  const long feature = tile * 16 + at % 16, row = at / 16;
  uint word = 0;
  if (feature < out_features) {
    if (is_e4m3) {
      const long k = row * 4, columns = in_features / SCALE_BLOCK;
      const __global uchar* p = weight + feature * in_features + k;
      const bool empty = scales == SCALES_BLOCK && scale[(row_offset + feature) / SCALE_BLOCK * columns + k / SCALE_BLOCK] == 0.0f;
      word = empty ? 0u : (uint)p[0] | (uint)p[2] << 8 | (uint)p[1] << 16 | (uint)p[3] << 24;
    } else {
      const __global ushort* p = (const __global ushort*)weight + feature * in_features + row * 2;
      word = (uint)p[0] | (uint)p[1] << 16;
    }
  }
  tiles[(tile * tile_step + tile_offset) * per_tile + at] = word;
}

// scales f32 [tiles, in_features / 128] of the blocks, and factors f32 [tiles * 16] of the features; an item per entry of both, the scales first.
__kernel void tile_scales(PLACE(const float, scale), int scales, long row_offset, long out_features, long in_features, long num_tiles, int tile_step,
                          int tile_offset, PLACE(float, block_scales), PLACE(float, factors)) {
  FIND(const float, scale);
  FIND(float, block_scales);
  FIND(float, factors);
  const long columns = in_features / SCALE_BLOCK, item = (long)get_global_id(0), num_scales = num_tiles * columns;
  if (item < num_scales) {
    const float s = scales == SCALES_BLOCK ? scale[(row_offset + item / columns * 16) / SCALE_BLOCK * columns + item % columns] : 1.0f;
    block_scales[(item / columns * tile_step + tile_offset) * columns + item % columns] = s == 0.0f ? 1.0f : s;
  } else if (item < num_scales + num_tiles * 16) {
    const long feature = item - num_scales;
    factors[(feature / 16 * tile_step + tile_offset) * 16 + feature % 16] = feature >= out_features ? 0.0f : scales == SCALES_CHANNEL ? scale[feature] : scales == SCALES_TENSOR ? scale[0] : 1.0f;
  }
}
