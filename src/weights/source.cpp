#include "weights/source.h"

#include <utility>

#include "weights/declared.h"
#include "weights/dummy.h"
#include "weights/loader.h"
#include "weights/names.h"

namespace quern::weights {
namespace {

using ops::WeightScheme;

DType dtype_of(const model::ModelConfig& config) {
  if (config.dtype == "float32") return DType::kF32;
  return config.dtype == "float16" ? DType::kF16 : DType::kBF16;
}

WeightScheme unquantized(DType dtype) {
  if (dtype == DType::kF32) return WeightScheme::kF32;
  return dtype == DType::kF16 ? WeightScheme::kF16 : WeightScheme::kBF16;
}

/// Bytes of weight and scales as releases store them: block scales in bf16, others in f32.
uint64_t stored_bytes(const ops::LinearShape& linear) {
  uint64_t bytes = linear.packed_bytes();
  if (linear.scheme == WeightScheme::kFp8Block) {
    bytes -= static_cast<uint64_t>(ceil_div(linear.out_features, ops::kScaleBlock) * ceil_div(linear.in_features, ops::kScaleBlock)) * 2;
  }
  return bytes + (linear.static_input_scale ? sizeof(float) : 0);
}

}  // namespace

Result<Inventory> inventory_from_config(const model::ModelConfig& config, const LoadOptions& options) {
  ASSIGN_OR_RETURN(const DeclaredQuantization declared, DeclaredQuantization::parse(config.quantization));
  Inventory inventory;
  inventory.has_mtp = options.with_mtp.value_or(config.mtp_num_hidden_layers != 0);
  inventory.fp8_kv_declared = declared.fp8_kv();
  const DType dtype = dtype_of(config);
  const bool quantize = options.quantize_fp8 && !declared.present();
  if (options.quantize_fp8 && declared.present())
    inventory.notes.emplace_back("--quantization fp8 has no effect: the checkpoint is FP8 already");
  for (const model::TensorSpec& spec : model::tensor_specs(config, inventory.has_mtp)) {
    if (spec.kind == model::TensorKind::kVector) {
      inventory.vectors.emplace(spec.name, std::pair(dtype, spec.shape));
      inventory.stored_bytes += static_cast<uint64_t>(spec.shape.num_elements()) * dtype_size(dtype);
      continue;
    }
    ops::LinearShape linear{spec.shape[0], spec.shape[1], unquantized(dtype), false};
    if (const auto scheme = declared.scheme_of(module_of(spec.name))) {
      linear.scheme = scheme->scheme;
      linear.static_input_scale = scheme->static_input_scale;
    }
    inventory.stored_bytes += stored_bytes(linear);
    if (quantize && spec.quantize_at_runtime) linear.scheme = WeightScheme::kFp8Channel;
    inventory.linears.emplace(spec.name, linear);
  }
  return inventory;
}

Result<std::unique_ptr<WeightSource>> open_weights(const std::filesystem::path& model_dir, const model::ModelConfig& config,
                                                   const LoadOptions& options) {
  switch (options.format) {
    case LoadFormat::kDummy: {
      ASSIGN_OR_RETURN(Inventory inventory, inventory_from_config(config, options));
      return std::unique_ptr<WeightSource>(std::make_unique<DummySource>(std::move(inventory), options.dummy_seed));
    }
    case LoadFormat::kAuto:
    case LoadFormat::kSafetensors: return CheckpointSource::open(model_dir, config, options);
  }
  CHECK_UNREACHABLE();
}

}  // namespace quern::weights
