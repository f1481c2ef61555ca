#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/result.h"
#include "model/config.h"
#include "weights/source.h"

// Which part of the model one rank has (model-spec.md 2.7). Every cut follows from here: extents of problems, slices of weights, memory.

namespace quern::worker {

using weights::Range;

/// A rank's layers, and of each of them its heads and columns. Shares are uneven where they have to be; heads that several ranks read are kept by each of them. No share is empty.
struct Shard {
  int32_t tp_rank = 0, tp_size = 1, pp_rank = 0, pp_size = 1;
  Range layers;                 // of the model
  Range q_heads, kv_heads;      // attention: its own query heads, and the kv heads that they read
  Range v_heads, k_heads;       // GDN: its own value heads, and the key heads that they read
  Range intermediate, vocab;    // columns of the MLP; token ids whose rows of embedding and head it has
  std::vector<int32_t> kv_head, k_head;  // local owner of each local query and value head

  [[nodiscard]] bool first_stage() const { return pp_rank == 0; }
  [[nodiscard]] bool last_stage() const { return pp_rank == pp_size - 1; }
  /// Ranks are numbered stage by stage.
  [[nodiscard]] int32_t rank() const { return pp_rank * tp_size + tp_rank; }
};

/// Rank `tp_rank` of `tp_size` in a stage with these layers. check_tp_size has agreed.
Shard make_shard(const model::ModelConfig& config, int32_t tp_rank, int32_t tp_size, int32_t pp_rank, int32_t pp_size, const Range& layers);

/// That the model can be shared out among so many ranks: what there is too little of, else.
Result<void> check_tp_size(const model::ModelConfig& config, int32_t tp_size);

/// What the rank keeps of a tensor, by canonical name; none: nothing. `has_mtp`: the model's last stage drafts.
std::optional<weights::Slice> slice_of(const Shard& shard, const model::ModelConfig& config, std::string_view tensor, bool has_mtp);

/// The rank's part of the model: its layers, with its heads and columns. The vocabulary stays whole: logits are gathered.
model::ModelConfig part_of(const model::ModelConfig& config, const Shard& shard);
/// The rank's part of what the checkpoint holds, under the same names. Error: block scales that a cut does not fit.
Result<weights::Inventory> part_of(const weights::Inventory& inventory, const model::ModelConfig& config, const Shard& shard, bool with_mtp);

/// Layers of each stage such that the slowest stage takes least, where weights fit; else such that the fullest stage holds least.
struct StageCosts {
  std::vector<double> layer_bytes;         // of each layer, read for a token and kept
  double first_resident_bytes = 0;         // the embedding: kept by the first stage, read by none
  double last_bytes = 0;                   // head: read by the last stage
  double last_resident_bytes = 0;          // kept by the last stage beside that
  std::vector<double> bandwidth;           // of each stage
  std::vector<double> memory_bytes;        // of each stage, for weights
};
std::vector<Range> split_layers(const StageCosts& costs);

}  // namespace quern::worker
