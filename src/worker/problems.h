#pragma once

#include <string>
#include <string_view>

#include "model/config.h"
#include "model/tensors.h"
#include "ops/kernel_table.h"
#include "weights/source.h"
#include "worker/numerics.h"
#include "worker/shard.h"

// From the model's geometry and the checkpoint's schemes to the problem of every op.

namespace quern::worker {

/// Problems of one rank, from its part of config and inventory.
class Problems {
 public:
  Problems(const model::ModelConfig& config, const weights::Inventory& inventory, const Shard& shard, const Numerics& numerics)
      : config_(config), inventory_(inventory), shard_(shard), numerics_(numerics) {}

  [[nodiscard]] ops::Embed::Problem embed() const;
  /// `prefix` is a layer's: "layers.3." or "mtp.layers.0.".
  [[nodiscard]] ops::AttnIn::Problem attn_in(std::string_view prefix) const;
  [[nodiscard]] ops::Attention::Problem attention() const;
  [[nodiscard]] ops::OutResidual::Problem attn_out(std::string_view prefix) const;
  [[nodiscard]] ops::GdnIn::Problem gdn_in(std::string_view prefix) const;
  [[nodiscard]] ops::GdnMix::Problem gdn_mix() const;
  [[nodiscard]] ops::OutResidual::Problem gdn_out(std::string_view prefix) const;
  [[nodiscard]] ops::MlpIn::Problem mlp_in(std::string_view prefix) const;
  [[nodiscard]] ops::DownResidual::Problem mlp_down(std::string_view prefix) const;
  [[nodiscard]] ops::MtpIn::Problem mtp_in() const;
  [[nodiscard]] ops::Head::Problem head() const;
  /// An FP8 copy of lm_head, for drafts.
  [[nodiscard]] ops::Head::Problem draft_head() const;
  [[nodiscard]] ops::Sample::Problem sample() const;
  [[nodiscard]] ops::DraftRows::Problem draft_rows() const;
  /// Where tensor parallelism leaves partial sums.
  [[nodiscard]] ops::Combine::Problem combine() const;

  /// Calls visit.template operator()<Op>(problem, wanted_by) for every op of the rank, layer by layer. `wanted_by` names tensor and layer.
  template <class Visit>
  void for_each(bool with_mtp, Visit&& visit) const;

 private:
  [[nodiscard]] const ops::LinearShape& linear(std::string_view prefix, std::string_view name) const;
  template <class Visit>
  void attention_layer(std::string_view prefix, Visit&& visit) const;
  template <class Visit>
  void mlp(std::string_view prefix, Visit&& visit) const;

  const model::ModelConfig& config_;
  const weights::Inventory& inventory_;
  const Shard& shard_;
  Numerics numerics_;
};

/// "{hidden 5120, intermediate 17408, gate block fp8, up block fp8, bf16}": equal texts are equal problems.
std::string describe(const ops::Embed::Problem& p);
std::string describe(const ops::AttnIn::Problem& p);
std::string describe(const ops::Attention::Problem& p);
std::string describe(const ops::GdnIn::Problem& p);
std::string describe(const ops::GdnMix::Problem& p);
std::string describe(const ops::LinearResidual::Problem& p);
std::string describe(const ops::MlpIn::Problem& p);
std::string describe(const ops::MtpIn::Problem& p);
std::string describe(const ops::Head::Problem& p);
std::string describe(const ops::Sample::Problem& p);
std::string describe(const ops::DraftRows::Problem& p);
std::string describe(const ops::StateCopy::Problem& p);
std::string describe(const ops::Combine::Problem& p);

template <class Visit>
void Problems::attention_layer(std::string_view prefix, Visit&& visit) const {
  visit.template operator()<ops::AttnIn>(attn_in(prefix), std::string(prefix) + "self_attn");
  visit.template operator()<ops::Attention>(attention(), std::string(prefix) + "self_attn");
  visit.template operator()<ops::OutResidual>(attn_out(prefix), std::string(prefix) + "self_attn.o_proj");
}

template <class Visit>
void Problems::mlp(std::string_view prefix, Visit&& visit) const {
  visit.template operator()<ops::MlpIn>(mlp_in(prefix), std::string(prefix) + "mlp");
  visit.template operator()<ops::DownResidual>(mlp_down(prefix), std::string(prefix) + "mlp.down_proj");
}

template <class Visit>
void Problems::for_each(bool with_mtp, Visit&& visit) const {
  visit.template operator()<ops::Embed>(embed(), std::string("embed_tokens"));
  for (int64_t i = 0; i < config_.num_layers(); ++i) {
    const std::string prefix = model::layer_prefix(shard_.layers.begin + i);
    if (config_.layers[static_cast<size_t>(i)] == model::LayerType::kFullAttention) {
      attention_layer(prefix, visit);
    } else {
      visit.template operator()<ops::GdnIn>(gdn_in(prefix), prefix + "linear_attn");
      visit.template operator()<ops::GdnMix>(gdn_mix(), prefix + "linear_attn");
      visit.template operator()<ops::OutResidual>(gdn_out(prefix), prefix + "linear_attn.out_proj");
    }
    mlp(prefix, visit);
  }
  visit.template operator()<ops::StateCopy>(ops::StateCopy::Problem{}, std::string("recurrent state"));
  if (shard_.tp_size > 1) visit.template operator()<ops::Combine>(combine(), std::string("sums of the ranks"));
  if (!shard_.last_stage()) return;
  visit.template operator()<ops::Head>(head(), std::string("lm_head"));
  visit.template operator()<ops::Sample>(sample(), std::string("sampler"));
  if (with_mtp) {
    visit.template operator()<ops::DraftRows>(draft_rows(), std::string("mtp"));
    visit.template operator()<ops::MtpIn>(mtp_in(), std::string("mtp.fc"));
    attention_layer(model::kMtpLayerPrefix, visit);
    mlp(model::kMtpLayerPrefix, visit);
    if (numerics_.draft_head) visit.template operator()<ops::Head>(draft_head(), std::string("drafts"));
  }
}

}  // namespace quern::worker
