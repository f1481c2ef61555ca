#include "worker/sizes.h"

#include <algorithm>

#include "ops/sample.h"

namespace quern::worker {

Sizes::Sizes(const model::ModelConfig& c, const Shard& shard, const Numerics& n, bool with_mtp) {
  const auto activation = static_cast<int64_t>(dtype_size(n.activation));
  const auto ring = static_cast<int64_t>(dtype_size(n.ring));
  ring_rows = ops::kGrid + n.k_max + 1;
  window_columns = 3 + n.k_max + 1;
  channels = c.conv_channels();
  const bool last = shard.last_stage();
  with_mtp = with_mtp && last;
  hidden_window = last ? n.k_max + 2 : 0;
  sampled_vocab = last ? c.vocab_size : 0;
  const int64_t boundary_hidden = last ? c.hidden_size : 0;
  num_linear_layers = c.num_linear_layers();
  num_attention_layers = c.num_attention_layers() + (with_mtp ? 1 : 0);

  state_elements = c.linear_num_value_heads * c.linear_value_head_dim * c.linear_key_head_dim;
  ring_k_elements = ring_rows * c.linear_num_key_heads * c.linear_key_head_dim;
  ring_u_elements = ring_rows * c.linear_num_value_heads * c.linear_value_head_dim;
  ring_g_elements = ring_rows * c.linear_num_value_heads;

  state_slot_bytes = static_cast<uint64_t>(num_linear_layers * (state_elements * 4 + 3 * channels * activation) + boundary_hidden * activation);
  ring_row_bytes = static_cast<uint64_t>(num_linear_layers * (ring_k_elements + ring_u_elements) / ring_rows * ring);
  ring_slot_bytes = static_cast<uint64_t>(
      num_linear_layers * ((ring_k_elements + ring_u_elements) * ring + ring_g_elements * 4 + window_columns * channels * activation) +
      hidden_window * c.hidden_size * activation);
  sampler_slot_bytes = sizeof(ops::SlotSampling) + static_cast<uint64_t>(sampled_vocab) * 5;
  snapshot_bytes = state_slot_bytes;
  block_bytes = static_cast<uint64_t>(num_attention_layers * 2 * c.num_key_value_heads * ops::kGrid * c.head_dim) * dtype_size(n.kv);

  attention_scratch = 3 * c.num_attention_heads * c.head_dim;                                  // query, gate, output
  const int64_t value_width = c.linear_num_value_heads * c.linear_value_head_dim;
  gdn_scratch = channels + 2 * value_width + 2 * round_up(c.linear_num_value_heads, 16);       // qkv, z, output, b, a
  mlp_scratch = c.intermediate_size;
  scratch_elements = std::max({attention_scratch, gdn_scratch, mlp_scratch});
}

double Sizes::decode_bytes(int64_t context) const {
  const auto states = static_cast<double>(num_linear_layers * state_elements * 4);
  return states + static_cast<double>(ring_row_bytes) * ops::kGrid / 2 + static_cast<double>(block_bytes) * static_cast<double>(context) / ops::kGrid;
}

}  // namespace quern::worker
