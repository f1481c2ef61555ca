#include "weights/accounting.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <set>
#include <utility>
#include <vector>

#include "weights/names.h"
#include "weights/stored_values.h"

namespace quern::weights {
namespace {

using model::TensorKind;
using model::TensorSpec;
using ops::WeightScheme;

constexpr std::string_view kSupportedDtypes = "BF16, F16, F32 and F8_E4M3";

std::string expected_found(const Shape& expected, const TensorRef& found) {
  return fmt::format("expected {}, the file has {} {}", expected.to_string(), found.tensor->dtype_text, found.tensor->shape.to_string());
}

class Accountant {
 public:
  Accountant(const model::ModelConfig& config, const DeclaredQuantization& declared, const Checkpoint& checkpoint,
             const LoadOptions& options, bool files_ok, Faults& faults)
      : config_(config), declared_(declared), options_(options), files_ok_(files_ok), faults_(faults) {
    for (const std::string& note : checkpoint.notes()) inventory().notes.push_back(note);
    for (const auto& [stored, ref] : checkpoint.tensors()) sort_in(ref);
  }

  Account run() && {
    choose_mtp();
    for (const TensorSpec& spec : model::tensor_specs(config_, inventory().has_mtp)) {
      spec.kind == TensorKind::kLinear ? linear(spec) : vector(spec);
    }
    decide_runtime_quantization();
    read_kv_scales();
    account_for_the_rest();
    cross_check();
    return std::move(account_);
  }

 private:
  Inventory& inventory() { return account_.inventory; }
  template <class... Args>
  void note(fmt::format_string<Args...> format, Args&&... args) {
    inventory().notes.push_back(fmt::format(format, std::forward<Args>(args)...));
  }

  void sort_in(const TensorRef& ref) {
    switch (name_kind(ref.name)) {
      case NameKind::kVision:
      case NameKind::kRotary: inventory().ignored.emplace_back(ref.name); return;
      case NameKind::kText: break;
    }
    const auto [place, is_new] = tensors_.emplace(canonical_name(ref.name), ref);
    if (!is_new) faults_.add("{} and {} are the same tensor of the model", place->second.name, ref.name);
  }

  TensorRef find(std::string_view canonical) const {
    const auto it = tensors_.find(canonical);
    return it == tensors_.end() ? TensorRef{} : it->second;
  }
  TensorRef find(std::string_view module, std::string_view parameter) const { return find(fmt::format("{}.{}", module, parameter)); }

  void consume(const TensorRef& ref) {
    if (consumed_.insert(ref.name).second) inventory().stored_bytes += ref.tensor->size;
  }

  /// A weight at fault takes its scales with it.
  void consume_module(std::string_view module) {
    for (const std::string_view parameter : {"weight", "weight_scale_inv", "weight_scale", "input_scale"})
      if (const TensorRef ref = find(module, parameter)) consume(ref);
  }

  void missing(std::string_view name, std::string_view hint = "") {
    if (files_ok_) faults_.add("{}: missing{}", name, hint);
  }

  void choose_mtp() {
    const auto first = tensors_.lower_bound("mtp.");
    const bool stored = first != tensors_.end() && first->first.starts_with("mtp.");
    const bool wanted = options_.with_mtp.value_or(stored && config_.mtp_num_hidden_layers != 0);
    inventory().has_mtp = wanted && stored;
    if (options_.with_mtp == true && !stored && files_ok_) faults_.add("mtp.*: the MTP head was asked for, and the checkpoint has none");
    if (stored && config_.mtp_num_hidden_layers == 0 && !options_.with_mtp)
      note("the checkpoint's MTP head is not used: mtp_num_hidden_layers is 0");
  }

  void vector(const TensorSpec& spec) {
    const TensorRef ref = find(spec.name);
    if (!ref) return missing(spec.name);
    consume(ref);
    // The middle extent of a depthwise convolution is 1; some releases drop it.
    const bool squeezed = spec.shape.rank() == 3 && ref.tensor->shape == Shape{spec.shape[0], spec.shape[2]};
    if (ref.tensor->shape != spec.shape && !squeezed) return faults_.add("{}: {}", ref.name, expected_found(spec.shape, ref));
    const DType dtype = ref.tensor->dtype.value_or(DType::kU8);
    if (dtype != DType::kBF16 && dtype != DType::kF16 && dtype != DType::kF32) {
      return faults_.add("{}: stored as {}, expected BF16, F16 or F32", ref.name, ref.tensor->dtype_text);
    }
    inventory().vectors.emplace(spec.name, std::pair(dtype, spec.shape));
    account_.vectors.emplace(spec.name, ref);
  }

  void linear(const TensorSpec& spec) {
    const std::string module(module_of(spec.name));
    LinearEntry entry;
    entry.stored.out_features = spec.shape[0];
    entry.stored.in_features = spec.shape[1];
    std::string stored_module = module;
    int64_t segments = 1;
    entry.weight = find(spec.name);
    if (!entry.weight) {
      const Merged* merged = merge_of(module);
      if (merged != nullptr) entry.weight = find(merged_module(module, *merged), "weight");
      if (!entry.weight) return missing_linear(spec.name, module);
      stored_module = merged_module(module, *merged);
      segments = static_cast<int64_t>(merged->members.size());
      if (!locate_segment(module, *merged, entry)) return;
    } else if (entry.weight.tensor->shape != spec.shape) {
      consume_module(module);
      return faults_.add("{}: {}", entry.weight.name, expected_found(spec.shape, entry.weight));
    }
    consume(entry.weight);
    if (!decide_scheme(module, stored_module, segments, entry)) return;
    entry.quantize = options_.quantize_fp8 && spec.quantize_at_runtime && !ops::is_fp8(entry.stored.scheme);
    account_.linears.emplace(spec.name, std::move(entry));
  }

  void missing_linear(const std::string& name, const std::string& module) {
    constexpr std::array kPackedParameters{"qweight", "weight_packed", "weight_scale_2", "weight_packed_scale"};
    for (const std::string_view parameter : kPackedParameters) {
      if (const TensorRef packed = find(module, parameter)) {
        return missing(name, fmt::format("; {} is there: weights packed to fewer than 8 bits (GPTQ, AWQ, NVFP4, MXFP4) are not supported",
                                         packed.name));
      }
    }
    if (name == "lm_head.weight") {
      return missing(name, ", and tie_word_embeddings is false in config.json; if the head shares the embedding table, set it to true");
    }
    missing(name);
  }

  /// Rows of `module` inside the merged tensor; checks the whole tensor's shape.
  bool locate_segment(const std::string& module, const Merged& merged, LinearEntry& entry) {
    const std::string parent = module.substr(0, module.rfind('.') + 1);
    int64_t rows = 0, index = 0;
    for (const std::string_view member : merged.members) {
      if (parent + std::string(member) == module) {
        entry.row_begin = rows;
        entry.segment = index;
      }
      rows += out_features(parent + std::string(member) + ".weight");
      ++index;
    }
    const Shape whole{rows, entry.stored.in_features};
    if (entry.weight.tensor->shape == whole) {
      if (merges_seen_.insert(merged.name).second)
        note("{} is read as the rows of {}, in this order", entry.weight.name, fmt::join(merged.members, ", "));
      return true;
    }
    if (consumed_.count(entry.weight.name) == 0) faults_.add("{}: {}", entry.weight.name, expected_found(whole, entry.weight));
    consume_module(merged_module(module, merged));
    return false;
  }

  int64_t out_features(const std::string& name) {
    if (rows_of_.empty()) {
      for (const TensorSpec& spec : model::tensor_specs(config_, true)) rows_of_.emplace(spec.name, spec.shape[0]);
    }
    return rows_of_.at(name);
  }

  bool decide_scheme(const std::string& module, const std::string& stored_module, int64_t segments, LinearEntry& entry) {
    const TensorRef& weight = entry.weight;
    switch (weight.tensor->dtype.value_or(DType::kU8)) {
      case DType::kF32: entry.stored.scheme = WeightScheme::kF32; return true;
      case DType::kBF16: entry.stored.scheme = WeightScheme::kBF16; return true;
      case DType::kF16: entry.stored.scheme = WeightScheme::kF16; return true;
      case DType::kE4M3: break;
      default:
        faults_.add("{}: stored as {}, which is not supported; quern loads {}", weight.name, weight.tensor->dtype_text, kSupportedDtypes);
        return false;
    }
    const TensorRef inverse = find(stored_module, "weight_scale_inv"), plain = find(stored_module, "weight_scale");
    if (inverse && plain) {
      consume(inverse);
      consume(plain);
      faults_.add("{}: has two scales, {} and {}", weight.name, inverse.name, plain.name);
      return false;
    }
    entry.scale = inverse ? inverse : plain;
    if (!entry.scale) {
      if (files_ok_)
        faults_.add("{}: stored as F8_E4M3 without weight_scale_inv or weight_scale; its values mean nothing without a scale", weight.name);
      return false;
    }
    consume(entry.scale);
    const Shape& shape = entry.scale.tensor->shape;
    const int64_t rows = weight.tensor->shape[0], columns = weight.tensor->shape[1];
    auto scheme = scheme_of_scale(shape, rows, columns, /*block_first=*/static_cast<bool>(inverse));
    if (!scheme && segments > 1 && shape.num_elements() == segments) scheme = WeightScheme::kFp8Tensor;
    if (!scheme) {
      faults_.add("{}: shape {} fits no scheme of a weight {}; expected one element, [{}, 1], or [{}, {}]", entry.scale.name,
                  shape.to_string(), weight.tensor->shape.to_string(), rows, ceil_div(rows, ops::kScaleBlock),
                  ceil_div(columns, ops::kScaleBlock));
      return false;
    }
    entry.stored.scheme = *scheme;
    decide_activations(module, stored_module, segments, entry);
    return true;
  }

  void decide_activations(const std::string& module, const std::string& stored_module, int64_t segments, LinearEntry& entry) {
    const auto declared = declared_.scheme_of(module);
    const bool says_static = declared && declared->static_input_scale;
    const TensorRef input = find(stored_module, "input_scale");
    if (!input) {
      if (says_static && declared->scheme == entry.stored.scheme && files_ok_) {
        faults_.add("{}.input_scale: missing; quantization_config declares static activations", stored_module);
      }
      return;
    }
    if (entry.stored.scheme == WeightScheme::kFp8Block || (declared && !says_static)) {
      unused_.emplace_back(input.name);
      return consumed_.insert(input.name), void();
    }
    consume(input);
    const int64_t elements = input.tensor->shape.num_elements();
    if (elements != 1 && elements != segments)
      return faults_.add("{}: expected one element, the file has {}", input.name, input.tensor->shape.to_string());
    entry.input_scale = input;
    entry.stored.static_input_scale = true;
  }

  void decide_runtime_quantization() {
    const bool has_fp8 = std::any_of(account_.linears.begin(), account_.linears.end(),
                                     [](const auto& entry) { return ops::is_fp8(entry.second.stored.scheme); });
    if (options_.quantize_fp8 && has_fp8) note("--quantization fp8 has no effect: the checkpoint is FP8 already");
    for (auto& [name, entry] : account_.linears) {
      entry.quantize = entry.quantize && !has_fp8;
      ops::LinearShape packed = entry.stored;
      if (entry.quantize) packed.scheme = WeightScheme::kFp8Channel;
      inventory().linears.emplace(name, packed);
    }
  }

  /// Layer of a canonical prefix that has a KV cache; empty for others.
  std::optional<int64_t> attention_layer(const std::string& prefix) const {
    if (prefix == model::kMtpLayerPrefix) return account_.inventory.has_mtp ? std::optional<int64_t>(-1) : std::nullopt;
    for (int64_t i = 0; i < config_.num_layers(); ++i) {
      if (config_.layers[static_cast<size_t>(i)] == model::LayerType::kFullAttention && prefix == model::layer_prefix(i)) return i;
    }
    return std::nullopt;
  }

  void read_kv_scales() {
    for (const auto& [canonical, ref] : tensors_) {
      const auto name = parse_kv_scale(canonical);
      if (!name || consumed_.count(ref.name) != 0) continue;
      const auto layer = attention_layer(name->layer);
      using Kind = KvScaleName::Kind;
      if (!layer || name->kind == Kind::kQuery) {  // queries stay in bf16; other layers have no KV cache
        inventory().ignored.emplace_back(ref.name);
        consumed_.insert(ref.name);
        continue;
      }
      consume(ref);
      const int64_t elements = ref.tensor->shape.num_elements();
      if (elements != 1 && elements != config_.num_key_value_heads) {
        faults_.add("{}: expected one element or {}, one per kv head, the file has {}", ref.name, config_.num_key_value_heads,
                    ref.tensor->shape.to_string());
        continue;
      }
      auto values = read_scales(ref);
      if (!values) {
        faults_.add(values.error());
        continue;
      }
      if (std::any_of(values->begin(), values->end(), [](float x) { return x <= 0; })) {
        faults_.add("{}: a scale of {} is not above 0", ref.name, *std::min_element(values->begin(), values->end()));
        continue;
      }
      KvScales& scales = inventory().kv_scales[*layer];
      if (name->kind != Kind::kValue) set_kv_scale(ref, *values, scales.k);
      if (name->kind != Kind::kKey) set_kv_scale(ref, *values, scales.v);
    }
    inventory().fp8_kv_declared = declared_.fp8_kv();
  }

  void set_kv_scale(const TensorRef& ref, const std::vector<float>& values, std::vector<float>& scale) {
    if (!scale.empty() && scale != values) faults_.add("{}: another spelling of the same scale has another value", ref.name);
    scale = values;
  }

  void account_for_the_rest() {
    for (const auto& [canonical, ref] : tensors_) {
      if (consumed_.count(ref.name) != 0) continue;
      const std::string name(ref.name);
      if (canonical.starts_with("mtp.") && !inventory().has_mtp) {
        inventory().ignored.push_back(name);
      } else if (config_.tie_word_embeddings && canonical.starts_with("lm_head.")) {
        inventory().ignored.push_back(name);
        note("{} is not used: tie_word_embeddings is true", name);
      } else if (is_scale_of_unquantized(canonical)) {
        unused_.push_back(name);
        if (options_.strict) faults_.add("{}: a scale of a weight that is not stored as FP8", name);
      } else if (looks_like_scale(canonical)) {
        faults_.add("{}: nothing uses this scale, so some numbers would come out wrong", name);
      } else if (canonical.ends_with(".bias")) {
        faults_.add("{}: no linear layer of this family has a bias", name);
      } else {
        inventory().unknown.push_back(name);
        if (options_.strict) faults_.add("{}: unknown tensor", name);
      }
    }
    for (const std::string& name : unused_) inventory().ignored.push_back(name);
    if (!unused_.empty())
      note("{} scales are not used, such as {}: the weight is not stored as FP8, or its activations are quantized dynamically",
           unused_.size(), unused_.front());
  }

  bool is_scale_of_unquantized(std::string_view canonical) const {
    for (const std::string_view parameter : {".weight_scale_inv", ".weight_scale", ".input_scale", ".output_scale"}) {
      if (!canonical.ends_with(parameter)) continue;
      const TensorRef weight = find(canonical.substr(0, canonical.size() - parameter.size()), "weight");
      return weight && (weight.tensor->dtype != DType::kE4M3 || parameter == ".output_scale");
    }
    return false;
  }

  /// The config against what is stored. Disagreement is reported; what is stored decides.
  void cross_check() {
    std::string example;
    size_t others = 0, fp8 = 0;
    for (const auto& [name, entry] : account_.linears) {
      fp8 += ops::is_fp8(entry.stored.scheme);
      const auto declared = declared_.scheme_of(module_of(name));
      const bool agrees = declared ? declared->scheme == entry.stored.scheme : !ops::is_fp8(entry.stored.scheme);
      if (agrees || !declared_.present()) continue;
      if (++others == 1) {
        example =
            fmt::format("{} is declared {} and stored as {}", entry.weight.name,
                        declared ? ops::weight_scheme_name(declared->scheme) : "unquantized", ops::weight_scheme_name(entry.stored.scheme));
      }
    }
    if (others != 0)
      note("quantization_config disagrees with {} of {} linear weights, e.g. {}; what is stored decides", others, account_.linears.size(),
           example);
    if (!declared_.present() && fp8 != 0)
      note("config.json has no quantization_config, but {} weights are stored in FP8 with scales; they are used as stored", fp8);
  }

  const model::ModelConfig& config_;
  const DeclaredQuantization& declared_;
  const LoadOptions& options_;
  const bool files_ok_;
  Faults& faults_;

  std::map<std::string, TensorRef, std::less<>> tensors_;  // by canonical name
  std::set<std::string_view> consumed_;                    // stored names
  std::set<std::string_view> merges_seen_;
  std::vector<std::string> unused_;
  std::map<std::string, int64_t> rows_of_;
  Account account_;
};

}  // namespace

std::optional<WeightScheme> scheme_of_scale(const Shape& scale, int64_t rows, int64_t columns, bool block_first) {
  const bool is_block = scale == Shape{ceil_div(rows, ops::kScaleBlock), ceil_div(columns, ops::kScaleBlock)};
  if (scale.num_elements() == 1) return is_block && block_first ? WeightScheme::kFp8Block : WeightScheme::kFp8Tensor;
  if (is_block) return WeightScheme::kFp8Block;
  if (scale == Shape{rows} || scale == Shape{rows, 1}) return WeightScheme::kFp8Channel;
  return std::nullopt;
}

Account account_for(const model::ModelConfig& config, const DeclaredQuantization& declared, const Checkpoint& checkpoint,
                    const LoadOptions& options, bool files_ok, Faults& faults) {
  return Accountant(config, declared, checkpoint, options, files_ok, faults).run();
}

}  // namespace quern::weights
