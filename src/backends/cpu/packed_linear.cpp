#include "backends/cpu/packed_linear.h"

#include <cstring>

#include "backends/cpu/fma_tile.h"
#include "backends/cpu/numeric.h"

namespace quern::cpu {

using ops::kScaleBlock;
using ops::WeightScheme;

namespace {

struct GridOffsets {
  int64_t row = 0, column = 0;
};

}  // namespace

PackedLinear::PackedLinear(const ops::LinearShape& shape, size_t offset_bytes, LinearPath path) : shape_(shape), path_(path), weight_at_(offset_bytes) {
  const int64_t rows = path == LinearPath::kPlain ? shape.out_features : round_up(shape.out_features, kFeatureTile);
  const size_t weight_bytes = static_cast<size_t>(rows * shape.in_features) * dtype_size(stored_dtype(shape.scheme));
  scale_at_ = static_cast<size_t>(round_up(static_cast<int64_t>(weight_at_ + weight_bytes), 256));
  offsets_at_ = static_cast<size_t>(round_up(static_cast<int64_t>(scale_at_) + ops::max_scales(shape) * 4, 8));
  end_ =
      ops::is_fp8(shape.scheme) ? static_cast<size_t>(round_up(static_cast<int64_t>(offsets_at_ + sizeof(GridOffsets)), 256)) : scale_at_;
}

void PackedLinear::pack_tiles(const ops::LinearSource& source, std::byte* to, ThreadPool& pool) const {
  CHECK(source.column_offset % kTileGroup == 0 && shape_.in_features % kTileGroup == 0);
  CHECK(!uses_amx(path_) || source.column_offset % 32 == 0);
  const auto element = static_cast<int64_t>(dtype_size(source.weight.dtype));
  const int64_t columns = shape_.in_features, tile_bytes = kFeatureTile * columns * element;
  const auto* from = source.weight.data<std::byte>();
  pool.parallel_for(ceil_div(shape_.out_features, kFeatureTile), tile_bytes, [&](int64_t begin, int64_t end, int) {
    for (int64_t tile = begin; tile < end; ++tile)
      for (int64_t n = 0; n < std::min(kFeatureTile, shape_.out_features - tile * kFeatureTile); ++n) {
        const std::byte* row = from + (tile * kFeatureTile + n) * columns * element;
        std::byte* place = to + tile * tile_bytes;
        if (element == 1) {
          for (int64_t k = 0; k < columns; k += kTileGroup) std::memcpy(place + k * kFeatureTile + e4m3_place(0, n), row + k, kTileGroup);
        } else {
          for (int64_t k = 0; k < columns; ++k) std::memcpy(place + (k * kFeatureTile + n) * element, row + k * element, static_cast<size_t>(element));
        }
      }
  });
}

void PackedLinear::pack(const ops::LinearSource& source, ops::Buffer& packed, ThreadPool& pool) const {
  ops::check_source(source, shape_);
  CHECK(end_ <= packed.size_bytes());
  const GridOffsets offsets{source.row_offset % kScaleBlock, source.column_offset % kScaleBlock};
  if (!source.weight.empty()) {
    if (path_ == LinearPath::kPlain) std::memcpy(packed.address() + weight_at_, source.weight.data<std::byte>(), source.weight.size_bytes());
    else pack_tiles(source, packed.address() + weight_at_, pool);
  }
  if (!ops::is_fp8(shape_.scheme)) return;
  if (!source.scale.empty()) std::memcpy(packed.address() + scale_at_, source.scale.data<std::byte>(), source.scale.size_bytes());
  std::memcpy(packed.address() + offsets_at_, &offsets, sizeof(offsets));
}

LinearView PackedLinear::view(const ops::Buffer& packed, LinearPath path) const {
  LinearView view{shape_.out_features, shape_.in_features, shape_.scheme, packed.address() + weight_at_};
  view.path = path;
  if (!ops::is_fp8(shape_.scheme)) return view;
  GridOffsets offsets;
  std::memcpy(&offsets, packed.address() + offsets_at_, sizeof(offsets));
  view.scale = reinterpret_cast<const float*>(packed.address() + scale_at_);
  view.row_offset = offsets.row;
  view.column_offset = offsets.column;
  view.scale_columns = ops::scale_blocks(offsets.column, shape_.in_features);
  return view;
}

void decode_row(const LinearView& weight, int64_t row, int64_t begin, int64_t end, float* out) {
  const DType dtype = stored_dtype(weight.scheme);
  if (weight.path == LinearPath::kPlain) {
    load_f32(weight.weight + static_cast<size_t>(row * weight.in_features + begin) * dtype_size(dtype), dtype, end - begin, out);
  } else {
    const auto element = static_cast<int64_t>(dtype_size(dtype));
    const std::byte* tile = weight.weight + row / kFeatureTile * kFeatureTile * weight.in_features * element;
    const int64_t n = row % kFeatureTile;
    for (int64_t k = begin; k < end; ++k) {
      const int64_t place = element == 1 ? k / kTileGroup * kTileGroup * kFeatureTile + e4m3_place(k % kTileGroup, n) : (k * kFeatureTile + n) * element;
      load_f32(tile + place, dtype, 1, out + k - begin);
    }
  }
  if (weight.scheme == WeightScheme::kFp8Block) {
    for (int64_t k = begin; k < end; ++k) out[k - begin] *= weight.block_scale(row, k);
  } else if (ops::is_fp8(weight.scheme)) {
    const float scale = weight.scale[weight.scheme == WeightScheme::kFp8Channel ? row : 0];
    for (int64_t k = begin; k < end; ++k) out[k - begin] *= scale;
  }
}

namespace {

/// y of one tile by the vector paths.
void multiply_fma_tile(const LinearView& weight, const float* x, int64_t rows, int64_t first, int64_t features, float* y) {
  alignas(64) float scales[kFeatureTile];
  const FmaTile tile(weight, first / kFeatureTile, scales);
  std::fill_n(y, rows * kFeatureTile, 0.0f);
  const int64_t stride = row_stride(weight.in_features);
  const auto* halves = reinterpret_cast<const bf16*>(x);  // where the path takes bf16: prepare_inputs
  if (weight.path == LinearPath::kAmx) multiply_tile_amx(tile, halves, stride * static_cast<int64_t>(sizeof(float)), rows, y);
  else if (weight.path == LinearPath::kAvx512Bf16) multiply_tile_avx512_bf16(tile, halves, 2 * stride, rows, y);
  else if (weight.path == LinearPath::kAvx512) multiply_tile_avx512(tile, x, stride, rows, y);
  else multiply_tile_avx2(tile, x, stride, rows, y);
  if (weight.scheme == WeightScheme::kFp8Channel || weight.scheme == WeightScheme::kFp8Tensor) {
    for (int64_t row = 0; row < rows; ++row)
      for (int64_t n = 0; n < features; ++n) y[row * kFeatureTile + n] *= weight.scale[weight.scheme == WeightScheme::kFp8Channel ? first + n : 0];
  }
}

}  // namespace

void multiply_tile(const LinearView& weight, const float* x, int64_t rows, int64_t first, int64_t features, float* y) {
  if (weight.path != LinearPath::kPlain) return multiply_fma_tile(weight, x, rows, first, features, y);
  const DType dtype = stored_dtype(weight.scheme);
  const bool per_block = weight.scheme == WeightScheme::kFp8Block;
  const int64_t columns = weight.in_features;
  float totals[kRowTile * kLanes];
  for (int64_t n = 0; n < features; ++n) {
    const int64_t feature = first + n;
    const std::byte* stored = weight.weight + static_cast<size_t>(feature * columns) * dtype_size(dtype);
    std::fill_n(totals, rows * kLanes, 0.0f);
    for (int64_t begin = 0; begin < columns;) {
      const int64_t end = std::min(columns, ((weight.column_offset + begin) / kScaleBlock + 1) * kScaleBlock - weight.column_offset);
      float block[kScaleBlock];
      load_f32(stored + static_cast<size_t>(begin) * dtype_size(dtype), dtype, end - begin, block);
      const float scale = per_block ? weight.block_scale(feature, begin) : 1.0f;
      for (int64_t row = 0; row < rows; ++row) {
        float partial[kLanes] = {};
        accumulate_dot(block, x + row * row_stride(columns) + begin, end - begin, partial);
        float* total = totals + row * kLanes;
        for (int64_t l = 0; l < kLanes; ++l) total[l] += scale * partial[l];
      }
      begin = end;
    }
    float scale = 1.0f;
    if (weight.scheme == WeightScheme::kFp8Channel) scale = weight.scale[feature];
    if (weight.scheme == WeightScheme::kFp8Tensor) scale = weight.scale[0];
    for (int64_t row = 0; row < rows; ++row) y[row * kFeatureTile + n] = scale * sum_lanes(totals + row * kLanes);
  }
}

}  // namespace quern::cpu
