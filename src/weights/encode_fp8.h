#pragma once

#include <cstddef>
#include <cstdint>

// From f32 to e4m3 codes (model-spec.md section 3). All values are finite.

namespace quern::weights {

/// max |values[i]|, 0 for none.
float largest_magnitude(const float* values, size_t size);

/// codes[i] = e4m3(values[i] / scale), to nearest even, saturated at +-448.
void encode_e4m3(const float* values, size_t size, float scale, uint8_t* codes);

/// One output row of `--quantization fp8` (model-spec.md 2.5): encoded with scale = max|row| / 448. Returns the scale, at least the smallest
/// normal float, so that a row of zeros stays one.
float quantize_row_fp8(const float* row, size_t size, uint8_t* codes);

/// The scale that a checkpoint stores for values up to `largest`: largest / 448 rounded to bfloat16, which every format may hold and which is
/// exact in f32. 1 for a stretch of zeros.
float stored_scale(float largest);

}  // namespace quern::weights
