#pragma once

#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "engine/prefix_cache_options.h"
#include "engine/prefix_index.h"
#include "engine/sequence.h"
#include "worker/step.h"
#include "worker/worker_group.h"

namespace quern::engine {

/// Decides which states are kept and what a new sequence resumes from. The states of a sequence are kept
///   - at the last boundary before each cut hint, at its prompt's last boundary and where it leaves the path of an earlier sequence;
///   - every `snapshot_interval` tokens;
///   - at the last boundary of its output, when it finishes or is cancelled: the slot still holds that state. While a sequence decodes, the
///     boundary before that is kept as well, for whoever cancelled before having read the last tokens.
/// What the device has no room for goes to host memory, if there is some; so does what a preempted sequence had computed up to its last
/// boundary, from where it goes on with a replay of less than a block.
/// Only finite states are shared: one is found by others once its own sequence has drawn a token from finite logits at the row before the
/// boundary or behind it. Whatever were not finite in the state, in the rows since the boundary before it or in their KV would have made
/// those logits so too. Part of the scheduler; used by the engine thread alone.
class PrefixCache {
 public:
  PrefixCache(const worker::WorkerLimits& limits, const PrefixCacheOptions& options, int32_t max_num_seqs, BlockPool& blocks);

  [[nodiscard]] bool enabled() const { return snapshots_.size() > 0; }

  /// What a waiting sequence could resume from.
  [[nodiscard]] PrefixIndex::Hit find(const Sequence& sequence, bool device_only = false) const;
  /// Holds fast what is in host memory of a hit, and makes room for its state. False: there is none, only a hit on the device can be used.
  bool prepare(const PrefixIndex::Hit& hit);
  /// The hit is not used after all.
  void let_go(const PrefixIndex::Hit& hit);
  /// `other` will soon leave more than `num_rows` rows that `waiting` can resume behind: its prompt is being computed, or it has finished and a
  /// step in flight still names it.
  [[nodiscard]] bool will_keep_more(const Sequence& other, const Sequence& waiting, int32_t num_rows) const;
  /// The sequence is admitted with `hit`: it holds the blocks and begins behind them.
  void admit(Sequence& sequence, PrefixIndex::Hit hit);
  /// Where a chunk of the prompt that would go to `end` must end so that its state can be kept.
  [[nodiscard]] int32_t cut(const Sequence& sequence, int32_t end) const;
  /// The step in the making will have a run of `num_rows` rows of the sequence: what has to be copied before.
  void before_run(Sequence& sequence, int32_t num_rows, bool verify);
  /// A token was drawn from finite logits at the last known row.
  void prove(Sequence& sequence);
  /// The sequence is about to give back its slot and blocks for good, and no step in flight names it.
  void keep_output(Sequence& sequence);
  /// The sequence is preempted, and no step in flight names it: its last boundary may move to host memory.
  void keep_preempted(Sequence& sequence);
  /// Nothing that this sequence has put into the cache may be used again.
  void withdraw(Sequence& sequence);
  /// The sequence gives back what it holds but may be resumed.
  void release(Sequence& sequence);

  /// The state ops of the next step so far, in order. Copies that sequences which are gone have left to do stand there as well; until that step
  /// nothing changes their slots.
  [[nodiscard]] std::vector<worker::StateOp>& ops() { return ops_; }

  /// Frees blocks that only the cache holds, of what is worth least. False when there are none (yet).
  bool evict_blocks() { return index_.evict_blocks(); }

  [[nodiscard]] uint64_t num_queried_tokens() const { return num_queried_tokens_; }
  [[nodiscard]] uint64_t num_hit_tokens() const { return num_hit_tokens_; }
  [[nodiscard]] uint64_t num_evictions() const { return index_.num_evictions(); }
  [[nodiscard]] int32_t num_cached_blocks() const { return index_.num_blocks(); }
  [[nodiscard]] int32_t num_snapshots_used() const { return index_.num_entries(); }
  [[nodiscard]] uint64_t num_host_tokens() const { return num_host_tokens_; }
  [[nodiscard]] uint64_t num_swapped() const { return num_swapped_; }
  [[nodiscard]] uint64_t num_recomputed() const { return num_recomputed_; }
  [[nodiscard]] int32_t num_host_blocks() const { return host_blocks_.size(); }
  [[nodiscard]] int32_t num_host_blocks_used() const { return host_blocks_.size() - host_blocks_.num_free(); }

 private:
  void keep(Sequence& sequence, int32_t boundary);
  void keep_fallback(Sequence& sequence);
  [[nodiscard]] bool may_keep(const Sequence& sequence, int32_t boundary) const;
  std::optional<SnapshotRef> acquire();

  const PrefixCacheOptions options_;
  const int32_t interval_;
  SnapshotPool snapshots_;
  HostBlockPool host_blocks_;
  HostSnapshotPool host_snapshots_;
  std::vector<SnapshotRef> spare_;  // for fallbacks
  std::vector<worker::StateOp> ops_;
  PrefixIndex index_;
  uint64_t num_queried_tokens_ = 0, num_hit_tokens_ = 0, num_host_tokens_ = 0, num_swapped_ = 0, num_recomputed_ = 0;
};

}  // namespace quern::engine
