#include "synth_checkpoint/plan.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <memory>
#include <utility>

#include "base/float_convert.h"
#include "synth_checkpoint/schemes.h"
#include "weights/names.h"
#include "weights/synthetic.h"

namespace quern::tools {
namespace {

using model::TensorSpec;
using weights::SyntheticTensor;

/// A small tensor whose values are known.
PlannedTensor constant(std::string name, DType dtype, const Shape& shape, std::vector<float> values) {
  return {std::move(name), dtype, shape, [dtype, values = std::move(values)](int64_t begin, int64_t count, std::byte* out) {
            for (int64_t i = 0; i < count; ++i) {
              const float value = values[static_cast<size_t>(begin + i)];
              const bf16 narrow = to_bf16(value);
              const void* source = dtype == DType::kF32 ? static_cast<const void*>(&value) : &narrow;
              std::memcpy(out + static_cast<size_t>(i) * dtype_size(dtype), source, dtype_size(dtype));
            }
          }};
}

class Planner {
 public:
  Planner(const model::ModelConfig& config, const SynthOptions& options, bool flattened)
      : config_(config), options_(options), flattened_(flattened) {}

  std::vector<PlannedTensor> tensors() {
    for (const TensorSpec& spec : model::tensor_specs(config_, options_.with_mtp)) add(spec);
    for (int64_t i = 0; i < config_.num_layers(); ++i) {
      if (config_.layers[static_cast<size_t>(i)] == model::LayerType::kFullAttention) add_kv_scales(i);
    }
    return std::move(tensors_);
  }

 private:
  [[nodiscard]] std::string stored_name(const std::string& canonical) const {
    if (!flattened_) return weights::released_module(canonical);
    return canonical.starts_with("lm_head") || canonical.starts_with("mtp.") ? canonical : "model." + canonical;
  }

  void add(const TensorSpec& spec) {
    const auto values = std::make_shared<SyntheticTensor>(spec.name, spec.shape, options_.seed);
    const std::string name = stored_name(spec.name), module(weights::module_of(name));
    const auto fp8 = stored_fp8(spec, options_);
    if (!fp8) {
      const bool gate = spec.name.ends_with("A_log") || spec.name.ends_with("linear_attn.norm.weight");
      const DType dtype = gate && options_.f32_gates ? DType::kF32 : DType::kBF16;
      tensors_.push_back({name, dtype, spec.shape,
                          [values, dtype](int64_t begin, int64_t count, std::byte* out) { values->fill(dtype, begin, count, out); }});
      return;
    }
    tensors_.push_back({name, DType::kE4M3, spec.shape,
                        [values](int64_t begin, int64_t count, std::byte* out) { values->fill_codes(begin, count, out); }});
    tensors_.push_back(constant(fmt::format("{}.{}", module, fp8->scale_name), fp8->scale_dtype, fp8->scale_shape,
                                values->scales(fp8->scale_shape.num_elements())));
    if (fp8->input_scale) tensors_.push_back(constant(module + ".input_scale", fp8->scale_dtype, fp8->scale_shape, {0.0625f}));
  }

  void add_kv_scales(int64_t layer) {
    float value = 0.03125f * static_cast<float>(layer % 8 + 1);  // different in every layer
    for (std::string& name : kv_scale_names(stored_name(model::layer_prefix(layer) + "self_attn."), options_.scheme)) {
      tensors_.push_back(constant(std::move(name), kv_scale_dtype(options_.scheme), tensor_scale_shape(options_), {value}));
      value *= 2;
    }
  }

  const model::ModelConfig& config_;
  const SynthOptions& options_;
  const bool flattened_;
  std::vector<PlannedTensor> tensors_;
};

/// layers-N, outside and mtp, as the official FP8 release has them.
std::string file_by_layer(std::string_view stored_name) {
  if (stored_name.starts_with("mtp.")) return "mtp.safetensors";
  constexpr std::string_view kLayers = "layers.";
  const size_t at = stored_name.find(kLayers);
  if (at == std::string_view::npos) return "outside.safetensors";
  const std::string_view rest = stored_name.substr(at + kLayers.size());
  return fmt::format("layers-{}.safetensors", rest.substr(0, rest.find('.')));
}

std::vector<PlannedFile> group_by_layer(std::vector<PlannedTensor> tensors) {
  std::map<std::string, std::vector<PlannedTensor>> files;
  for (PlannedTensor& tensor : tensors) files[file_by_layer(tensor.name)].push_back(std::move(tensor));
  std::vector<PlannedFile> list;
  for (auto& [name, content] : files) list.push_back({name, std::move(content)});
  return list;
}

std::vector<PlannedFile> cut_into_shards(std::vector<PlannedTensor> tensors, uint64_t shard_bytes) {
  std::vector<PlannedFile> files;
  uint64_t filled = 0;
  for (PlannedTensor& tensor : tensors) {
    const uint64_t size = tensor.size_bytes();
    if (files.empty() || (filled + size > shard_bytes && filled != 0)) {
      files.emplace_back();
      filled = 0;
    }
    filled += size;
    files.back().tensors.push_back(std::move(tensor));
  }
  for (size_t i = 0; i < files.size(); ++i) {
    files[i].name = files.size() == 1 ? "model.safetensors" : fmt::format("model-{:05}-of-{:05}.safetensors", i + 1, files.size());
  }
  return files;
}

Json make_index(const std::vector<PlannedFile>& files, bool with_total) {
  std::map<std::string, std::string> weight_map;
  uint64_t total = 0;
  for (const PlannedFile& file : files) {
    for (const PlannedTensor& tensor : file.tensors) {
      weight_map[tensor.name] = file.name;
      total += tensor.size_bytes();
    }
  }
  Json metadata = Json::object();
  if (with_total) metadata["total_size"] = total;
  return Json{{"metadata", std::move(metadata)}, {"weight_map", weight_map}};
}

}  // namespace

CheckpointPlan plan_checkpoint(const model::ModelConfig& config, const SynthOptions& options, bool flattened) {
  std::vector<PlannedTensor> tensors = Planner(config, options, flattened).tensors();
  std::sort(tensors.begin(), tensors.end(), [](const PlannedTensor& a, const PlannedTensor& b) { return a.name < b.name; });
  CheckpointPlan plan;
  if (options.scheme == SynthScheme::kBlockFp8 || options.scheme == SynthScheme::kBlockFp8Vocab) {
    plan.files = group_by_layer(std::move(tensors));
    plan.index = make_index(plan.files, /*with_total=*/false);
  } else if (is_single_file(options.scheme)) {
    const auto is_main = [&](const PlannedTensor& tensor) {
      return options.scheme != SynthScheme::kHybrid || !tensor.name.starts_with("mtp.");
    };
    const auto mtp = std::stable_partition(tensors.begin(), tensors.end(), is_main);
    plan.files.push_back({"model.safetensors", {std::make_move_iterator(tensors.begin()), std::make_move_iterator(mtp)}});
    if (mtp != tensors.end())
      plan.files.push_back({"mtp.safetensors", {std::make_move_iterator(mtp), std::make_move_iterator(tensors.end())}});
  } else {
    plan.files = cut_into_shards(std::move(tensors), options.shard_bytes);
    if (plan.files.size() > 1) plan.index = make_index(plan.files, /*with_total=*/true);
  }
  return plan;
}

}  // namespace quern::tools
