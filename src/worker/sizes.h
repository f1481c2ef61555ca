#pragma once

#include <cstdint>

#include "model/config.h"
#include "ops/rows.h"
#include "worker/problems.h"

// Extents and bytes of everything that a sequence or a step needs. The plan adds them up, the runner allocates them: one place says how much.

namespace quern::worker {

/// Scratch that kernels have at least.
inline constexpr size_t kLeastKernelWorkspaceBytes = 64ull << 20;

struct Sizes {
  /// `config`: the rank's part of the model.
  Sizes(const model::ModelConfig& config, const Shard& shard, const Numerics& numerics, bool with_mtp);

  // per GDN layer and slot
  int64_t ring_rows, window_columns, channels;
  int64_t state_elements, ring_k_elements, ring_u_elements, ring_g_elements;
  // counts of layers
  int64_t num_linear_layers, num_attention_layers;  // the latter with the MTP layer
  int64_t hidden_window;                            // final hidden rows kept per slot; 0: another stage has them
  int64_t sampled_vocab;                            // ids that the sampler draws from; 0: another stage samples

  uint64_t state_slot_bytes;     // S, boundary columns and boundary hidden, all layers
  uint64_t ring_slot_bytes;      // rings, conv windows, hidden window, all layers
  uint64_t sampler_slot_bytes;   // parameters, counts, prompt marks, small tables
  uint64_t snapshot_bytes;       // of one snapshot: as state_slot_bytes
  uint64_t block_bytes;          // KV of 64 tokens, all layers
  uint64_t ring_row_bytes;       // k and u of a row, all layers
  /// Elements of one row in the scratch that attention, GDN and MLP take turns with.
  int64_t attention_scratch, gdn_scratch, mlp_scratch, scratch_elements;

  /// What a sequence's decode row reads beside weights: states, rings that are half full as they are on average, keys and values of `context` tokens.
  [[nodiscard]] double decode_bytes(int64_t context) const;
  [[nodiscard]] uint64_t slot_bytes() const { return state_slot_bytes + ring_slot_bytes + sampler_slot_bytes; }
};

}  // namespace quern::worker
