#include "synth_checkpoint/schemes.h"

#include <array>
#include <utility>

#include "weights/names.h"

namespace quern::tools {
namespace {

using ops::WeightScheme;
using namespace std::string_view_literals;

constexpr std::array kNames{"bf16"sv,        "block-fp8"sv,    "block-fp8-vocab"sv, "static-fp8"sv, "channel-fp8"sv,
                            "fp8-dynamic"sv, "modelopt-fp8"sv, "mixed"sv,           "hybrid"sv};

bool is_vocabulary(std::string_view name) { return name == "embed_tokens.weight" || name == "lm_head.weight"; }
bool contains(std::string_view text, std::string_view part) { return text.find(part) != std::string_view::npos; }

Json fp8_arguments(std::string_view strategy, bool dynamic) {
  return Json{{"num_bits", 8}, {"type", "float"}, {"strategy", strategy}, {"dynamic", dynamic}, {"symmetric", true}};
}

Json block_arguments() {
  Json arguments = fp8_arguments("block", false);
  arguments["block_structure"] = Json::array({128, 128});
  return arguments;
}

Json group(Json targets, Json weights, Json input) {
  return Json{{"targets", std::move(targets)},
              {"format", "float-quantized"},
              {"weights", std::move(weights)},
              {"input_activations", std::move(input)},
              {"output_activations", nullptr}};
}

Json compressed_tensors(Json groups, Json ignore, Json kv_cache_scheme) {
  return Json{{"quant_method", "compressed-tensors"}, {"format", "float-quantized"}, {"quantization_status", "compressed"},
              {"config_groups", std::move(groups)},   {"ignore", std::move(ignore)}, {"kv_cache_scheme", std::move(kv_cache_scheme)}};
}

/// As the official release writes it: whole module names, among them leftovers such as mlp.gate, which no reader may take for
/// mlp.gate_proj.
Json not_converted(const model::ModelConfig& config, const SynthOptions& options) {
  Json list = Json::array();
  for (const model::TensorSpec& spec : model::tensor_specs(config, options.with_mtp)) {
    if (stored_fp8(spec, options)) continue;
    list.push_back(spec.name == "embed_tokens.weight" ? "model.embed_tokens" : weights::released_module(weights::module_of(spec.name)));
  }
  for (int64_t i = 0; i < config.num_layers(); ++i) {
    for (const std::string_view leftover : {"mlp.gate", "mlp.shared_expert_gate"})
      list.push_back(weights::released_module(model::layer_prefix(i) + std::string(leftover)));
  }
  return list;
}

}  // namespace

std::span<const std::string_view> synth_scheme_names() { return kNames; }

Result<SynthScheme> parse_synth_scheme(std::string_view name) {
  for (size_t i = 0; i < kNames.size(); ++i)
    if (kNames[i] == name) return static_cast<SynthScheme>(i);
  return invalid_argument("no scheme \"{}\"; there are {}", name, fmt::join(kNames, ", "));
}

Shape tensor_scale_shape(const SynthOptions& options) {
  if (options.scale_shape) return *options.scale_shape;
  return options.scheme == SynthScheme::kModelOptFp8 ? Shape{} : Shape{1};
}

std::optional<StoredFp8> stored_fp8(const model::TensorSpec& spec, const SynthOptions& options) {
  if (spec.kind != model::TensorKind::kLinear) return std::nullopt;
  const int64_t rows = spec.shape[0], columns = spec.shape[1];
  const bool mtp = spec.name.starts_with("mtp."), gdn = contains(spec.name, "linear_attn.");
  const auto block = [&](std::string_view name) {
    return StoredFp8{
        WeightScheme::kFp8Block, name, DType::kBF16, {ceil_div(rows, ops::kScaleBlock), ceil_div(columns, ops::kScaleBlock)}, false};
  };
  const auto tensor = [&](DType dtype) {
    return StoredFp8{WeightScheme::kFp8Tensor, "weight_scale", dtype, tensor_scale_shape(options), true};
  };
  const auto channel = [&](Shape shape) { return StoredFp8{WeightScheme::kFp8Channel, "weight_scale", DType::kBF16, shape, false}; };

  if (options.scheme == SynthScheme::kBlockFp8Vocab && is_vocabulary(spec.name)) return block("weight_scale_inv");
  if (!spec.quantize_at_runtime) return std::nullopt;
  switch (options.scheme) {
    case SynthScheme::kBf16: return std::nullopt;
    case SynthScheme::kBlockFp8:
    case SynthScheme::kBlockFp8Vocab: return block("weight_scale_inv");
    case SynthScheme::kStaticFp8: return mtp || gdn ? std::nullopt : std::optional(tensor(DType::kBF16));
    case SynthScheme::kHybrid:
      return mtp ? std::optional(block("weight_scale_inv")) : gdn ? std::nullopt : std::optional(tensor(DType::kBF16));
    case SynthScheme::kChannelFp8: return channel({rows});
    case SynthScheme::kFp8Dynamic: return channel({rows, 1});
    case SynthScheme::kModelOptFp8: return mtp ? std::nullopt : std::optional(tensor(DType::kF32));
    case SynthScheme::kMixed: return mtp ? block("weight_scale") : gdn ? channel({rows, 1}) : tensor(DType::kBF16);
  }
  CHECK_UNREACHABLE();
}

std::vector<std::string> kv_scale_names(const std::string& attention_prefix, SynthScheme scheme) {
  switch (scheme) {
    case SynthScheme::kStaticFp8:
    case SynthScheme::kHybrid:
    case SynthScheme::kMixed: return {attention_prefix + "k_scale", attention_prefix + "v_scale", attention_prefix + "q_scale"};
    case SynthScheme::kModelOptFp8: return {attention_prefix + "k_proj.k_scale", attention_prefix + "v_proj.v_scale"};
    default: return {};
  }
}

DType kv_scale_dtype(SynthScheme scheme) { return scheme == SynthScheme::kModelOptFp8 ? DType::kF32 : DType::kBF16; }

Json quantization_config(const model::ModelConfig& config, const SynthOptions& options) {
  const Json kv = fp8_arguments("tensor", false), static_tensor = fp8_arguments("tensor", false), per_token = fp8_arguments("token", true);
  switch (options.scheme) {
    case SynthScheme::kBf16: return nullptr;
    case SynthScheme::kBlockFp8:
    case SynthScheme::kBlockFp8Vocab:
      return Json{{"activation_scheme", "dynamic"},
                  {"fmt", "e4m3"},
                  {"quant_method", "fp8"},
                  {"modules_to_not_convert", not_converted(config, options)},
                  {"weight_block_size", {128, 128}}};
    case SynthScheme::kStaticFp8:
    case SynthScheme::kHybrid:
      return compressed_tensors({{"group_0", group({"Linear"}, static_tensor, static_tensor)}},
                                {"lm_head", "re:.*visual.*", "re:.*linear_attn.*", "re:.*mtp.*"}, kv);
    case SynthScheme::kChannelFp8:
      return compressed_tensors({{"group_0", group({"Linear"}, fp8_arguments("channel", false), nullptr)}},
                                {"lm_head", "re:.*in_proj_[ab]$", "mtp.fc"}, nullptr);
    case SynthScheme::kFp8Dynamic:
      return compressed_tensors({{"group_0", group({"Linear"}, fp8_arguments("channel", false), per_token)}},
                                {"lm_head", "re:.*in_proj_[ab]$", "mtp.fc"}, nullptr);
    case SynthScheme::kMixed:
      return compressed_tensors(
          {{"group_mtp", group({R"(re:mtp\.layers\..*)"}, block_arguments(), per_token)},
           {"group_body", group({R"(re:.*\.mlp\..*)", R"(re:.*\.self_attn\..*)"}, static_tensor, static_tensor)},
           {"group_gdn", group({R"(re:.*linear_attn\.(in_proj_qkv|in_proj_z|out_proj)$)"}, fp8_arguments("channel", false), per_token)}},
          {"lm_head"}, kv);
    case SynthScheme::kModelOptFp8:
      return Json{{"quant_method", "modelopt"},
                  {"quant_algo", "FP8"},
                  {"kv_cache_quant_algo", "FP8"},
                  {"exclude_modules", {"lm_head", "*in_proj_a", "*in_proj_b", "mtp*", "model.visual*"}}};
  }
  CHECK_UNREACHABLE();
}

bool is_single_file(SynthScheme scheme) { return scheme == SynthScheme::kStaticFp8 || scheme == SynthScheme::kHybrid; }

}  // namespace quern::tools
