#include "worker/activation_ranges.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>

#include "base/float_convert.h"
#include "model/tensors.h"

namespace quern::worker {
namespace {

std::vector<float> widen(const std::vector<std::byte>& bytes, DType dtype) {
  const size_t size = bytes.size() / dtype_size(dtype);
  std::vector<float> values(size);
  if (dtype == DType::kF32) {
    std::memcpy(values.data(), bytes.data(), bytes.size());
    return values;
  }
  CHECK(dtype == DType::kBF16 || dtype == DType::kF16);
  for (size_t i = 0; i < size; ++i) {
    uint16_t bits = 0;
    std::memcpy(&bits, &bytes[i * sizeof bits], sizeof bits);
    values[i] = dtype == DType::kF16 ? f16_to_f32(bits) : to_f32(bf16{bits});
  }
  return values;
}

float largest_magnitude(const std::vector<float>& values) {
  float largest = 0;
  for (const float x : values) largest = std::max(largest, std::fabs(x));
  return largest;
}

}  // namespace

Result<void> ActivationRanges::prepare(const ExecutionPlan& plan, weights::WeightSource& source, ops::Device& device, ops::Stream& stream) {
  eps_ = plan.config.rms_norm_eps;
  const auto norm = [&](const std::string& name, std::vector<std::vector<float>>& list) -> Result<void> {
    ASSIGN_OR_RETURN(const weights::StagedTensor staged, source.vector(name, {}, device, stream));
    list.push_back(read(staged.view, stream));
    source.done_with(name);
    return {};
  };
  for (int64_t i = 0; i < plan.config.num_layers(); ++i) {
    RETURN_IF_ERROR(norm(model::layer_prefix(i) + "input_layernorm.weight", mixer_norms_));
    RETURN_IF_ERROR(norm(model::layer_prefix(i) + "post_attention_layernorm.weight", mlp_norms_));
  }
  layers_.resize(mixer_norms_.size());
  return status_;
}

void ActivationRanges::see_mixer_in(size_t layer, const ops::TensorView& x, ops::Stream& stream) {
  layers_[layer].mixer_in = std::max(layers_[layer].mixer_in, largest_normed(x, mixer_norms_[layer], stream));
}
void ActivationRanges::see_mixer_out(size_t layer, const ops::TensorView& rows, ops::Stream& stream) {
  layers_[layer].mixer_out = std::max(layers_[layer].mixer_out, largest(rows, stream));
}
void ActivationRanges::see_mlp_in(size_t layer, const ops::TensorView& x, ops::Stream& stream) {
  layers_[layer].mlp_in = std::max(layers_[layer].mlp_in, largest_normed(x, mlp_norms_[layer], stream));
}
void ActivationRanges::see_mlp_mid(size_t layer, const ops::TensorView& rows, ops::Stream& stream) {
  layers_[layer].mlp_mid = std::max(layers_[layer].mlp_mid, largest(rows, stream));
}
void ActivationRanges::see_kv(size_t layer, const ops::KvCacheView& kv, ops::Stream& stream) {
  layers_[layer].key = std::max(layers_[layer].key, largest(kv.k, stream));
  layers_[layer].value = std::max(layers_[layer].value, largest(kv.v, stream));
}

std::vector<float> ActivationRanges::read(const ops::TensorView& view, ops::Stream& stream) {
  std::vector<std::byte> bytes(view.size_bytes());
  stream.copy_to_host(view, bytes.data());
  if (Result<void> done = stream.finish(); !done && status_) status_ = std::move(done);
  return widen(bytes, view.dtype);
}

/// Of RMSNorm1p (model-spec.md 1.3), rounded as the linear's input is.
float ActivationRanges::largest_normed(const ops::TensorView& x, const std::vector<float>& norm, ops::Stream& stream) {
  const std::vector<float> values = read(x, stream);
  float result = 0;
  for (size_t row = 0; row < values.size(); row += norm.size()) {
    float sum = 0, largest = 0;
    for (size_t i = 0; i < norm.size(); ++i) {
      const float v = values[row + i];
      sum += v * v;
      largest = std::max(largest, std::fabs(v * (1 + norm[i])));
    }
    result = std::max(result, largest / std::sqrt(sum / static_cast<float>(norm.size()) + eps_));
  }
  return x.dtype == DType::kF32 ? result : round_bf16(result);
}

float ActivationRanges::largest(const ops::TensorView& view, ops::Stream& stream) { return largest_magnitude(read(view, stream)); }

}  // namespace quern::worker
