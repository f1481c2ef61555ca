#include "worker/loaded_model.h"

#include <algorithm>
#include <optional>
#include <string>

#include "base/float_convert.h"
#include "model/tensors.h"
#include "worker/problems.h"

namespace quern::worker {
namespace {

/// Walks the ops in the order of the forward pass; what is staged for one op is released before the next.
class Loader {
 public:
  Loader(const ExecutionPlan& plan, const RankPlan& rank, weights::WeightSource& source, KernelCache& kernels, ops::Device& device, ops::Stream& stream,
         const LoadProgress& progress, const std::atomic<bool>& stop)
      : plan_(plan),
        rank_(rank),
        problems_(rank.config, rank.inventory, rank.shard, plan.numerics()),
        source_(source),
        kernels_(kernels),
        device_(device),
        stream_(stream),
        progress_(progress),
        stop_(stop) {}

  Result<LoadedModel> load() {
    LoadedModel model;
    RETURN_IF_ERROR(make(model.embed, problems_.embed()));
    if (rank_.inventory.linears.contains("embed_tokens.weight")) {
      ASSIGN_OR_RETURN(const auto table, linear("embed_tokens.weight"));
      RETURN_IF_ERROR(pack(model.embed, "embed_tokens", [&](ops::Buffer& packed) { model.embed.kernel->pack(table->source, packed, stream_); }));
    } else {
      RETURN_IF_ERROR(pack(model.embed, "embed_tokens", [](ops::Buffer&) {}));
    }
    for (int64_t i = 0; i < rank_.config.num_layers(); ++i) {
      LoadedLayer layer;
      const bool full = rank_.config.layers[static_cast<size_t>(i)] == model::LayerType::kFullAttention;
      RETURN_IF_ERROR(load_layer(model::layer_prefix(rank_.shard.layers.begin + i), full, layer));
      model.layers.push_back(std::move(layer));
    }
    RETURN_IF_ERROR(make(model.state_copy, ops::StateCopy::Problem{}));
    if (rank_.shard.tp_size > 1) RETURN_IF_ERROR(make(model.combine, problems_.combine()));
    if (rank_.shard.last_stage()) RETURN_IF_ERROR(load_head(model));
    if (progress_) progress_(1.0);
    return model;
  }

 private:
  using Linear = std::unique_ptr<weights::StagedLinear>;
  using Vector = std::unique_ptr<weights::StagedTensor>;

  /// Final norm, head, sampler, MTP.
  Result<void> load_head(LoadedModel& model) {
    const bool tied = plan_.config.tie_word_embeddings;
    RETURN_IF_ERROR(load_norm("norm.weight", model.norm, model.norm_view));
    RETURN_IF_ERROR(make(model.head, problems_.head()));
    if (tied && model.head.kernel->table_layout() != model.embed.kernel->table_layout())
      return make_error(ErrorCode::kUnsupported, "the chosen kernels read the tied embedding table in two orders: embed in '{}', head in '{}'; force both with --kernel",
                        model.embed.kernel->table_layout(), model.head.kernel->table_layout());
    const std::string name = tied ? "embed_tokens.weight" : "lm_head.weight";
    if (plan_.draft_head) {
      RETURN_IF_ERROR(make(model.draft_head, problems_.draft_head()));
      ASSIGN_OR_RETURN(const weights::StagedLinear copy, source_.linear_in_fp8(name, slice(name), device_, stream_));
      RETURN_IF_ERROR(pack(model.draft_head, "the draft head", [&](ops::Buffer& packed) { model.draft_head.kernel->pack(copy.source, packed, stream_); }));
    }
    if (!tied) {
      ASSIGN_OR_RETURN(const auto lm_head, linear(name));
      RETURN_IF_ERROR(pack(model.head, "lm_head", [&](ops::Buffer& packed) { model.head.kernel->pack(lm_head->source, packed, stream_); }));
    }
    RETURN_IF_ERROR(make(model.sample, problems_.sample()));
    if (!plan_.with_mtp) return {};
    LoadedMtp mtp;
    RETURN_IF_ERROR(load_mtp(mtp));
    model.mtp = std::move(mtp);
    return {};
  }

  /// The rank's part of a tensor.
  [[nodiscard]] weights::Slice slice(const std::string& name) const {
    const std::optional<weights::Slice> part = slice_of(rank_.shard, plan_.config, name, plan_.with_mtp);
    CHECK_MSG(part.has_value(), name);
    return *part;
  }
  Result<Linear> linear(const std::string& name) {
    ASSIGN_OR_RETURN(weights::StagedLinear staged, source_.linear(name, slice(name), device_, stream_));
    staged_.push_back(name);
    done_bytes_ += staged.source.shape.packed_bytes();
    return std::make_unique<weights::StagedLinear>(std::move(staged));
  }
  Result<Vector> vector(const std::string& name) {
    ASSIGN_OR_RETURN(weights::StagedTensor staged, source_.vector(name, slice(name), device_, stream_));
    staged_.push_back(name);
    return std::make_unique<weights::StagedTensor>(std::move(staged));
  }

  template <class Op>
  Result<void> make(LoadedOp<Op>& op, const typename Op::Problem& problem) {
    ASSIGN_OR_RETURN(op.kernel, kernels_.get<Op>(problem));
    return {};
  }

  /// Allocates the packed buffer, packs, waits, and gives the file pages back.
  template <class Op, class Pack>
  Result<void> pack(LoadedOp<Op>& op, const std::string& purpose, Pack&& pack_into) {
    ASSIGN_OR_RETURN(op.packed, device_.allocate(op.kernel->packed_bytes(), purpose));
    pack_into(*op.packed);
    RETURN_IF_ERROR(stream_.finish());
    for (const std::string& name : staged_) source_.done_with(name);
    staged_.clear();
    if (progress_) progress_(static_cast<double>(done_bytes_) / static_cast<double>(std::max<uint64_t>(rank_.memory.weights_bytes, 1)));
    if (stop_.load(std::memory_order_relaxed)) return make_error(ErrorCode::kCancelled, "loading was given up");
    return {};
  }

  Result<void> load_layer(const std::string& prefix, bool full, LoadedLayer& layer) {
    if (full) {
      layer.attention.emplace();
      AttentionPart& part = *layer.attention;
      RETURN_IF_ERROR(make(part.in, problems_.attn_in(prefix)));
      RETURN_IF_ERROR(make(part.attention, problems_.attention()));
      RETURN_IF_ERROR(make(layer.out, problems_.attn_out(prefix)));
      ASSIGN_OR_RETURN(const auto norm, vector(prefix + "input_layernorm.weight"));
      ASSIGN_OR_RETURN(const auto q, linear(prefix + "self_attn.q_proj.weight"));
      ASSIGN_OR_RETURN(const auto k, linear(prefix + "self_attn.k_proj.weight"));
      ASSIGN_OR_RETURN(const auto v, linear(prefix + "self_attn.v_proj.weight"));
      ASSIGN_OR_RETURN(const auto q_norm, vector(prefix + "self_attn.q_norm.weight"));
      ASSIGN_OR_RETURN(const auto k_norm, vector(prefix + "self_attn.k_norm.weight"));
      RETURN_IF_ERROR(pack(part.in, prefix + "self_attn", [&](ops::Buffer& packed) {
        part.in.kernel->pack({norm->view, q->source, k->source, v->source, q_norm->view, k_norm->view}, packed, stream_);
      }));
      ASSIGN_OR_RETURN(const auto out, linear(prefix + "self_attn.o_proj.weight"));
      RETURN_IF_ERROR(pack(layer.out, prefix + "self_attn.o_proj", [&](ops::Buffer& packed) { layer.out.kernel->pack(out->source, packed, stream_); }));
    } else {
      layer.gdn.emplace();
      GdnPart& part = *layer.gdn;
      const std::string gdn = prefix + "linear_attn.";
      RETURN_IF_ERROR(make(part.in, problems_.gdn_in(prefix)));
      RETURN_IF_ERROR(make(part.mix, problems_.gdn_mix()));
      RETURN_IF_ERROR(make(layer.out, problems_.gdn_out(prefix)));
      {
        ASSIGN_OR_RETURN(const auto norm, vector(prefix + "input_layernorm.weight"));
        ASSIGN_OR_RETURN(const auto qkv, linear(gdn + "in_proj_qkv.weight"));
        ASSIGN_OR_RETURN(const auto z, linear(gdn + "in_proj_z.weight"));
        ASSIGN_OR_RETURN(const auto b, linear(gdn + "in_proj_b.weight"));
        ASSIGN_OR_RETURN(const auto a, linear(gdn + "in_proj_a.weight"));
        RETURN_IF_ERROR(pack(part.in, gdn + "in_proj", [&](ops::Buffer& packed) {
          part.in.kernel->pack({norm->view, qkv->source, z->source, b->source, a->source}, packed, stream_);
        }));
      }
      {
        ASSIGN_OR_RETURN(const auto conv, vector(gdn + "conv1d.weight"));
        ASSIGN_OR_RETURN(const auto a_log, vector(gdn + "A_log"));
        ASSIGN_OR_RETURN(const auto dt_bias, vector(gdn + "dt_bias"));
        ASSIGN_OR_RETURN(const auto norm, vector(gdn + "norm.weight"));
        RETURN_IF_ERROR(pack(part.mix, gdn + "conv1d", [&](ops::Buffer& packed) {
          part.mix.kernel->pack({conv->view, a_log->view, dt_bias->view, norm->view}, packed, stream_);
        }));
      }
      ASSIGN_OR_RETURN(const auto out, linear(gdn + "out_proj.weight"));
      RETURN_IF_ERROR(pack(layer.out, gdn + "out_proj", [&](ops::Buffer& packed) { layer.out.kernel->pack(out->source, packed, stream_); }));
    }
    return load_mlp(prefix, layer);
  }

  Result<void> load_mlp(const std::string& prefix, LoadedLayer& layer) {
    RETURN_IF_ERROR(make(layer.mlp_in, problems_.mlp_in(prefix)));
    RETURN_IF_ERROR(make(layer.mlp_down, problems_.mlp_down(prefix)));
    {
      ASSIGN_OR_RETURN(const auto norm, vector(prefix + "post_attention_layernorm.weight"));
      ASSIGN_OR_RETURN(const auto gate, linear(prefix + "mlp.gate_proj.weight"));
      ASSIGN_OR_RETURN(const auto up, linear(prefix + "mlp.up_proj.weight"));
      RETURN_IF_ERROR(pack(layer.mlp_in, prefix + "mlp", [&](ops::Buffer& packed) {
        layer.mlp_in.kernel->pack({norm->view, gate->source, up->source}, packed, stream_);
      }));
    }
    ASSIGN_OR_RETURN(const auto down, linear(prefix + "mlp.down_proj.weight"));
    return pack(layer.mlp_down, prefix + "mlp.down_proj", [&](ops::Buffer& packed) { layer.mlp_down.kernel->pack(down->source, packed, stream_); });
  }

  Result<void> load_mtp(LoadedMtp& mtp) {
    RETURN_IF_ERROR(make(mtp.rows, problems_.draft_rows()));
    RETURN_IF_ERROR(make(mtp.in, problems_.mtp_in()));
    {
      ASSIGN_OR_RETURN(const auto norm_embedding, vector("mtp.pre_fc_norm_embedding.weight"));
      ASSIGN_OR_RETURN(const auto norm_hidden, vector("mtp.pre_fc_norm_hidden.weight"));
      ASSIGN_OR_RETURN(const auto fc, linear("mtp.fc.weight"));
      RETURN_IF_ERROR(pack(mtp.in, "mtp.fc", [&](ops::Buffer& packed) { mtp.in.kernel->pack({norm_embedding->view, norm_hidden->view, fc->source}, packed, stream_); }));
    }
    RETURN_IF_ERROR(load_layer(std::string(model::kMtpLayerPrefix), true, mtp.layer));
    return load_norm("mtp.norm.weight", mtp.norm, mtp.norm_view);
  }

  /// A norm that no kernel packs: widened to f32 on the host.
  Result<void> load_norm(const std::string& name, std::unique_ptr<ops::Buffer>& buffer, ops::TensorView& view) {
    ASSIGN_OR_RETURN(const auto staged, vector(name));
    const int64_t n = staged->view.shape.num_elements();
    std::vector<std::byte> stored(staged->view.size_bytes());
    stream_.copy_to_host(staged->view, stored.data());
    RETURN_IF_ERROR(stream_.finish());
    std::vector<float> wide(static_cast<size_t>(n));
    for (int64_t i = 0; i < n; ++i) {
      if (staged->view.dtype == DType::kBF16) wide[static_cast<size_t>(i)] = to_f32(reinterpret_cast<const bf16*>(stored.data())[i]);
      else if (staged->view.dtype == DType::kF16) wide[static_cast<size_t>(i)] = f16_to_f32(reinterpret_cast<const uint16_t*>(stored.data())[i]);
      else wide[static_cast<size_t>(i)] = reinterpret_cast<const float*>(stored.data())[i];
    }
    ASSIGN_OR_RETURN(buffer, device_.allocate(wide.size() * sizeof(float), name));
    view = {buffer.get(), 0, DType::kF32, Shape{n}};
    stream_.copy_to_device(wide.data(), view);
    return stream_.finish();
  }

  const ExecutionPlan& plan_;
  const RankPlan& rank_;
  Problems problems_;
  weights::WeightSource& source_;
  KernelCache& kernels_;
  ops::Device& device_;
  ops::Stream& stream_;
  const LoadProgress& progress_;
  const std::atomic<bool>& stop_;
  std::vector<std::string> staged_;
  uint64_t done_bytes_ = 0;
};

}  // namespace

Result<LoadedModel> load_model(const ExecutionPlan& plan, const RankPlan& rank, weights::WeightSource& source, KernelCache& kernels, ops::Device& device, ops::Stream& stream,
                               const LoadProgress& progress, const std::atomic<bool>& stop) {
  return Loader(plan, rank, source, kernels, device, stream, progress, stop).load();
}

}  // namespace quern::worker
