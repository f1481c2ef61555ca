#include "weights/quantize_plan.h"

#include <map>
#include <set>
#include <utility>

#include "base/float_convert.h"
#include "weights/accounting.h"
#include "weights/encode_fp8.h"
#include "weights/names.h"

namespace quern::weights {
namespace {

constexpr std::string_view kKeyProjection = "self_attn.k_proj";

/// Released static checkpoints keep the Gated DeltaNet layers and have no MTP head, or an unquantized one.
bool quantizes(QuantizeScheme scheme, std::string_view module) {
  if (scheme != QuantizeScheme::kStaticFp8) return true;
  return !module.starts_with("mtp.") && module.find("linear_attn.") == std::string_view::npos;
}

Shape scale_shape(QuantizeScheme scheme, const Shape& weight) {
  switch (scheme) {
    case QuantizeScheme::kBlockFp8: return {ceil_div(weight[0], ops::kScaleBlock), ceil_div(weight[1], ops::kScaleBlock)};
    case QuantizeScheme::kStaticFp8: return {1};
    case QuantizeScheme::kChannelFp8: return {weight[0], 1};
  }
  CHECK_UNREACHABLE();
}

TensorHeader bf16_header(std::string name, const Shape& shape) {
  return {std::move(name), "BF16", shape, static_cast<size_t>(shape.num_elements()) * sizeof(bf16)};
}

class Planner {
 public:
  Planner(const Checkpoint& checkpoint, const model::ModelConfig& config, const QuantizeOptions& options, Faults& faults)
      : checkpoint_(checkpoint), config_(config), options_(options), faults_(faults) {}

  Result<QuantizePlan> plan() && {
    find_linears();
    for (const auto& [name, ref] : checkpoint_.tensors()) place(ref);
    if (!faults_.empty()) return faults_.to_error("cannot quantize " + config_.name);
    kept_.insert("lm_head");  // a tied head is a module, too, and not to be quantized
    plan_.kept.assign(kept_.begin(), kept_.end());
    return std::move(plan_);
  }

 private:
  /// The stored weights that are quantized, with their canonical modules.
  void find_linears() {
    const Account account = account_for(config_, DeclaredQuantization(), checkpoint_, {.quantize_fp8 = true}, faults_.empty(), faults_);
    for (const auto& [name, entry] : account.linears) {
      const std::string_view module = module_of(name);
      if (ops::is_fp8(entry.stored.scheme)) return faults_.add("{}: is FP8 already; only a BF16, F16 or F32 checkpoint can be quantized", entry.weight.name);
      if (!entry.quantize || !quantizes(options_.scheme, module)) continue;
      if (entry.weight.tensor->shape[0] != entry.stored.out_features) {
        faults_.add("{}: holds several projections in one tensor; only checkpoints that store them one by one can be quantized", entry.weight.name);
        continue;
      }
      linears_.emplace(entry.weight.name, module);
    }
  }

  void place(const TensorRef& ref) {
    QuantizeItem item{.source = ref};
    std::vector<TensorHeader> headers;
    std::vector<float> constants;  // values of the last headers
    const auto linear = linears_.find(ref.name);
    if (linear == linears_.end()) {
      headers.push_back({std::string(ref.name), ref.tensor->dtype_text, ref.tensor->shape, ref.tensor->size});
      if (ref.name.ends_with(".weight") && ref.tensor->shape.rank() > 1) kept_.emplace(module_of(ref.name));
    } else {
      const std::string module(module_of(ref.name));
      const Shape& shape = ref.tensor->shape;
      item.quantized = true;
      item.scale = scale_shape(options_.scheme, shape);
      headers.push_back({std::string(ref.name), "F8_E4M3", shape, static_cast<size_t>(shape.num_elements())});
      headers.push_back(
          bf16_header(module + (options_.scheme == QuantizeScheme::kBlockFp8 ? ".weight_scale_inv" : ".weight_scale"), item.scale));
      if (options_.scheme == QuantizeScheme::kStaticFp8) {
        headers.push_back(bf16_header(module + ".input_scale", {1}));
        constants.push_back(input_scale(linear->second));
      }
    }
    add_kv_scales(ref.name, headers, constants);

    uint64_t bytes = 0;
    for (const TensorHeader& header : headers) bytes += header.size_bytes;
    if (plan_.files.empty() || (filled_ != 0 && filled_ + bytes > options_.shard_bytes)) {
      plan_.files.emplace_back();
      filled_ = 0;
    }
    filled_ += bytes;
    plan_.source_bytes += ref.tensor->size;
    plan_.written_bytes += bytes;
    std::vector<TensorHeader>& file = plan_.files.back();
    item.file = plan_.files.size() - 1;
    item.weight = file.size();
    for (size_t i = 0; i < constants.size(); ++i)
      plan_.constants.push_back({item.file, file.size() + headers.size() - constants.size() + i, constants[i]});
    file.insert(file.end(), std::make_move_iterator(headers.begin()), std::make_move_iterator(headers.end()));
    plan_.items.push_back(std::move(item));
  }

  float input_scale(std::string_view module) {
    if (!options_.calibration) return 1;
    const auto found = options_.calibration->inputs.find(module);
    if (found == options_.calibration->inputs.end()) {
      faults_.add("{}: the calibration has no range of its input", module);
      return 1;
    }
    return stored_scale(found->second);
  }

  /// Beside the key projection of an attention layer whose range is known.
  void add_kv_scales(std::string_view stored, std::vector<TensorHeader>& headers, std::vector<float>& constants) {
    if (!options_.calibration) return;
    const std::string_view canonical = module_of(canonical_name(stored));
    if (!canonical.ends_with(kKeyProjection)) return;
    for (const auto& [layer, range] : options_.calibration->kv) {
      if (canonical != model::layer_prefix(layer) + std::string(kKeyProjection)) continue;
      const std::string attention(module_of(stored).substr(0, module_of(stored).rfind('.') + 1));
      headers.push_back(bf16_header(attention + "k_scale", {1}));
      headers.push_back(bf16_header(attention + "v_scale", {1}));
      constants.push_back(stored_scale(range.key));
      constants.push_back(stored_scale(range.value));
    }
  }

  const Checkpoint& checkpoint_;
  const model::ModelConfig& config_;
  const QuantizeOptions& options_;
  Faults& faults_;
  std::map<std::string_view, std::string> linears_;  // stored name of the weight -> canonical module
  std::set<std::string> kept_;
  uint64_t filled_ = 0;  // bytes of the last file
  QuantizePlan plan_;
};

}  // namespace

Result<QuantizePlan> plan_quantization(const Checkpoint& checkpoint, const model::ModelConfig& config, const QuantizeOptions& options,
                                       Faults& faults) {
  return Planner(checkpoint, config, options, faults).plan();
}

}  // namespace quern::weights
