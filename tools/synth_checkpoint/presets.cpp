#include <array>

#include "synth_checkpoint/synth.h"

namespace quern::tools {
namespace {

struct Preset {
  std::string_view name;
  int64_t layers, hidden, intermediate, heads, kv_heads, head_dim, gdn_key_heads, gdn_value_heads, gdn_head_dim, vocab;
  bool tied;
};

// The dense sizes of the family (model-spec.md 1.1), and two of our own.
constexpr std::array kPresets{
    Preset{"tiny", 4, 160, 288, 4, 2, 32, 2, 6, 16, 320, false},  // nothing is a multiple of 128
    Preset{"demo", 8, 256, 768, 6, 1, 256, 2, 6, 128, 8192, true},
    Preset{"0.8b", 24, 1024, 3584, 8, 2, 256, 16, 16, 128, 248320, true},
    Preset{"2b", 24, 2048, 6144, 8, 2, 256, 16, 16, 128, 248320, true},
    Preset{"4b", 32, 2560, 9216, 16, 4, 256, 16, 32, 128, 248320, true},
    Preset{"9b", 32, 4096, 12288, 16, 4, 256, 16, 32, 128, 248320, false},
    Preset{"27b", 64, 5120, 17408, 24, 4, 256, 16, 48, 128, 248320, false},
};

constexpr std::array<std::string_view, kPresets.size()> kNames = [] {
  std::array<std::string_view, kPresets.size()> names;
  for (size_t i = 0; i < names.size(); ++i) names[i] = kPresets[i].name;
  return names;
}();

Json make_config(const Preset& p) {
  const int64_t pairs = p.head_dim / 8;  // a quarter of the head is rotated, in pairs
  Json layer_types = Json::array();
  for (int64_t i = 0; i < p.layers; ++i) layer_types.push_back((i + 1) % 4 == 0 ? "full_attention" : "linear_attention");
  Json text{{"attention_bias", false}, {"attention_dropout", 0.0}, {"attn_output_gate", true}, {"dtype", "bfloat16"}};
  text["full_attention_interval"] = 4;
  text["head_dim"] = p.head_dim;
  text["hidden_act"] = "silu";
  text["hidden_size"] = p.hidden;
  text["intermediate_size"] = p.intermediate;
  text["layer_types"] = std::move(layer_types);
  text["linear_conv_kernel_dim"] = 4;
  text["linear_key_head_dim"] = p.gdn_head_dim;
  text["linear_num_key_heads"] = p.gdn_key_heads;
  text["linear_num_value_heads"] = p.gdn_value_heads;
  text["linear_value_head_dim"] = p.gdn_head_dim;
  text["mamba_ssm_dtype"] = "float32";
  text["max_position_embeddings"] = 262144;
  text["model_type"] = "qwen3_5_text";
  text["mtp_num_hidden_layers"] = 1;
  text["mtp_use_dedicated_embeddings"] = false;
  text["num_attention_heads"] = p.heads;
  text["num_hidden_layers"] = p.layers;
  text["num_key_value_heads"] = p.kv_heads;
  text["partial_rotary_factor"] = 0.25;
  text["rms_norm_eps"] = 1e-6;
  text["rope_parameters"] = Json{{"mrope_interleaved", true},
                                 {"mrope_section", {pairs - (pairs + 1) / 3 - pairs / 3, (pairs + 1) / 3, pairs / 3}},
                                 {"partial_rotary_factor", 0.25},
                                 {"rope_theta", 10000000},
                                 {"rope_type", "default"}};
  text["tie_word_embeddings"] = p.tied;
  text["vocab_size"] = p.vocab;
  return Json{{"architectures", {"Qwen3_5ForConditionalGeneration"}},
              {"language_model_only", true},
              {"model_type", "qwen3_5"},
              {"text_config", std::move(text)},
              {"tie_word_embeddings", p.tied}};
}

}  // namespace

std::span<const std::string_view> preset_names() { return kNames; }

Result<Json> preset_config(std::string_view name) {
  for (const Preset& preset : kPresets)
    if (preset.name == name) return make_config(preset);
  return invalid_argument("no preset \"{}\"; there are {}", name, fmt::join(kNames, ", "));
}

}  // namespace quern::tools
