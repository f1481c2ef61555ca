#include "weights/declared.h"

#include <array>
#include <regex>
#include <utility>

#include "base/faults.h"
#include "weights/names.h"

namespace quern::weights {
namespace {

using ops::WeightScheme;

constexpr std::string_view kSupported =
    "quern loads BF16 checkpoints and FP8 ones: quant_method \"fp8\" (128 x 128 blocks or one scale a tensor), \"compressed-tensors\" "
    "with 8-bit float weights, \"modelopt\" with quant_algo FP8";

/// `*` stands for any run of characters.
bool glob_matches(std::string_view pattern, std::string_view text) {
  size_t p = 0, t = 0, star = std::string_view::npos, retry = 0;
  while (t < text.size()) {
    if (p < pattern.size() && pattern[p] == '*') {
      star = p++;
      retry = t;
    } else if (p < pattern.size() && pattern[p] == text[t]) {
      ++p;
      ++t;
    } else if (star != std::string_view::npos) {
      p = star + 1;
      t = ++retry;
    } else {
      return false;
    }
  }
  while (p < pattern.size() && pattern[p] == '*') ++p;
  return p == pattern.size();
}

const Json* member(const Json& object, std::string_view key) {
  if (!object.is_object()) return nullptr;
  const auto it = object.find(key);
  return it == object.end() || it->is_null() ? nullptr : &*it;
}

std::string text_of(const Json& object, std::string_view key) {
  const Json* value = member(object, key);
  return value != nullptr && value->is_string() ? value->get<std::string>() : std::string();
}

bool is_true(const Json& object, std::string_view key) {
  const Json* value = member(object, key);
  return value != nullptr && value->is_boolean() && value->get<bool>();
}

bool is_128x128(const Json& block) {
  if (block.is_string()) return block == "128x128";
  return block.is_array() && block.size() == 2 && block[0] == 128 && block[1] == 128;
}

bool is_fp8(const Json& arguments) {
  return text_of(arguments, "type") == "float" && member(arguments, "num_bits") != nullptr && arguments["num_bits"] == 8;
}

}  // namespace

struct ModulePattern::Regex {
  std::regex compiled;
};

ModulePattern::ModulePattern() = default;
ModulePattern::ModulePattern(ModulePattern&&) noexcept = default;
ModulePattern& ModulePattern::operator=(ModulePattern&&) noexcept = default;
ModulePattern::~ModulePattern() = default;

Result<ModulePattern> ModulePattern::parse(std::string_view text) {
  ModulePattern pattern;
  constexpr std::string_view kRegexMark = "re:";
  if (text.starts_with(kRegexMark)) {
    pattern.kind_ = Kind::kRegex;
    pattern.text_ = text.substr(kRegexMark.size());
    try {
      pattern.regex_ = std::make_unique<Regex>(Regex{std::regex(pattern.text_, std::regex::ECMAScript | std::regex::optimize)});
    } catch (const std::regex_error& error) {
      return invalid_argument("\"{}\" is not a regular expression that we can read: {}", text, error.what());
    }
    return pattern;
  }
  const bool is_class = text == "Linear" || text == "Embedding";
  pattern.kind_ = is_class ? Kind::kClass : text.find('*') != std::string_view::npos ? Kind::kGlob : Kind::kName;
  pattern.text_ = pattern.kind_ == Kind::kName ? canonical_name(text) : text;
  return pattern;
}

bool ModulePattern::matches(std::string_view module) const {
  switch (kind_) {
    case Kind::kName: return covers(text_, module);
    case Kind::kClass: return (module == "embed_tokens") == (text_ == "Embedding");
    case Kind::kRegex:
    case Kind::kGlob: break;
  }
  const std::array<std::string, 3> spellings{released_module(module), fmt::format("model.{}", module), std::string(module)};
  for (const std::string& spelling : spellings) {
    if (kind_ == Kind::kGlob && glob_matches(text_, spelling)) return true;
    try {
      if (kind_ == Kind::kRegex && std::regex_search(spelling, regex_->compiled, std::regex_constants::match_continuous)) return true;
    } catch (const std::regex_error&) {
      return false;  // an expression that explodes on this name does not name it
    }
  }
  return false;
}

/// Reads one config section; faults are collected, the section as a whole is refused.
class DeclaredParser {
 public:
  Result<DeclaredQuantization> parse(const Json& json) {
    if (!json.is_object()) return invalid_argument("quantization_config: expected an object");
    // hf_quant_config.json of ModelOpt holds its settings in "quantization"; so do some of its config.json sections.
    const Json* nested = member(json, "quantization");
    const std::string method = text_of(json, "quant_method");
    if (method == "fp8") {
      fp8(json);
    } else if (method == "compressed-tensors") {
      compressed_tensors(json);
    } else if (method == "modelopt" || (method.empty() && (nested != nullptr || !text_of(json, "quant_algo").empty()))) {
      modelopt(nested != nullptr && nested->is_object() ? *nested : json);
    } else {
      faults_.add("quant_method {} is not supported; {}", method.empty() ? "(none)" : fmt::format("\"{}\"", method), kSupported);
    }
    if (!faults_.empty()) return faults_.to_error("quantization_config", ErrorCode::kUnsupported);
    return std::move(result_);
  }

 private:
  std::vector<ModulePattern> patterns(const Json& object, std::string_view key) {
    std::vector<ModulePattern> list;
    const Json* entries = member(object, key);
    if (entries == nullptr) return list;
    if (!entries->is_array()) {
      faults_.add("{}: expected a list of names", key);
      return list;
    }
    for (const Json& entry : *entries) {
      if (!entry.is_string()) {
        faults_.add("{}: expected names, found {}", key, dump_json(entry));
        continue;
      }
      if (auto pattern = ModulePattern::parse(entry.get_ref<const std::string&>())) {
        list.push_back(std::move(pattern).value());
      } else {
        faults_.add("{}: {}", key, pattern.error().message);
      }
    }
    return list;
  }

  void ignore(const Json& object, std::initializer_list<std::string_view> keys) {
    for (const std::string_view key : keys)
      for (ModulePattern& pattern : patterns(object, key)) result_.ignored_.push_back(std::move(pattern));
  }
  void ignore_name(std::string_view name) {
    if (auto pattern = ModulePattern::parse(name)) result_.ignored_.push_back(std::move(pattern).value());
  }
  void all_linears(DeclaredScheme scheme) {
    std::vector<ModulePattern> targets;
    if (auto linear = ModulePattern::parse("Linear")) targets.push_back(std::move(linear).value());
    result_.groups_.push_back({std::move(targets), scheme});
  }

  void fp8(const Json& json) {
    result_.method_ = "fp8";
    if (const std::string format = text_of(json, "fmt"); !format.empty() && format != "e4m3")
      faults_.add("fmt \"{}\" is not supported, only \"e4m3\"", format);
    const bool is_static = text_of(json, "activation_scheme") == "static";
    const Json* block = member(json, "weight_block_size");
    if (block != nullptr && !is_128x128(*block)) faults_.add("weight_block_size {} is not supported, only [128, 128]", dump_json(*block));
    if (block != nullptr && is_static) faults_.add("activation_scheme \"static\" is not supported together with weight_block_size");
    all_linears({block != nullptr ? WeightScheme::kFp8Block : WeightScheme::kFp8Tensor, is_static});
    if (member(json, "modules_to_not_convert") == nullptr && member(json, "ignored_layers") == nullptr) ignore_name("lm_head");
    ignore(json, {"modules_to_not_convert", "ignored_layers"});
  }

  void compressed_tensors(const Json& json) {
    result_.method_ = "compressed-tensors";
    for (const std::string_view key : {"transform_config", "sparsity_config"}) {
      const Json* value = member(json, key);
      if (value != nullptr && !value->empty() && text_of(*value, "format") != "dense")
        faults_.add("{} is not supported: weights would have to be transformed first", key);
    }
    const Json* groups = member(json, "config_groups");
    if (groups == nullptr || !groups->is_object()) {
      faults_.add("config_groups: expected an object of groups");
      return;
    }
    for (const auto& [name, group] : groups->items()) compressed_group(name, group);
    ignore(json, {"ignore"});
    kv_cache_scheme(json);
  }

  void compressed_group(const std::string& name, const Json& group) {
    const Json* weights = member(group, "weights");
    if (weights == nullptr || !is_fp8(*weights)) {
      const Json* bits = weights != nullptr ? member(*weights, "num_bits") : nullptr;
      const std::string format = text_of(group, "format"), type = weights != nullptr ? text_of(*weights, "type") : "";
      faults_.add("config_groups.{}: weights of type \"{}\" with {} bits{} are not supported; {}", name, type,
                  bits != nullptr ? dump_json(*bits) : "no", format.empty() ? "" : fmt::format(" (format {})", format), kSupported);
      return;
    }
    DeclaredScheme scheme;
    const std::string strategy = text_of(*weights, "strategy");
    if (strategy == "tensor") {
      scheme.scheme = WeightScheme::kFp8Tensor;
    } else if (strategy == "channel") {
      scheme.scheme = WeightScheme::kFp8Channel;
    } else if (strategy == "block") {
      scheme.scheme = WeightScheme::kFp8Block;
      const Json* block = member(*weights, "block_structure");
      if (block == nullptr || !is_128x128(*block))
        faults_.add("config_groups.{}: block_structure {} is not supported, only [128, 128]", name,
                    block != nullptr ? dump_json(*block) : "null");
    } else {
      faults_.add("config_groups.{}: weights.strategy \"{}\" is not supported, only \"tensor\", \"channel\" and \"block\"", name, strategy);
    }
    if (const Json* input = member(group, "input_activations")) {
      if (!is_fp8(*input)) faults_.add("config_groups.{}: input_activations other than 8-bit floats are not supported", name);
      scheme.static_input_scale = !is_true(*input, "dynamic") && text_of(*input, "dynamic") != "local";
      if (scheme.static_input_scale && text_of(*input, "strategy") != "tensor") {
        faults_.add("config_groups.{}: static input_activations need strategy \"tensor\", found \"{}\"", name, text_of(*input, "strategy"));
      }
    }
    result_.groups_.push_back({patterns(group, "targets"), scheme});
  }

  void kv_cache_scheme(const Json& json) {
    const Json* scheme = member(json, "kv_cache_scheme");
    if (scheme == nullptr) return;
    if (is_fp8(*scheme)) {
      result_.fp8_kv_ = true;
    } else {
      faults_.add("kv_cache_scheme {} is not supported, only 8-bit floats", dump_json(*scheme));
    }
  }

  void modelopt(const Json& json) {
    result_.method_ = "modelopt";
    const std::string algorithm = text_of(json, "quant_algo");
    if (algorithm == "FP8") {
      all_linears({WeightScheme::kFp8Tensor, true});
    } else if (algorithm == "FP8_PER_CHANNEL_PER_TOKEN") {
      all_linears({WeightScheme::kFp8Channel, false});
    } else if (algorithm == "FP8_PB_WO") {
      all_linears({WeightScheme::kFp8Block, false});
    } else {
      faults_.add("quant_algo {} of ModelOpt is not supported, only FP8, FP8_PER_CHANNEL_PER_TOKEN and FP8_PB_WO; {}",
                  algorithm.empty() ? "(none)" : algorithm, kSupported);
    }
    const std::string kv = text_of(json, "kv_cache_quant_algo");
    if (kv == "FP8") {
      result_.fp8_kv_ = true;
    } else if (!kv.empty()) {
      faults_.add("kv_cache_quant_algo {} is not supported, only FP8", kv);
    }
    kv_cache_scheme(json);
    ignore(json, {"exclude_modules", "ignore"});
  }

  DeclaredQuantization result_;
  Faults faults_;
};

Result<DeclaredQuantization> DeclaredQuantization::parse(const Json& quantization) {
  if (quantization.is_null()) return DeclaredQuantization();
  return DeclaredParser().parse(quantization);
}

std::optional<DeclaredScheme> DeclaredQuantization::scheme_of(std::string_view module) const {
  for (const ModulePattern& pattern : ignored_)
    if (pattern.matches(module)) return std::nullopt;
  using Kind = ModulePattern::Kind;
  for (const Kind kind : {Kind::kName, Kind::kRegex, Kind::kGlob, Kind::kClass})
    for (const Group& group : groups_)
      for (const ModulePattern& target : group.targets)
        if (target.kind() == kind && target.matches(module)) return group.scheme;
  return std::nullopt;
}

}  // namespace quern::weights
