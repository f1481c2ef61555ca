#include <algorithm>

#include "worker/selftest_ops.h"

namespace quern::worker::selftest {
namespace {

/// `n`, or the largest extent up to `cap` with its remainder by 128.
int64_t capped(int64_t n, int64_t cap) {
  if (n <= cap) return n;
  const int64_t remainder = n % ops::kScaleBlock;
  return remainder == 0 ? cap : cap - ops::kScaleBlock + remainder;
}

void cap_linear(ops::LinearShape& linear, int64_t cap) {
  linear.out_features = capped(linear.out_features, cap);
  linear.in_features = capped(linear.in_features, cap);
}

/// Owners of heads that are kept: two for the smallest cap.
int64_t kept_owners(int64_t num_owners, int64_t cap) { return std::min(num_owners, cap / 256); }

/// Heads shared out among their owners equally and in order; other maps are those of uneven shards, and small anyway.
bool equal_shares(const std::vector<int32_t>& owner_of, int64_t num_owners) {
  const auto n = static_cast<int64_t>(owner_of.size());
  if (num_owners == 0 || n % num_owners != 0) return false;
  for (int64_t h = 0; h < n; ++h)
    if (owner_of[static_cast<size_t>(h)] != h / (n / num_owners)) return false;
  return true;
}

}  // namespace

ops::Embed::Problem reduced(ops::Embed::Problem p, int64_t cap) {
  const int64_t behind = p.end_of_ids() - p.first_id - p.vocab_size;  // ids of ranks behind this one
  p.vocab_size = capped(p.vocab_size, cap);
  p.hidden = capped(p.hidden, cap);
  p.first_id = capped(p.first_id, cap);
  p.num_ids = p.first_id + p.vocab_size + capped(behind, cap);
  return p;
}

ops::AttnIn::Problem reduced(ops::AttnIn::Problem p, int64_t cap) {
  p.hidden = capped(p.hidden, cap);
  if (p.num_kv_heads > 0 && p.num_q_heads % p.num_kv_heads == 0) {
    const int64_t ratio = p.num_q_heads / p.num_kv_heads;
    p.num_kv_heads = kept_owners(p.num_kv_heads, cap);
    p.num_q_heads = p.num_kv_heads * ratio;
  }
  p.q.out_features = p.num_q_heads * 2 * p.head_dim;
  p.k.out_features = p.v.out_features = p.num_kv_heads * p.head_dim;
  p.q.in_features = p.k.in_features = p.v.in_features = p.hidden;
  return p;
}

ops::Attention::Problem reduced(ops::Attention::Problem p, int64_t cap) {
  if (!equal_shares(p.kv_head, p.num_kv_heads)) return p;
  const int64_t ratio = p.num_q_heads / p.num_kv_heads;
  p.num_kv_heads = kept_owners(p.num_kv_heads, cap);
  p.num_q_heads = p.num_kv_heads * ratio;
  p.kv_head.resize(static_cast<size_t>(p.num_q_heads));
  return p;
}

ops::GdnIn::Problem reduced(ops::GdnIn::Problem p, int64_t cap) {
  p.hidden = capped(p.hidden, cap);
  for (ops::LinearShape* linear : {&p.qkv, &p.z, &p.b, &p.a}) cap_linear(*linear, cap);
  return p;
}

ops::GdnMix::Problem reduced(ops::GdnMix::Problem p, int64_t cap) {
  if (!equal_shares(p.k_head, p.num_k_heads)) return p;
  const int64_t ratio = p.num_v_heads / p.num_k_heads;
  p.num_k_heads = kept_owners(p.num_k_heads, cap);
  p.num_v_heads = p.num_k_heads * ratio;
  p.k_head.resize(static_cast<size_t>(p.num_v_heads));
  return p;
}

ops::LinearResidual::Problem reduced(ops::LinearResidual::Problem p, int64_t cap) {
  cap_linear(p.linear, cap);
  return p;
}

ops::MlpIn::Problem reduced(ops::MlpIn::Problem p, int64_t cap) {
  p.hidden = capped(p.hidden, cap);
  p.intermediate = capped(p.intermediate, cap);
  cap_linear(p.gate, cap);
  cap_linear(p.up, cap);
  return p;
}

ops::MtpIn::Problem reduced(ops::MtpIn::Problem p, int64_t cap) {
  p.hidden = p.fc.out_features = capped(p.hidden, cap);
  p.fc.in_features = 2 * p.hidden;
  return p;
}

ops::Head::Problem reduced(ops::Head::Problem p, int64_t cap) {
  p.tied = false;  // the same arithmetic over a table of its own
  p.hidden = p.lm_head.in_features = capped(p.hidden, cap);
  p.vocab_size = p.lm_head.out_features = capped(p.vocab_size, cap);
  return p;
}

ops::Sample::Problem reduced(ops::Sample::Problem p, int64_t cap) {
  constexpr int64_t kRows = 16;  // logits are one row a token: a longer vocabulary costs little, and reductions over it take several steps
  const int64_t without_text = p.vocab_size - p.num_tokens;
  p.vocab_size = capped(p.vocab_size, kRows * cap);
  p.num_tokens = std::max(p.vocab_size - without_text, p.vocab_size / 2);
  return p;
}

ops::DraftRows::Problem reduced(ops::DraftRows::Problem p, int64_t cap) {
  p.hidden = capped(p.hidden, cap);
  return p;
}

ops::StateCopy::Problem reduced(ops::StateCopy::Problem p, int64_t) { return p; }

ops::Combine::Problem reduced(ops::Combine::Problem p, int64_t cap) {
  p.hidden = capped(p.hidden, cap);
  return p;
}

}  // namespace quern::worker::selftest
