#pragma once

#include <cstddef>
#include <cstdint>

namespace quern::weights {

/// One output row of `--quantization fp8` (model-spec.md 2.5): codes[i] = e4m3(row[i] / scale), to nearest even, with scale = max|row| /
/// 448. Values are finite. Returns the scale, at least the smallest normal float, so that a row of zeros stays one.
float quantize_row_fp8(const float* row, size_t size, uint8_t* codes);

}  // namespace quern::weights
