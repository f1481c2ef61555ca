#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "model/config.h"
#include "weights/checkpoint.h"
#include "weights/quantize.h"
#include "weights/safetensors_writer.h"

namespace quern::weights {

/// What becomes of one tensor of the source. What it turns into lies side by side in one output file.
struct QuantizeItem {
  TensorRef source;
  bool quantized = false;  // false: copied as it is
  size_t file = 0;         // index into QuantizePlan::files
  size_t weight = 0;       // index in that file; of a quantized weight, the next tensor is its scale
  Shape scale;             // extent of the scale
};

/// A bf16 scale that is known before any weight is read: of an input, of keys or of values.
struct QuantizeConstant {
  size_t file = 0, index = 0;
  float value = 1;
};

struct QuantizePlan {
  std::vector<std::vector<TensorHeader>> files;
  std::vector<QuantizeItem> items;
  std::vector<QuantizeConstant> constants;
  std::vector<std::string> kept;  // modules with a matrix that is not quantized, as stored
  uint64_t source_bytes = 0, written_bytes = 0;
};

/// Which tensors go where, and in which form. One error lists all faults of the source and all that the calibration lacks.
Result<QuantizePlan> plan_quantization(const Checkpoint& checkpoint, const model::ModelConfig& config, const QuantizeOptions& options,
                                       Faults& faults);

}  // namespace quern::weights
