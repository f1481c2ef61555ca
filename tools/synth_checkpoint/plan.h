#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "base/dtype.h"
#include "model/config.h"
#include "synth_checkpoint/synth.h"

namespace quern::tools {

/// A tensor that will be written; `fill` makes any run of its elements, so that chunks can be made in any order.
struct PlannedTensor {
  std::string name;  // as stored
  DType dtype = DType::kBF16;
  Shape shape;
  std::function<void(int64_t begin, int64_t count, std::byte* out)> fill;

  [[nodiscard]] size_t size_bytes() const { return static_cast<size_t>(shape.num_elements()) * dtype_size(dtype); }
};

struct PlannedFile {
  std::string name;
  std::vector<PlannedTensor> tensors;
};

struct CheckpointPlan {
  std::vector<PlannedFile> files;
  Json index;  // null: one model.safetensors needs none
};

/// Every file of the checkpoint. `flattened`: names of a text-only checkpoint, "model.layers..." instead of
/// "model.language_model.layers...".
CheckpointPlan plan_checkpoint(const model::ModelConfig& config, const SynthOptions& options, bool flattened);

}  // namespace quern::tools
