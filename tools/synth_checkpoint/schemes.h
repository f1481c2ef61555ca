#pragma once

#include <optional>
#include <string>
#include <string_view>

#include "base/dtype.h"
#include "model/config.h"
#include "model/tensors.h"
#include "ops/linear.h"
#include "synth_checkpoint/synth.h"

namespace quern::tools {

/// How a scheme stores one linear weight in FP8.
struct StoredFp8 {
  ops::WeightScheme scheme = ops::WeightScheme::kFp8Block;
  std::string_view scale_name;  // "weight_scale_inv" or "weight_scale"
  DType scale_dtype = DType::kBF16;
  Shape scale_shape;
  bool input_scale = false;
};

/// Empty: the tensor stays in bf16.
std::optional<StoredFp8> stored_fp8(const model::TensorSpec& spec, const SynthOptions& options);

/// Names of the KV scales of an attention layer with the prefix "...self_attn.", empty for schemes without: key, value, query.
std::vector<std::string> kv_scale_names(const std::string& attention_prefix, SynthScheme scheme);
DType kv_scale_dtype(SynthScheme scheme);
Shape tensor_scale_shape(const SynthOptions& options);

/// What config.json says about the scheme; null for bf16.
Json quantization_config(const model::ModelConfig& config, const SynthOptions& options);

/// True when the whole main model goes into one model.safetensors.
bool is_single_file(SynthScheme scheme);

}  // namespace quern::tools
