#include "worker/problems.h"

#include <algorithm>
#include <functional>

#include "base/check.h"

namespace quern::worker {
namespace {

std::string linear_text(const ops::LinearShape& l) {
  return fmt::format("{}x{} {}", l.out_features, l.in_features, ops::weight_scheme_name(l.scheme));
}

/// Empty where the heads have equal shares of their owners, in order; else how many heads each owner serves.
std::string map_text(const std::vector<int32_t>& owner_of, int64_t num_owners) {
  std::vector<int64_t> served(static_cast<size_t>(num_owners));
  for (const int32_t owner : owner_of) ++served[static_cast<size_t>(owner)];
  if (std::adjacent_find(served.begin(), served.end(), std::not_equal_to<>()) == served.end()) return {};
  return fmt::format(" as {}", fmt::join(served, "+"));
}

}  // namespace

const ops::LinearShape& Problems::linear(std::string_view prefix, std::string_view name) const {
  const auto found = inventory_.linears.find(fmt::format("{}{}.weight", prefix, name));
  CHECK_MSG(found != inventory_.linears.end(), fmt::format("the inventory has no {}{}.weight", prefix, name));
  return found->second;
}

ops::Embed::Problem Problems::embed() const {
  ops::Embed::Problem p{.hidden = config_.hidden_size, .activation = numerics_.activation, .num_ids = config_.vocab_size};
  if (const auto table = inventory_.linears.find("embed_tokens.weight"); table != inventory_.linears.end()) {
    p.vocab_size = table->second.out_features;
    p.scheme = table->second.scheme;
    p.first_id = shard_.vocab.begin;
    p.tied = config_.tie_word_embeddings && shard_.last_stage();
  }
  return p;
}

ops::AttnIn::Problem Problems::attn_in(std::string_view prefix) const {
  ops::AttnIn::Problem p;
  p.hidden = config_.hidden_size;
  p.num_q_heads = config_.num_attention_heads;
  p.num_kv_heads = config_.num_key_value_heads;
  p.head_dim = config_.head_dim;
  p.q = linear(prefix, "self_attn.q_proj");
  p.k = linear(prefix, "self_attn.k_proj");
  p.v = linear(prefix, "self_attn.v_proj");
  p.eps = config_.rms_norm_eps;
  p.activation = numerics_.activation;
  p.kv = numerics_.kv;
  p.inv_freq = config_.inv_freq;
  p.rope_scale = config_.rope_scale;
  p.mrope_section = config_.mrope_section;
  return p;
}

ops::Attention::Problem Problems::attention() const {
  ops::Attention::Problem p;
  p.num_q_heads = config_.num_attention_heads;
  p.num_kv_heads = config_.num_key_value_heads;
  p.head_dim = config_.head_dim;
  p.kv_head = shard_.kv_head;
  p.activation = numerics_.activation;
  p.kv = numerics_.kv;
  return p;
}

ops::OutResidual::Problem Problems::attn_out(std::string_view prefix) const {
  return {.linear = linear(prefix, "self_attn.o_proj"), .activation = numerics_.activation, .add_residual = shard_.tp_size == 1};
}

ops::GdnIn::Problem Problems::gdn_in(std::string_view prefix) const {
  ops::GdnIn::Problem p;
  p.hidden = config_.hidden_size;
  p.qkv = linear(prefix, "linear_attn.in_proj_qkv");
  p.z = linear(prefix, "linear_attn.in_proj_z");
  p.b = linear(prefix, "linear_attn.in_proj_b");
  p.a = linear(prefix, "linear_attn.in_proj_a");
  p.eps = config_.rms_norm_eps;
  p.activation = numerics_.activation;
  return p;
}

ops::GdnMix::Problem Problems::gdn_mix() const {
  ops::GdnMix::Problem p;
  p.num_k_heads = config_.linear_num_key_heads;
  p.num_v_heads = config_.linear_num_value_heads;
  p.d_k = config_.linear_key_head_dim;
  p.d_v = config_.linear_value_head_dim;
  p.k_head = shard_.k_head;
  p.k_max = numerics_.k_max;
  p.eps = config_.rms_norm_eps;
  p.activation = numerics_.activation;
  p.ring = numerics_.ring;
  return p;
}

ops::OutResidual::Problem Problems::gdn_out(std::string_view prefix) const {
  return {.linear = linear(prefix, "linear_attn.out_proj"), .activation = numerics_.activation, .add_residual = shard_.tp_size == 1};
}

ops::MlpIn::Problem Problems::mlp_in(std::string_view prefix) const {
  ops::MlpIn::Problem p;
  p.hidden = config_.hidden_size;
  p.intermediate = config_.intermediate_size;
  p.gate = linear(prefix, "mlp.gate_proj");
  p.up = linear(prefix, "mlp.up_proj");
  p.eps = config_.rms_norm_eps;
  p.activation = numerics_.activation;
  return p;
}

ops::DownResidual::Problem Problems::mlp_down(std::string_view prefix) const {
  return {.linear = linear(prefix, "mlp.down_proj"), .activation = numerics_.activation, .add_residual = shard_.tp_size == 1};
}

ops::MtpIn::Problem Problems::mtp_in() const {
  return {.hidden = config_.hidden_size, .fc = linear("", "mtp.fc"), .eps = config_.rms_norm_eps, .activation = numerics_.activation};
}

ops::Head::Problem Problems::head() const {
  ops::Head::Problem p;
  p.hidden = config_.hidden_size;
  p.tied = config_.tie_word_embeddings;
  p.lm_head = linear("", p.tied ? "embed_tokens" : "lm_head");
  p.vocab_size = p.lm_head.out_features;
  p.eps = config_.rms_norm_eps;
  p.activation = numerics_.activation;
  return p;
}

ops::Head::Problem Problems::draft_head() const {
  ops::Head::Problem p = head();
  p.tied = false;
  p.lm_head.scheme = ops::WeightScheme::kFp8Channel;
  p.lm_head.static_input_scale = false;
  return p;
}

ops::DraftRows::Problem Problems::draft_rows() const { return {config_.hidden_size, numerics_.k_max, numerics_.activation}; }

ops::Combine::Problem Problems::combine() const { return {config_.hidden_size, shard_.tp_size, numerics_.activation}; }

ops::Sample::Problem Problems::sample() const {
  return {.vocab_size = config_.vocab_size, .num_tokens = config_.vocab_size, .k_max = numerics_.k_max};
}

std::string describe(const ops::Embed::Problem& p) {
  const std::string of = p.end_of_ids() == p.vocab_size ? "" : fmt::format(" of {}", p.end_of_ids());
  return fmt::format("{{vocab {}{}, hidden {}, {}, {}{}}}", p.vocab_size, of, p.hidden, ops::weight_scheme_name(p.scheme), dtype_name(p.activation), p.tied ? ", tied" : "");
}
std::string describe(const ops::AttnIn::Problem& p) {
  return fmt::format("{{hidden {}, heads {}/{} x {}, rotary {}, q {}, k {}, v {}, {}, kv {}}}", p.hidden, p.num_q_heads, p.num_kv_heads, p.head_dim,
                     2 * p.inv_freq.size(), linear_text(p.q), linear_text(p.k), linear_text(p.v), dtype_name(p.activation), dtype_name(p.kv));
}
std::string describe(const ops::Attention::Problem& p) {
  return fmt::format("{{heads {}/{}{} x {}, {}, kv {}}}", p.num_q_heads, p.num_kv_heads, map_text(p.kv_head, p.num_kv_heads), p.head_dim, dtype_name(p.activation), dtype_name(p.kv));
}
std::string describe(const ops::GdnIn::Problem& p) {
  return fmt::format("{{hidden {}, qkv {}, z {}, b {}, a {}, {}}}", p.hidden, linear_text(p.qkv), linear_text(p.z), linear_text(p.b), linear_text(p.a),
                     dtype_name(p.activation));
}
std::string describe(const ops::GdnMix::Problem& p) {
  return fmt::format("{{heads {}/{}{} x {}/{}, {} drafts, {}, ring {}}}", p.num_k_heads, p.num_v_heads, map_text(p.k_head, p.num_k_heads), p.d_k, p.d_v, p.k_max, dtype_name(p.activation),
                     dtype_name(p.ring));
}
std::string describe(const ops::LinearResidual::Problem& p) {
  return fmt::format("{{{}, {}{}}}", linear_text(p.linear), dtype_name(p.activation), p.add_residual ? "" : ", partial");
}
std::string describe(const ops::MlpIn::Problem& p) {
  return fmt::format("{{hidden {}, intermediate {}, gate {}, up {}, {}}}", p.hidden, p.intermediate, ops::weight_scheme_name(p.gate.scheme),
                     ops::weight_scheme_name(p.up.scheme), dtype_name(p.activation));
}
std::string describe(const ops::MtpIn::Problem& p) { return fmt::format("{{fc {}, {}}}", linear_text(p.fc), dtype_name(p.activation)); }
std::string describe(const ops::Head::Problem& p) {
  return fmt::format("{{lm_head {}{}, {}}}", linear_text(p.lm_head), p.tied ? " tied" : "", dtype_name(p.activation));
}
std::string describe(const ops::Sample::Problem& p) { return fmt::format("{{vocab {}, {} drafts}}", p.vocab_size, p.k_max); }
std::string describe(const ops::DraftRows::Problem& p) { return fmt::format("{{hidden {}, {} drafts, {}}}", p.hidden, p.k_max, dtype_name(p.activation)); }
std::string describe(const ops::StateCopy::Problem&) { return "{}"; }
std::string describe(const ops::Combine::Problem& p) {
  return fmt::format("{{hidden {}, {} ranks, {}}}", p.hidden, p.num_ranks, dtype_name(p.activation));
}

}  // namespace quern::worker
