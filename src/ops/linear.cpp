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

}  // namespace quern::ops
