#pragma once

#include <string>
#include <vector>

#include "base/shape.h"
#include "model/config.h"

namespace quern::model {

/// What a tensor is to the model. Linear weights may be quantized and carry scales; the rest is small and stays as it is.
enum class TensorKind : uint8_t { kLinear, kVector };

/// One tensor that the model asks for, by its canonical name: without the checkpoint's prefix, e.g. "layers.3.mlp.up_proj.weight",
/// "embed_tokens.weight", "norm.weight", "lm_head.weight", "mtp.fc.weight", "mtp.layers.0.self_attn.q_proj.weight".
struct TensorSpec {
  std::string name;
  Shape shape;
  TensorKind kind = TensorKind::kVector;
  bool quantize_at_runtime = false;  // `--quantization fp8` converts it (model-spec.md 2.5)
};

/// Every tensor of the text model, in the order in which a forward pass meets them; lm_head only when it is not tied.
std::vector<TensorSpec> tensor_specs(const ModelConfig& config, bool with_mtp);

/// Canonical prefix of layer i: "layers.3."; of the MTP layer: "mtp.layers.0.".
std::string layer_prefix(int64_t layer);
inline constexpr std::string_view kMtpLayerPrefix = "mtp.layers.0.";

}  // namespace quern::model
