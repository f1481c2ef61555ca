#include "backends/cpu/packed_linear.h"

#include <cstring>

#include "backends/cpu/numeric.h"

namespace quern::cpu {

using ops::kScaleBlock;
using ops::WeightScheme;

namespace {

struct GridOffsets {
  int64_t row = 0, column = 0;
};

/// Most scales a weight of this shape can have, wherever it begins in the scale grid.
int64_t max_scales(const ops::LinearShape& shape) {
  switch (shape.scheme) {
    case WeightScheme::kF32:
    case WeightScheme::kBF16:
    case WeightScheme::kF16: return 0;
    case WeightScheme::kFp8Block: return (ceil_div(shape.out_features, kScaleBlock) + 1) * (ceil_div(shape.in_features, kScaleBlock) + 1);
    case WeightScheme::kFp8Channel: return shape.out_features;
    case WeightScheme::kFp8Tensor: return 1;
  }
  CHECK_UNREACHABLE();
}

int64_t scale_blocks(int64_t offset, int64_t extent) { return ceil_div(offset + extent, kScaleBlock); }

}  // namespace

PackedLinear::PackedLinear(const ops::LinearShape& shape, size_t offset_bytes) : shape_(shape), weight_at_(offset_bytes) {
  const size_t weight_bytes = static_cast<size_t>(shape.out_features * shape.in_features) * dtype_size(stored_dtype(shape.scheme));
  scale_at_ = static_cast<size_t>(round_up(static_cast<int64_t>(weight_at_ + weight_bytes), 256));
  offsets_at_ = static_cast<size_t>(round_up(static_cast<int64_t>(scale_at_) + max_scales(shape) * 4, 8));
  end_ =
      ops::is_fp8(shape.scheme) ? static_cast<size_t>(round_up(static_cast<int64_t>(offsets_at_ + sizeof(GridOffsets)), 256)) : scale_at_;
}

void PackedLinear::pack(const ops::LinearSource& source, ops::Buffer& packed) const {
  CHECK(source.shape == shape_);
  CHECK(end_ <= packed.size_bytes());
  const GridOffsets offsets{source.row_offset % kScaleBlock, source.column_offset % kScaleBlock};
  if (!source.weight.empty()) {
    CHECK(source.weight.shape == Shape({shape_.out_features, shape_.in_features}));
    CHECK(source.weight.dtype == stored_dtype(shape_.scheme));
    std::memcpy(packed.address() + weight_at_, source.weight.data<std::byte>(), source.weight.size_bytes());
  }
  if (!ops::is_fp8(shape_.scheme)) return;
  if (!source.scale.empty()) {
    int64_t expected = max_scales(shape_);
    if (shape_.scheme == WeightScheme::kFp8Block)
      expected = scale_blocks(offsets.row, shape_.out_features) * scale_blocks(offsets.column, shape_.in_features);
    CHECK(source.scale.dtype == DType::kF32);
    CHECK(source.scale.shape.num_elements() == expected);
    std::memcpy(packed.address() + scale_at_, source.scale.data<std::byte>(), source.scale.size_bytes());
  }
  std::memcpy(packed.address() + offsets_at_, &offsets, sizeof(offsets));
}

LinearView PackedLinear::view(const ops::Buffer& packed) const {
  LinearView view{shape_.out_features, shape_.in_features, shape_.scheme, packed.address() + weight_at_};
  if (!ops::is_fp8(shape_.scheme)) return view;
  GridOffsets offsets;
  std::memcpy(&offsets, packed.address() + offsets_at_, sizeof(offsets));
  view.scale = reinterpret_cast<const float*>(packed.address() + scale_at_);
  view.row_offset = offsets.row;
  view.column_offset = offsets.column;
  view.scale_columns = scale_blocks(offsets.column, shape_.in_features);
  return view;
}

void decode_row(const LinearView& weight, int64_t row, int64_t begin, int64_t end, float* out) {
  const DType dtype = stored_dtype(weight.scheme);
  load_f32(weight.weight + static_cast<size_t>(row * weight.in_features + begin) * dtype_size(dtype), dtype, end - begin, out);
  if (weight.scheme == WeightScheme::kFp8Block) {
    for (int64_t k = begin; k < end; ++k) out[k - begin] *= weight.block_scale(row, k);
  } else if (ops::is_fp8(weight.scheme)) {
    const float scale = weight.scale[weight.scheme == WeightScheme::kFp8Channel ? row : 0];
    for (int64_t k = begin; k < end; ++k) out[k - begin] *= scale;
  }
}

void multiply_tile(const LinearView& weight, const float* x, int64_t rows, int64_t first, int64_t features, float* y) {
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
        accumulate_dot(block, x + row * columns + begin, end - begin, partial);
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
