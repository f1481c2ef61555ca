#pragma once

#include <cstdint>
#include <vector>

#include "base/result.h"
#include "ops/device.h"
#include "ops/rows.h"
#include "weights/source.h"
#include "worker/plan.h"

namespace quern::worker {

/// Collects the largest magnitudes of what static FP8 checkpoints quantize: inputs of linears, keys and values. Filled on the worker's
/// thread while steps run; read when the results of all steps are there. Needs plain activations and an unquantized KV cache.
class ActivationRanges {
 public:
  struct Layer {
    float mixer_in = 0;         // of q, k, v; of in_proj_qkv, z, b, a: after input_layernorm
    float mixer_out = 0;        // of o_proj, out_proj
    float mlp_in = 0;           // of gate_proj, up_proj: after post_attention_layernorm
    float mlp_mid = 0;          // of down_proj
    float key = 0, value = 0;   // as stored in the KV cache; attention layers only
  };
  [[nodiscard]] const std::vector<Layer>& layers() const { return layers_; }
  /// What went wrong while reading back, if anything did; the ranges mean nothing then.
  [[nodiscard]] const Result<void>& status() const { return status_; }

  /// Called by start_workers: the norms, since the ops that apply them show only what goes in.
  Result<void> prepare(const ExecutionPlan& plan, weights::WeightSource& source, ops::Device& device, ops::Stream& stream);

  // Called between the ops of a layer.
  void see_mixer_in(size_t layer, const ops::TensorView& x, ops::Stream& stream);
  void see_mixer_out(size_t layer, const ops::TensorView& rows, ops::Stream& stream);
  void see_mlp_in(size_t layer, const ops::TensorView& x, ops::Stream& stream);
  void see_mlp_mid(size_t layer, const ops::TensorView& rows, ops::Stream& stream);
  /// The whole cache of a layer: rows of former sequences in it were keys and values, too, and blocks never used are zero.
  void see_kv(size_t layer, const ops::KvCacheView& kv, ops::Stream& stream);

 private:
  [[nodiscard]] std::vector<float> read(const ops::TensorView& view, ops::Stream& stream);
  [[nodiscard]] float largest_normed(const ops::TensorView& x, const std::vector<float>& norm, ops::Stream& stream);
  [[nodiscard]] float largest(const ops::TensorView& view, ops::Stream& stream);

  std::vector<Layer> layers_;
  std::vector<std::vector<float>> mixer_norms_, mlp_norms_;  // [hidden] of each layer, zero-centred
  float eps_ = 0;
  Result<void> status_;
};

}  // namespace quern::worker
