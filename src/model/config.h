#pragma once

#include <array>
#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "base/json.h"
#include "base/result.h"

namespace quern::model {

enum class LayerType : uint8_t { kLinearAttention, kFullAttention };

/// config.json of a Qwen3.5/3.6/3.8 dense model (model-spec.md 1.1), text part, checked: every value here can be relied on.
struct ModelConfig {
  std::string name;  // directory name of the checkpoint, for messages
  int64_t hidden_size = 0, intermediate_size = 0, vocab_size = 0;
  std::vector<LayerType> layers;
  int64_t num_attention_heads = 0, num_key_value_heads = 0, head_dim = 0;
  int64_t linear_num_key_heads = 0, linear_num_value_heads = 0, linear_key_head_dim = 0, linear_value_head_dim = 0;
  int64_t linear_conv_kernel_dim = 4;
  float rms_norm_eps = 1e-6f;
  int64_t max_position_embeddings = 0;
  bool tie_word_embeddings = false;
  int64_t mtp_num_hidden_layers = 0;
  std::vector<int32_t> eos_token_ids;  // config's; generation_config.json's list replaces it
  std::string dtype;                   // "bfloat16", as the file says

  int64_t rotary_dim = 0;              // head_dim * partial_rotary_factor, even
  std::vector<float> inv_freq;         // rotary_dim / 2, YaRN applied when configured
  float rope_scale = 1.0f;             // YaRN's attention factor
  std::array<int32_t, 3> mrope_section{};

  Json quantization;                   // quantization_config (or hf_quant_config.json's) as it stands, null without one

  [[nodiscard]] int64_t num_layers() const { return static_cast<int64_t>(layers.size()); }
  [[nodiscard]] int64_t num_attention_layers() const;
  [[nodiscard]] int64_t num_linear_layers() const { return num_layers() - num_attention_layers(); }
  [[nodiscard]] int64_t conv_channels() const {
    return 2 * linear_num_key_heads * linear_key_head_dim + linear_num_value_heads * linear_value_head_dim;
  }
};

/// All faults of the file in one message, each naming its key.
Result<ModelConfig> parse_config(const Json& config, std::string name);
/// Reads DIR/config.json (and DIR/hf_quant_config.json when it is there).
Result<ModelConfig> load_config(const std::filesystem::path& model_dir);

}  // namespace quern::model
