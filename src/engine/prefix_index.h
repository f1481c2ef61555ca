#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "engine/counted_pool.h"
#include "engine/index_pool.h"
#include "worker/step.h"

namespace quern::engine {

/// Tokens of a KV block, which is also the grid on which prompts are cut (architecture.md section 4).
inline constexpr int32_t kBlockSize = ops::kGrid;

/// What identifies the state of a sequence at a boundary: whose cache it is, its tokens, and how each row was computed.
struct PrefixKey {
  std::string_view salt;
  std::span<const int32_t> tokens;       // 64 a block; what goes beyond whole blocks is not looked at
  std::span<const uint8_t> prompt_rows;  // per block, how many of its rows were computed as P; they come first. Lookups only: empty, any
};

/// Which boundaries of which token sequences can be resumed: a tree of blocks of 64 tokens, each with its KV block, some with a snapshot of
/// the recurrent state behind them (architecture.md section 5). A prefix can be resumed where both exist. Blocks are found by a hash of their
/// tokens and compared token by token, so that no collision can mix two conversations up.
///
/// What the device has no room for goes to host memory where there are places for it, and comes back when it is resumed from. The blocks of
/// a path that are on the device stand before those that are not.
///
/// Goals: what is handed out stays valid, since handles are shared; an index that is full forgets what saves the least work per byte, least
/// recently used first. Non-goals: it moves no data itself, but says what is to be copied; it keeps no KV block that no snapshot needs.
/// Pure; used by the engine thread alone.
class PrefixIndex {
 public:
  using EntryId = uint64_t;

  /// What keeping costs; only the ratio counts.
  struct Costs {
    double snapshot_bytes = 1, block_bytes = 1;
  };

  /// Places on the device and in host memory.
  struct Pools {
    BlockPool& blocks;
    SnapshotPool& snapshots;
    HostBlockPool& host_blocks;
    HostSnapshotPool& host_snapshots;
  };

  /// What is known of a token sequence.
  struct Hit {
    EntryId entry = 0;  // 0: nothing to resume from
    std::vector<BlockRef> blocks;      // those on the device
    int32_t num_host_blocks = 0;       // and behind them
    std::vector<uint8_t> prompt_rows;  // of each block
    std::optional<SnapshotRef> snapshot;  // nothing: in host memory
    int32_t num_known_blocks = 0;  // blocks of these tokens in the index; where it is more than the hit, others have left this path here
    bool pending = false;          // a deeper boundary will be there soon

    [[nodiscard]] int32_t num_rows() const { return (static_cast<int32_t>(blocks.size()) + num_host_blocks) * kBlockSize; }
    [[nodiscard]] bool on_device() const { return num_host_blocks == 0 && snapshot.has_value(); }
  };

  /// Copies between device and host are appended to `ops`, in the order in which they have to be made.
  PrefixIndex(const Pools& pools, const Costs& costs, std::vector<worker::StateOp>& ops) : pools_(pools), costs_(costs), ops_(ops) {}
  PrefixIndex(const PrefixIndex&) = delete;
  PrefixIndex& operator=(const PrefixIndex&) = delete;
  ~PrefixIndex();

  /// The deepest boundary that can be resumed, and the handles to do so; `device_only`: of those that are wholly on the device. Changes
  /// nothing.
  [[nodiscard]] Hit find(const PrefixKey& key, bool device_only = false) const;
  /// Neither evicted nor moved until it is released; the hit's entry must be there.
  void pin(EntryId entry);
  void unpin(EntryId entry);
  /// Brings a pinned hit back to the device: a free block for each of its blocks in host memory must be there, and a snapshot.
  void load(Hit& hit);
  /// The entry was resumed from.
  void use(EntryId entry);
  /// An entry, pending or not, stands at the end of `key`.
  [[nodiscard]] bool contains(const PrefixKey& key) const;
  /// Adds the boundary at the end of `key`: `blocks`, one per 64 tokens, and the state in `snapshot`. It is pending, found by nobody and never
  /// evicted, until confirmed. Nothing when that boundary is known already.
  std::optional<EntryId> add(const PrefixKey& key, std::span<const BlockRef> blocks, SnapshotRef snapshot);
  /// Without effect for entries that are gone.
  void confirm(EntryId entry);
  void withdraw(EntryId entry);

  /// Of the entries whose snapshot nobody else holds, the one that is worth least gives it up: to host memory, or for good. False when there
  /// is none.
  bool evict_snapshot();
  /// The same with KV blocks: some come free, or do so when this is repeated.
  bool evict_blocks();

  [[nodiscard]] int32_t num_entries() const { return static_cast<int32_t>(entries_.size()); }
  [[nodiscard]] int32_t num_blocks() const { return num_blocks_; }
  [[nodiscard]] uint64_t num_evictions() const { return num_evictions_; }

 private:
  struct Node;
  struct Entry {
    EntryId id = 0;
    std::optional<SnapshotRef> snapshot;  // on the device, or
    std::optional<HostSnapshot> host;     // in host memory
    bool pending = true, pinned = false;
    double used_at = 0;     // the clock when it was last used,
    uint64_t last_use = 0;  // and the number of that use
  };
  using Children = std::unordered_multimap<uint64_t, std::unique_ptr<Node>>;
  struct Node {
    Node* parent = nullptr;  // of a root: null
    std::string salt;        // of a root
    uint64_t hash = 0;
    std::array<int32_t, kBlockSize> tokens{};
    uint8_t prompt_rows = 0;
    std::optional<BlockRef> block;  // on the device, or
    std::optional<HostBlock> host;  // in host memory; a root has neither
    std::optional<Entry> entry;
    Children children;
  };

  /// The node of `block` under `parent` that was computed as `prompt_rows` says.
  [[nodiscard]] static Node* child(const Node& parent, std::span<const int32_t> tokens, uint64_t hash, uint8_t prompt_rows);
  /// The last block of an entry's path that is on the device, if it could be given up now.
  [[nodiscard]] static Node* free_end(Node& entry_node);
  [[nodiscard]] static bool has_child_on_device(const Node& node);
  [[nodiscard]] double priority(const Node& node) const;
  template <class Predicate>
  [[nodiscard]] Node* worst_of(Predicate may) const;
  bool evict_host(bool (*has_place)(const Node& node));
  [[nodiscard]] bool goes_before(const Node& a, const Node& b) const;
  void remove(Node& node);

  const Pools pools_;
  const Costs costs_;
  std::vector<worker::StateOp>& ops_;
  std::unordered_map<std::string, std::unique_ptr<Node>> roots_;
  std::unordered_map<EntryId, Node*> entries_;
  EntryId next_id_ = 1;
  int32_t num_blocks_ = 0;
  uint64_t num_evictions_ = 0, num_uses_ = 0;
  double clock_ = 0;  // the priority of the last entry that was evicted
};

}  // namespace quern::engine
