#pragma once

#include <cstddef>
#include <optional>
#include <span>
#include <vector>

#include "base/dtype.h"
#include "base/result.h"
#include "weights/checkpoint.h"

namespace quern::weights {

/// Index of the first element that is NaN (any type) or infinite (all but e4m3, which has none). About 10 GB/s a core.
std::optional<size_t> find_non_finite(std::span<const std::byte> bytes, DType dtype);

/// Elements [begin, begin + count) of a F32, BF16 or F16 tensor as f32. Refused by name and position where one is not finite.
Result<std::vector<float>> read_scales(const TensorRef& ref, size_t begin, size_t count);
Result<std::vector<float>> read_scales(const TensorRef& ref);

/// `count` values of F32, BF16 or F16 at any address, as f32.
void widen(const std::byte* source, DType dtype, size_t count, float* out);

}  // namespace quern::weights
