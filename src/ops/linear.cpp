#include "ops/linear.h"

#include "base/check.h"

namespace quern::ops {

std::string_view weight_scheme_name(WeightScheme scheme) {
  switch (scheme) {
    case WeightScheme::kF32: return "f32";
    case WeightScheme::kBF16: return "bf16";
    case WeightScheme::kF16: return "f16";
    case WeightScheme::kFp8Block: return "block fp8";
    case WeightScheme::kFp8Channel: return "channel fp8";
    case WeightScheme::kFp8Tensor: return "tensor fp8";
  }
  CHECK_UNREACHABLE();
}

size_t LinearShape::packed_bytes() const {
  const size_t weight = static_cast<size_t>(out_features * in_features) * dtype_size(stored_dtype(scheme));
  switch (scheme) {
    case WeightScheme::kF32: case WeightScheme::kBF16: case WeightScheme::kF16: return weight;
    case WeightScheme::kFp8Block:
      return weight + static_cast<size_t>(ceil_div(out_features, kScaleBlock) * ceil_div(in_features, kScaleBlock)) * sizeof(float);
    case WeightScheme::kFp8Channel: return weight + static_cast<size_t>(out_features) * sizeof(float);
    case WeightScheme::kFp8Tensor: return weight + sizeof(float);
  }
  CHECK_UNREACHABLE();
}

int64_t max_scales(const LinearShape& shape) {
  switch (shape.scheme) {
    case WeightScheme::kF32: case WeightScheme::kBF16: case WeightScheme::kF16: return 0;
    case WeightScheme::kFp8Block: return (ceil_div(shape.out_features, kScaleBlock) + 1) * (ceil_div(shape.in_features, kScaleBlock) + 1);
    case WeightScheme::kFp8Channel: return shape.out_features;
    case WeightScheme::kFp8Tensor: return 1;
  }
  CHECK_UNREACHABLE();
}

void check_source(const LinearSource& source, const LinearShape& shape) {
  CHECK(source.shape == shape);
  if (!source.weight.empty()) {
    CHECK(source.weight.shape == Shape({shape.out_features, shape.in_features}));
    CHECK(source.weight.dtype == stored_dtype(shape.scheme));
  }
  if (!is_fp8(shape.scheme) || source.scale.empty()) return;
  const int64_t scales = shape.scheme == WeightScheme::kFp8Block
                             ? scale_blocks(source.row_offset % kScaleBlock, shape.out_features) * scale_blocks(source.column_offset % kScaleBlock, shape.in_features)
                             : max_scales(shape);
  CHECK(source.scale.dtype == DType::kF32);
  CHECK(source.scale.shape.num_elements() == scales);
}

}  // namespace quern::ops
