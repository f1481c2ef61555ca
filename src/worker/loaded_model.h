#pragma once

#include <atomic>
#include <memory>
#include <optional>
#include <vector>

#include "ops/kernel_table.h"
#include "worker/kernel_cache.h"
#include "worker/plan.h"
#include "worker/start.h"

namespace quern::worker {

/// A kernel and its packed weights.
template <class Op>
struct LoadedOp {
  const typename Op::Kernel* kernel = nullptr;
  std::unique_ptr<ops::Buffer> packed;  // null for ops without weights
};

struct AttentionPart {
  LoadedOp<ops::AttnIn> in;
  LoadedOp<ops::Attention> attention;
};
struct GdnPart {
  LoadedOp<ops::GdnIn> in;
  LoadedOp<ops::GdnMix> mix;
};
/// One decoder layer: one of the two mixers, then output projection and MLP.
struct LoadedLayer {
  std::optional<AttentionPart> attention;
  std::optional<GdnPart> gdn;
  LoadedOp<ops::OutResidual> out;
  LoadedOp<ops::MlpIn> mlp_in;
  LoadedOp<ops::DownResidual> mlp_down;
};
struct LoadedMtp {
  LoadedOp<ops::DraftRows> rows;
  LoadedOp<ops::MtpIn> in;
  LoadedLayer layer;
  std::unique_ptr<ops::Buffer> norm;
  ops::TensorView norm_view;  // f32 [hidden]
};

/// All kernels and weights of one rank, in device memory. What follows the last layer is there on the last stage alone.
struct LoadedModel {
  LoadedOp<ops::Embed> embed;
  std::vector<LoadedLayer> layers;
  std::unique_ptr<ops::Buffer> norm;
  ops::TensorView norm_view;           // final norm, f32 [hidden]
  LoadedOp<ops::Head> head;            // packed is null when tied: the embedding's is used
  LoadedOp<ops::Head> draft_head;      // an FP8 copy for drafts, where the plan has one
  LoadedOp<ops::Sample> sample;
  LoadedOp<ops::StateCopy> state_copy;
  LoadedOp<ops::Combine> combine;      // with tensor parallelism
  std::optional<LoadedMtp> mtp;

  [[nodiscard]] const ops::Buffer& head_weights() const { return head.packed ? *head.packed : *embed.packed; }
};

/// Reads and packs the rank's weights op by op; staging memory is one op's at most. Ends with an error of code kCancelled soon after `stop` is set.
Result<LoadedModel> load_model(const ExecutionPlan& plan, const RankPlan& rank, weights::WeightSource& source, KernelCache& kernels, ops::Device& device, ops::Stream& stream,
                               const LoadProgress& progress, const std::atomic<bool>& stop);

}  // namespace quern::worker
