#include "model/tensors.h"

#include <utility>

namespace quern::model {
namespace {

class Lister {
 public:
  explicit Lister(const ModelConfig& config) : c_(config) {}

  void vector(std::string name, Shape shape) { specs_.push_back({std::move(name), shape, TensorKind::kVector, false}); }
  void norm(std::string name) { vector(std::move(name), {c_.hidden_size}); }
  void linear(std::string name, int64_t out_features, int64_t in_features, bool quantize_at_runtime = true) {
    specs_.push_back({std::move(name), {out_features, in_features}, TensorKind::kLinear, quantize_at_runtime});
  }

  void layer(const std::string& prefix, LayerType type) {
    norm(prefix + "input_layernorm.weight");
    type == LayerType::kFullAttention ? attention(prefix + "self_attn.") : gated_delta_net(prefix + "linear_attn.");
    norm(prefix + "post_attention_layernorm.weight");
    linear(prefix + "mlp.gate_proj.weight", c_.intermediate_size, c_.hidden_size);
    linear(prefix + "mlp.up_proj.weight", c_.intermediate_size, c_.hidden_size);
    linear(prefix + "mlp.down_proj.weight", c_.hidden_size, c_.intermediate_size);
  }

  std::vector<TensorSpec> take() && { return std::move(specs_); }

 private:
  void attention(const std::string& prefix) {
    const int64_t query = c_.num_attention_heads * c_.head_dim, kv = c_.num_key_value_heads * c_.head_dim;
    linear(prefix + "q_proj.weight", 2 * query, c_.hidden_size);  // per head: query rows, then gate rows
    linear(prefix + "k_proj.weight", kv, c_.hidden_size);
    linear(prefix + "v_proj.weight", kv, c_.hidden_size);
    vector(prefix + "q_norm.weight", {c_.head_dim});
    vector(prefix + "k_norm.weight", {c_.head_dim});
    linear(prefix + "o_proj.weight", c_.hidden_size, query);
  }

  void gated_delta_net(const std::string& prefix) {
    const int64_t heads = c_.linear_num_value_heads, value = heads * c_.linear_value_head_dim;
    linear(prefix + "in_proj_qkv.weight", c_.conv_channels(), c_.hidden_size);
    linear(prefix + "in_proj_z.weight", value, c_.hidden_size);
    linear(prefix + "in_proj_b.weight", heads, c_.hidden_size, false);
    linear(prefix + "in_proj_a.weight", heads, c_.hidden_size, false);
    vector(prefix + "conv1d.weight", {c_.conv_channels(), 1, c_.linear_conv_kernel_dim});
    vector(prefix + "A_log", {heads});
    vector(prefix + "dt_bias", {heads});
    vector(prefix + "norm.weight", {c_.linear_value_head_dim});
    linear(prefix + "out_proj.weight", c_.hidden_size, value);
  }

  const ModelConfig& c_;
  std::vector<TensorSpec> specs_;
};

}  // namespace

std::string layer_prefix(int64_t layer) { return fmt::format("layers.{}.", layer); }

std::vector<TensorSpec> tensor_specs(const ModelConfig& config, bool with_mtp) {
  Lister list(config);
  list.linear("embed_tokens.weight", config.vocab_size, config.hidden_size, false);
  for (int64_t i = 0; i < config.num_layers(); ++i) list.layer(layer_prefix(i), config.layers[static_cast<size_t>(i)]);
  list.norm("norm.weight");
  if (!config.tie_word_embeddings) list.linear("lm_head.weight", config.vocab_size, config.hidden_size, false);
  if (with_mtp) {
    list.norm("mtp.pre_fc_norm_embedding.weight");
    list.norm("mtp.pre_fc_norm_hidden.weight");
    list.linear("mtp.fc.weight", config.hidden_size, 2 * config.hidden_size, false);
    list.layer(std::string(kMtpLayerPrefix), LayerType::kFullAttention);
    list.norm("mtp.norm.weight");
  }
  return std::move(list).take();
}

}  // namespace quern::model
