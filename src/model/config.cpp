#include "model/config.h"

#include <algorithm>
#include <cmath>
#include <initializer_list>
#include <limits>
#include <string_view>
#include <utility>

#include "base/faults.h"
#include "model/rope.h"

namespace quern::model {
namespace {

constexpr std::string_view kSupported =
    "quern serves the dense Qwen3.5, Qwen3.6 and Qwen3.8 models: model_type \"qwen3_5\" or its text part \"qwen3_5_text\"";
// Far above anything real, and low enough that sizes in bytes stay inside 64 bits.
constexpr int64_t kMaxExtent = int64_t{1} << 24, kMaxHeads = int64_t{1} << 14, kMaxPositions = int64_t{1} << 30;

/// One JSON object of the file; every read that fails leaves a fault with the key's path.
class Section {
 public:
  Section(const Json& json, std::string path, Faults& faults) : json_(json), path_(std::move(path)), faults_(faults) {}

  [[nodiscard]] const Json* find(std::string_view key) const {
    const auto it = json_.find(key);
    return it == json_.end() || it->is_null() ? nullptr : &*it;
  }
  [[nodiscard]] std::string path(std::string_view key) const { return path_.empty() ? std::string(key) : fmt::format("{}.{}", path_, key); }

  template <class... Args>
  void fault(std::string_view key, fmt::format_string<Args...> format, Args&&... args) const {
    faults_.add("{}: {}", path(key), fmt::format(format, std::forward<Args>(args)...));
  }

  /// A whole number in [min, max]; without a `fallback` the key is required.
  int64_t integer(std::string_view key, int64_t min, int64_t max, std::optional<int64_t> fallback = {}) const {
    const Json* value = find(key);
    if (value == nullptr) {
      if (!fallback) fault(key, "missing");
      return fallback.value_or(0);
    }
    // Some writers store 10000000.0 where a whole number is meant.
    const double number = value->is_number() ? value->get<double>() : std::numeric_limits<double>::quiet_NaN();
    if (!(number >= static_cast<double>(min) && number <= static_cast<double>(max)) || number != std::floor(number)) {
      fault(key, "expected a whole number from {} to {}, found {}", min, max, dump_json(*value));
      return fallback.value_or(0);
    }
    return static_cast<int64_t>(number);
  }

  double number(std::string_view key, double fallback, double above = 0) const {
    const Json* value = find(key);
    if (value == nullptr) return fallback;
    const double x = value->is_number() ? value->get<double>() : std::numeric_limits<double>::quiet_NaN();
    if (!(x > above && std::isfinite(x))) {
      fault(key, "expected a number above {}, found {}", above, dump_json(*value));
      return fallback;
    }
    return x;
  }

  std::optional<bool> boolean(std::string_view key) const {
    const Json* value = find(key);
    if (value == nullptr) return std::nullopt;
    if (!value->is_boolean()) {
      fault(key, "expected true or false, found {}", dump_json(*value));
      return std::nullopt;
    }
    return value->get<bool>();
  }

  std::optional<std::string> text(std::string_view key) const {
    const Json* value = find(key);
    if (value == nullptr) return std::nullopt;
    if (!value->is_string()) {
      fault(key, "expected a string, found {}", dump_json(*value));
      return std::nullopt;
    }
    return value->get<std::string>();
  }

  /// The key may be absent; where it is there, only `expected` is supported.
  template <class T>
  void only(std::string_view key, const std::optional<T>& found, const T& expected, std::string_view why) const {
    if (found && *found != expected)
      fault(key, "{} is not supported, only {}: {}", dump_json(Json(*found)), dump_json(Json(expected)), why);
  }

  [[nodiscard]] Faults& faults() const { return faults_; }

 private:
  const Json& json_;
  std::string path_;
  Faults& faults_;
};

/// The first section that has `key`.
const Section* having(std::string_view key, std::initializer_list<const Section*> sections) {
  for (const Section* s : sections)
    if (s->find(key) != nullptr) return s;
  return nullptr;
}

std::vector<LayerType> parse_layers(const Section& text) {
  const int64_t count = text.integer("num_hidden_layers", 1, 4096);
  if (count == 0) return {};
  std::vector<LayerType> layers;
  if (const Json* types = text.find("layer_types")) {
    if (!types->is_array() || types->size() != static_cast<size_t>(count)) {
      text.fault("layer_types", "expected a list of num_hidden_layers = {} entries, found {}", count,
                 types->is_array() ? fmt::format("{}", types->size()) : dump_json(*types));
      return layers;
    }
    for (const Json& type : *types) {
      if (type == "full_attention") {
        layers.push_back(LayerType::kFullAttention);
      } else if (type == "linear_attention") {
        layers.push_back(LayerType::kLinearAttention);
      } else {
        text.fault("layer_types", "entry {} is {}, expected \"linear_attention\" or \"full_attention\"", layers.size(), dump_json(type));
        return layers;
      }
    }
    return layers;
  }
  const int64_t interval = text.integer("full_attention_interval", 1, kMaxExtent, 4);
  for (int64_t i = 0; i < count; ++i) layers.push_back((i + 1) % interval == 0 ? LayerType::kFullAttention : LayerType::kLinearAttention);
  return layers;
}

void parse_eos(const Section& section, int64_t vocab_size, std::vector<int32_t>& ids) {
  const Json* value = section.find("eos_token_id");
  if (value == nullptr) return;
  const auto add = [&](const Json& id) {
    if (!id.is_number_integer() || id < 0 || id >= vocab_size) {
      section.fault("eos_token_id", "expected token ids below vocab_size {}, found {}", vocab_size, dump_json(id));
    } else if (const auto i = id.get<int32_t>(); std::find(ids.begin(), ids.end(), i) == ids.end()) {
      ids.push_back(i);
    }
  };
  if (value->is_array()) {
    for (const Json& id : *value) add(id);
  } else {
    add(*value);
  }
}

void parse_mrope_section(const Section& rope, ModelConfig& config) {
  const int64_t pairs = config.rotary_dim / 2;
  if (const Json* section = rope.find("mrope_section")) {
    int64_t sum = 0;
    const bool three = section->is_array() && section->size() == 3;
    for (size_t i = 0; three && i < 3; ++i) {
      const Json& n = (*section)[i];
      if (!n.is_number_integer() || n < 0 || n > pairs)
        return rope.fault("mrope_section", "expected three counts of at most {}, found {}", pairs, dump_json(*section));
      config.mrope_section[i] = n.get<int32_t>();
      sum += config.mrope_section[i];
    }
    if (!three || sum != pairs)
      rope.fault("mrope_section", "expected three counts that sum to {} (half of the rotary dimensions), found {}", pairs,
                 dump_json(*section));
  } else {  // frequencies in turn: t, h, w, t, h, ...
    const int64_t h = (pairs + 1) / 3, w = pairs / 3;
    config.mrope_section = {static_cast<int32_t>(pairs - h - w), static_cast<int32_t>(h), static_cast<int32_t>(w)};
  }
  rope.only("mrope_interleaved", rope.boolean("mrope_interleaved"), true, "this family interleaves its three position axes");
}

void apply_yarn(const Section& rope, double theta, ModelConfig& config) {
  Yarn yarn;
  yarn.original_max_position_embeddings =
      rope.integer("original_max_position_embeddings", 1, kMaxPositions, config.max_position_embeddings);
  if (yarn.original_max_position_embeddings == 0) return;  // max_position_embeddings is at fault already
  const double implied = static_cast<double>(config.max_position_embeddings) / static_cast<double>(yarn.original_max_position_embeddings);
  yarn.factor = rope.number("factor", implied);
  yarn.beta_fast = rope.number("beta_fast", 32);
  yarn.beta_slow = rope.number("beta_slow", 1);
  yarn.truncate = rope.boolean("truncate").value_or(true);
  if (yarn.factor < 1 || yarn.factor > 1024) return rope.fault("factor", "expected a factor between 1 and 1024, found {}", yarn.factor);
  if (yarn.beta_fast < yarn.beta_slow) return rope.fault("beta_fast", "{} is below beta_slow {}", yarn.beta_fast, yarn.beta_slow);

  const double mscale = rope.number("mscale", 0, -1e-300), mscale_all_dim = rope.number("mscale_all_dim", 0, -1e-300);
  const double attention_factor = mscale != 0 && mscale_all_dim != 0
                                      ? yarn_mscale(yarn.factor, mscale) / yarn_mscale(yarn.factor, mscale_all_dim)
                                      : yarn_mscale(yarn.factor);
  config.rope_scale = static_cast<float>(rope.number("attention_factor", attention_factor));
  config.inv_freq = yarn_inv_freq(yarn, theta, config.rotary_dim);
  // Overriding rope_parameters alone extends the window.
  const auto extended = static_cast<int64_t>(yarn.factor * static_cast<double>(yarn.original_max_position_embeddings));
  config.max_position_embeddings = std::max(config.max_position_embeddings, extended);
}

void parse_rope(const Section& text, ModelConfig& config) {
  static const Json kNone = Json::object();
  const Section* source = having("rope_parameters", {&text});
  const std::string_view key = source != nullptr ? "rope_parameters" : "rope_scaling";  // the older name
  const Json* object = text.find(key);
  if (object != nullptr && !object->is_object()) return text.fault(key, "expected an object, found {}", dump_json(*object));
  const Section rope(object != nullptr ? *object : kNone, text.path(key), text.faults());

  const Section* at = having("partial_rotary_factor", {&rope, &text});
  const double partial = at != nullptr ? at->number("partial_rotary_factor", 0.25) : 0.25;
  config.rotary_dim = static_cast<int64_t>(static_cast<double>(config.head_dim) * partial);
  if (partial > 1 || config.rotary_dim < 2 || config.rotary_dim % 2 != 0) {
    return (at != nullptr ? *at : text)
        .fault("partial_rotary_factor", "{} of head_dim {} is not an even number of dimensions from 2 to head_dim", partial,
               config.head_dim);
  }
  at = having("rope_theta", {&rope, &text});
  const double theta = at != nullptr ? at->number("rope_theta", 1e7, 1) : 1e7;

  parse_mrope_section(rope, config);
  config.inv_freq = rope_inv_freq(theta, config.rotary_dim);
  const std::string_view type_key = rope.find("rope_type") != nullptr ? "rope_type" : "type";
  const std::string type = rope.text(type_key).value_or("default");
  if (type == "yarn") return apply_yarn(rope, theta, config);
  if (type != "default" && type != "mrope") rope.fault(type_key, "\"{}\" is not supported, only \"default\" and \"yarn\"", type);
}

/// False when the file describes another kind of model, so that nothing else in it is worth a fault.
bool check_model_type(const Section& top, const Section& text) {
  const std::string type = top.text("model_type").value_or("");
  if (type != "qwen3_5" && type != "qwen3_5_text") {
    const std::string_view kind = type.find("moe") != std::string::npos ? " (mixture of experts)" : "";
    top.fault("model_type", "{}{} is not supported; {}", type.empty() ? "missing, which" : fmt::format("\"{}\"", type), kind, kSupported);
    return false;
  }
  const std::string text_type = text.text("model_type").value_or("qwen3_5_text");
  if (text_type != "qwen3_5_text" && text_type != "qwen3_5") {
    text.fault("model_type", "\"{}\" is not supported; {}", text_type, kSupported);
    return false;
  }
  if (const Json* architectures = top.find("architectures")) {
    const auto known = [](const Json& name) { return name == "Qwen3_5ForConditionalGeneration" || name == "Qwen3_5ForCausalLM"; };
    if (!architectures->is_array() || std::none_of(architectures->begin(), architectures->end(), known)) {
      top.fault("architectures", "{} is not supported, only Qwen3_5ForConditionalGeneration and Qwen3_5ForCausalLM",
                dump_json(*architectures));
    }
  }
  if (const Json* vision = top.find("vision_config"); vision != nullptr && vision->is_object()) {
    const Section section(*vision, "vision_config", top.faults());
    const std::string vision_type = section.text("model_type").value_or("qwen3_5");
    if (vision_type != "qwen3_5" && vision_type != "qwen3_5_vision") {
      section.fault("model_type", "\"{}\" is not supported, only \"qwen3_5\" and \"qwen3_5_vision\"", vision_type);
    }
  }
  return true;
}

void check_divides(const Section& text, std::string_view key, int64_t heads, std::string_view divisor_key, int64_t divisor) {
  if (heads != 0 && divisor != 0 && heads % divisor != 0) text.fault(key, "{} is not a multiple of {} {}", heads, divisor_key, divisor);
}

void parse_text(const Section& top, const Section& text, ModelConfig& config) {
  config.hidden_size = text.integer("hidden_size", 1, kMaxExtent);
  config.intermediate_size = text.integer("intermediate_size", 1, kMaxExtent);
  config.vocab_size = text.integer("vocab_size", 1, kMaxExtent);
  config.layers = parse_layers(text);
  config.num_attention_heads = text.integer("num_attention_heads", 1, kMaxHeads);
  config.num_key_value_heads = text.integer("num_key_value_heads", 1, kMaxHeads);
  config.head_dim = text.integer("head_dim", 2, kMaxHeads, 256);
  config.linear_num_key_heads = text.integer("linear_num_key_heads", 1, kMaxHeads);
  config.linear_num_value_heads = text.integer("linear_num_value_heads", 1, kMaxHeads);
  config.linear_key_head_dim = text.integer("linear_key_head_dim", 1, kMaxHeads, 128);
  config.linear_value_head_dim = text.integer("linear_value_head_dim", 1, kMaxHeads, 128);
  config.linear_conv_kernel_dim = text.integer("linear_conv_kernel_dim", 1, kMaxHeads, 4);
  if (config.linear_conv_kernel_dim != 4)
    text.fault("linear_conv_kernel_dim", "{} is not supported, only 4", config.linear_conv_kernel_dim);
  config.rms_norm_eps = static_cast<float>(text.number("rms_norm_eps", 1e-6));
  config.max_position_embeddings = text.integer("max_position_embeddings", 1, kMaxPositions);
  config.mtp_num_hidden_layers = text.integer("mtp_num_hidden_layers", 0, kMaxExtent, 0);
  if (config.mtp_num_hidden_layers > 1)
    text.fault("mtp_num_hidden_layers", "{} is not supported, only 0 and 1", config.mtp_num_hidden_layers);
  check_divides(text, "num_attention_heads", config.num_attention_heads, "num_key_value_heads", config.num_key_value_heads);
  check_divides(text, "linear_num_value_heads", config.linear_num_value_heads, "linear_num_key_heads", config.linear_num_key_heads);

  text.only<std::string>("hidden_act", text.text("hidden_act"), "silu", "the MLP of this family is a SwiGLU");
  text.only("attention_bias", text.boolean("attention_bias"), false, "no linear layer of this family has a bias");
  text.only("attn_output_gate", text.boolean("attn_output_gate"), true, "q_proj of this family carries query and gate");
  text.only("mtp_use_dedicated_embeddings", text.boolean("mtp_use_dedicated_embeddings"), false,
            "the MTP head shares the main model's embeddings");
  text.only<std::string>("mamba_ssm_dtype", text.text("mamba_ssm_dtype"), "float32", "the recurrent state is kept in float32");

  parse_eos(text, config.vocab_size, config.eos_token_ids);
  if (&text != &top) parse_eos(top, config.vocab_size, config.eos_token_ids);
  config.tie_word_embeddings = top.boolean("tie_word_embeddings").value_or(text.boolean("tie_word_embeddings").value_or(false));
  config.dtype = "bfloat16";
  for (const std::string_view key : {"dtype", "torch_dtype"}) {
    if (const Section* at = having(key, {&text, &top})) {
      config.dtype = at->text(key).value_or(config.dtype);
      break;
    }
  }
  if (config.head_dim >= 2) parse_rope(text, config);
}

const Json* find_quantization(const Section& top, const Section& text) {
  for (const std::string_view key : {"quantization_config", "compression_config"}) {
    if (const Section* at = having(key, {&top, &text})) {
      const Json* found = at->find(key);
      if (found->is_object()) return found;
      at->fault(key, "expected an object, found {}", dump_json(*found));
    }
  }
  return nullptr;
}

}  // namespace

int64_t ModelConfig::num_attention_layers() const { return std::count(layers.begin(), layers.end(), LayerType::kFullAttention); }

Result<ModelConfig> parse_config(const Json& config, std::string name) {
  if (!config.is_object()) return invalid_argument("config.json of {}: expected an object", name);
  Faults faults;
  ModelConfig parsed;
  const std::string what = fmt::format("config.json of {}", name);
  parsed.name = std::move(name);
  const Section top(config, "", faults);
  const Json* nested = top.find("text_config");
  if (nested != nullptr && !nested->is_object()) return invalid_argument("{}: text_config: expected an object", what);
  const Section nested_section(nested != nullptr ? *nested : config, "text_config", faults);
  const Section& text = nested != nullptr ? nested_section : top;  // a text-only checkpoint has the flattened text_config

  if (check_model_type(top, text)) parse_text(top, text, parsed);
  if (const Json* quantization = find_quantization(top, text)) parsed.quantization = *quantization;
  if (!faults.empty()) return faults.to_error(what);
  return parsed;
}

Result<ModelConfig> load_config(const std::filesystem::path& model_dir) {
  std::error_code error;
  if (!std::filesystem::exists(model_dir, error)) {
    return make_error(ErrorCode::kNotFound,
                      "{}: no such directory; expected a model directory as downloaded, with config.json and *.safetensors",
                      model_dir.string());
  }
  if (!std::filesystem::is_directory(model_dir, error)) {
    return invalid_argument("{}: not a directory; expected a model directory as downloaded, with config.json and *.safetensors",
                            model_dir.string());
  }
  auto json = read_json_file(model_dir / "config.json");
  if (!json && json.error().code == ErrorCode::kNotFound) {
    return make_error(ErrorCode::kNotFound, "{}: no config.json in it; is this a complete model directory?", model_dir.string());
  }
  if (!json) return std::move(json).error();
  std::filesystem::path named = std::filesystem::absolute(model_dir, error).lexically_normal();
  if (!named.has_filename()) named = named.parent_path();
  ASSIGN_OR_RETURN(ModelConfig config, parse_config(*json, named.filename().string()));
  const std::filesystem::path hf_quant = model_dir / "hf_quant_config.json";
  if (config.quantization.is_null() && std::filesystem::exists(hf_quant, error)) {
    ASSIGN_OR_RETURN(config.quantization, read_json_file(hf_quant));
  }
  return config;
}

}  // namespace quern::model
