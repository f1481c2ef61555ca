#include "engine/prefix_index.h"

#include <algorithm>
#include <utility>

#include "base/check.h"
#include "base/hash.h"

namespace quern::engine {

using worker::StateOp;

namespace {

constexpr int32_t kMostRows = 4 * kBlockSize;

uint64_t hash_of(std::span<const int32_t> tokens) {
  uint64_t hash = 0;
  for (const int32_t token : tokens) hash = hash_combine(hash, static_cast<uint64_t>(token));
  return hash;
}

std::span<const int32_t> block_of(std::span<const int32_t> tokens, size_t block) {
  return tokens.subspan(block * static_cast<size_t>(kBlockSize), static_cast<size_t>(kBlockSize));
}

size_t num_whole_blocks(std::span<const int32_t> tokens) { return tokens.size() / static_cast<size_t>(kBlockSize); }

}  // namespace

PrefixIndex::~PrefixIndex() {
  const auto unmark = [this](const auto& self, const Node& node) -> void {
    if (node.block) pools_.blocks.mark_cached(*node.block, false);
    for (const auto& [hash, child] : node.children) self(self, *child);
  };
  for (const auto& [salt, root] : roots_) unmark(unmark, *root);
}

PrefixIndex::Node* PrefixIndex::child(const Node& parent, std::span<const int32_t> tokens, uint64_t hash, uint8_t prompt_rows) {
  const auto [first, last] = parent.children.equal_range(hash);
  for (auto it = first; it != last; ++it)
    if (it->second->prompt_rows == prompt_rows && std::equal(tokens.begin(), tokens.end(), it->second->tokens.begin()))
      return it->second.get();
  return nullptr;
}

PrefixIndex::Hit PrefixIndex::find(const PrefixKey& key, bool device_only) const {
  Hit hit;
  const auto root = roots_.find(std::string(key.salt));
  if (root == roots_.end()) return hit;
  // Blocks of the same tokens may stand there several times, computed as different kinds of rows.
  std::vector<const Node*> level = {root->second.get()}, next;
  const Node* deepest = nullptr;
  for (size_t i = 0; i < num_whole_blocks(key.tokens); ++i) {
    const std::span<const int32_t> tokens = block_of(key.tokens, i);
    const uint64_t hash = hash_of(tokens);
    next.clear();
    for (const Node* parent : level) {
      const auto [first, last] = parent->children.equal_range(hash);
      for (auto it = first; it != last; ++it) {
        const Node& node = *it->second;
        if (!key.prompt_rows.empty() && node.prompt_rows != key.prompt_rows[i]) continue;
        if (std::equal(tokens.begin(), tokens.end(), node.tokens.begin())) next.push_back(&node);
      }
    }
    if (next.empty()) break;
    // Rows of a prompt first: they are what a miss would compute.
    std::stable_sort(next.begin(), next.end(), [](const Node* a, const Node* b) { return a->prompt_rows > b->prompt_rows; });
    hit.num_known_blocks = static_cast<int32_t>(i + 1);
    const auto resumable = std::find_if(next.begin(), next.end(), [&](const Node* n) {
      return n->entry && !n->entry->pending && (!device_only || (n->block && n->entry->snapshot));
    });
    if (resumable != next.end()) {
      deepest = *resumable;
      hit.pending = false;
    } else {
      hit.pending |= std::any_of(next.begin(), next.end(), [](const Node* n) { return n->entry.has_value(); });
    }
    std::swap(level, next);
  }
  if (deepest == nullptr) return hit;
  hit.entry = deepest->entry->id;
  hit.snapshot = deepest->entry->snapshot;
  for (const Node* node = deepest; node->parent != nullptr; node = node->parent) {
    if (node->block) {
      hit.blocks.push_back(*node->block);
    } else {
      ++hit.num_host_blocks;
    }
    hit.prompt_rows.push_back(node->prompt_rows);
  }
  std::reverse(hit.blocks.begin(), hit.blocks.end());
  std::reverse(hit.prompt_rows.begin(), hit.prompt_rows.end());
  return hit;
}

void PrefixIndex::use(EntryId entry) {
  const auto it = entries_.find(entry);
  if (it == entries_.end()) return;
  it->second->entry->used_at = clock_;
  it->second->entry->last_use = ++num_uses_;
}

void PrefixIndex::pin(EntryId entry) { entries_.at(entry)->entry->pinned = true; }

void PrefixIndex::unpin(EntryId entry) { entries_.at(entry)->entry->pinned = false; }

void PrefixIndex::load(Hit& hit) {
  Node& end = *entries_.at(hit.entry);
  CHECK(end.entry->pinned);
  std::vector<Node*> missing;
  for (Node* node = &end; node->parent != nullptr && !node->block; node = node->parent) missing.push_back(node);
  CHECK(std::ssize(missing) == hit.num_host_blocks);
  for (auto it = missing.rbegin(); it != missing.rend(); ++it) {
    Node& node = **it;
    node.block = pools_.blocks.acquire();
    CHECK(node.block.has_value());
    pools_.blocks.mark_cached(*node.block, true);
    ops_.push_back({.kind = StateOp::Kind::kBlockFromHost, .block = node.block->index(), .host = node.host->index()});
    node.host.reset();
    hit.blocks.push_back(*node.block);
  }
  hit.num_host_blocks = 0;
  if (!end.entry->snapshot) {
    end.entry->snapshot = pools_.snapshots.acquire();
    CHECK(end.entry->snapshot.has_value());
    ops_.push_back({.kind = StateOp::Kind::kSnapshotFromHost, .snapshot = end.entry->snapshot->index(), .host = end.entry->host->index()});
    end.entry->host.reset();
  }
  hit.snapshot = end.entry->snapshot;
}

bool PrefixIndex::contains(const PrefixKey& key) const {
  const auto root = roots_.find(std::string(key.salt));
  if (root == roots_.end()) return false;
  const Node* node = root->second.get();
  for (size_t i = 0; i < num_whole_blocks(key.tokens) && node != nullptr; ++i) {
    const std::span<const int32_t> tokens = block_of(key.tokens, i);
    node = child(*node, tokens, hash_of(tokens), key.prompt_rows[i]);
  }
  return node != nullptr && node->entry.has_value();
}

std::optional<PrefixIndex::EntryId> PrefixIndex::add(const PrefixKey& key, std::span<const BlockRef> blocks, SnapshotRef snapshot) {
  const size_t num_blocks = num_whole_blocks(key.tokens);
  CHECK(num_blocks > 0 && blocks.size() >= num_blocks && key.prompt_rows.size() >= num_blocks);
  std::unique_ptr<Node>& root = roots_[std::string(key.salt)];
  if (!root) {
    root = std::make_unique<Node>();
    root->salt = key.salt;
  }
  Node* node = root.get();
  for (size_t i = 0; i < num_blocks; ++i) {
    const std::span<const int32_t> tokens = block_of(key.tokens, i);
    const uint64_t hash = hash_of(tokens);
    Node* next = child(*node, tokens, hash, key.prompt_rows[i]);
    if (next != nullptr && !next->block) {
      // The sequence has the block on the device anyway; the copy in host memory is not needed any more.
      next->host.reset();
      next->block = blocks[i];
      pools_.blocks.mark_cached(*next->block, true);
    }
    if (next == nullptr) {
      auto made = std::make_unique<Node>();
      made->parent = node;
      made->hash = hash;
      std::copy(tokens.begin(), tokens.end(), made->tokens.begin());
      made->prompt_rows = key.prompt_rows[i];
      made->block = blocks[i];
      pools_.blocks.mark_cached(*made->block, true);
      ++num_blocks_;
      next = node->children.emplace(hash, std::move(made))->second.get();
    }
    node = next;
  }
  if (node->entry) return std::nullopt;
  const EntryId id = next_id_++;
  node->entry = Entry{.id = id, .snapshot = std::move(snapshot), .used_at = clock_, .last_use = ++num_uses_};
  entries_.emplace(id, node);
  return id;
}

void PrefixIndex::confirm(EntryId entry) {
  const auto it = entries_.find(entry);
  if (it != entries_.end()) it->second->entry->pending = false;
}

void PrefixIndex::withdraw(EntryId entry) {
  const auto it = entries_.find(entry);
  if (it != entries_.end()) remove(*it->second);
}

/// The clock when the entry was last used, and the tokens per byte that it saves: rows since the boundary before it, against its snapshot
/// and the blocks that nobody else needs (Cao, Irani, "Cost-aware WWW proxy caching algorithms", 1997). Rows count up to kMostRows, so that a
/// sparse state in the middle of a long prompt does not outlive for long the fresh ones at its end, from which the next turn goes on.
double PrefixIndex::priority(const Node& node) const {
  double rows = kBlockSize, bytes = costs_.snapshot_bytes;
  bool own = node.children.empty();
  if (own) bytes += costs_.block_bytes;
  for (const Node* above = node.parent; above->parent != nullptr && !above->entry; above = above->parent) {
    rows += kBlockSize;
    own = own && above->children.size() == 1;
    if (own) bytes += costs_.block_bytes;
  }
  return node.entry->used_at + std::min<double>(rows, kMostRows) / bytes;
}

/// The order of eviction: priority, then the time of the last use.
bool PrefixIndex::goes_before(const Node& a, const Node& b) const {
  const double first = priority(a), second = priority(b);
  return first < second || (first == second && a.entry->last_use < b.entry->last_use);
}

/// The entry that goes first among those that `may` go.
template <class Predicate>
PrefixIndex::Node* PrefixIndex::worst_of(Predicate may) const {
  Node* worst = nullptr;
  for (const auto& [id, node] : entries_) {
    if (node->entry->pending || node->entry->pinned || !may(*node)) continue;
    if (worst == nullptr || goes_before(*node, *worst)) worst = node;
  }
  return worst;
}

bool PrefixIndex::has_child_on_device(const Node& node) {
  return std::any_of(node.children.begin(), node.children.end(), [](const auto& child) { return child.second->block.has_value(); });
}

PrefixIndex::Node* PrefixIndex::free_end(Node& entry_node) {
  Node* node = &entry_node;
  while (node->parent != nullptr && !node->block) node = node->parent;
  return node->block && node->block->unique() && !has_child_on_device(*node) ? node : nullptr;
}

bool PrefixIndex::evict_snapshot() {
  Node* worst = worst_of([](const Node& node) { return node.entry->snapshot && node.entry->snapshot->unique(); });
  if (worst == nullptr) return false;
  Entry& entry = *worst->entry;
  clock_ = std::max(clock_, priority(*worst));
  entry.pinned = true;  // while others make room for it
  if (pools_.host_snapshots.num_free() > 0 || evict_host([](const Node& node) { return node.entry->host.has_value(); })) {
    entry.host = pools_.host_snapshots.acquire();
    ops_.push_back({.kind = StateOp::Kind::kSnapshotToHost, .snapshot = entry.snapshot->index(), .host = entry.host->index()});
    entry.snapshot.reset();
    entry.pinned = false;
    return true;
  }
  ++num_evictions_;
  remove(*worst);
  return true;
}

bool PrefixIndex::evict_blocks() {
  Node* worst = worst_of([](Node& node) { return free_end(node) != nullptr; });
  if (worst == nullptr) {
    // Two sequences that computed the same tokens have blocks of their own, and the tree has one of each pair: a block that nobody uses may
    // stand before one that is in use. It comes free when all entries behind it are gone.
    worst = worst_of([](const Node& node) {
      const Node* at = &node;
      while (at->parent != nullptr && !(at->block && at->block->unique())) at = at->parent;
      return node.children.empty() && at->parent != nullptr;
    });
    if (worst == nullptr) return false;
    ++num_evictions_;
    remove(*worst);
    return true;
  }
  Node* end = free_end(*worst);
  clock_ = std::max(clock_, priority(*worst));
  worst->entry->pinned = true;
  int32_t num_moved = 0;
  // From the end of the path to the boundary before, or to what others use.
  for (Node* node = end; node->parent != nullptr && node->block->unique() && !has_child_on_device(*node); node = node->parent) {
    if (node != worst && node->entry && num_moved > 0) break;
    if (pools_.host_blocks.num_free() == 0 && !evict_host([](const Node& other) { return other.host.has_value() && other.children.empty(); })) break;
    node->host = pools_.host_blocks.acquire();
    ops_.push_back({.kind = StateOp::Kind::kBlockToHost, .block = node->block->index(), .host = node->host->index()});
    pools_.blocks.mark_cached(*node->block, false);
    node->block.reset();
    ++num_moved;
  }
  worst->entry->pinned = false;
  if (num_moved > 0) return true;
  // No room in host memory: entries behind this block go with it.
  ++num_evictions_;
  std::vector<EntryId> behind;
  for (const auto& [id, node] : entries_)
    for (const Node* above = node; above->parent != nullptr; above = above->parent)
      if (above == end) behind.push_back(id);
  for (const EntryId id : behind) remove(*entries_.at(id));
  return true;
}

/// Forgets the entry that is worth least among those in host memory with which a wanted place comes free.
bool PrefixIndex::evict_host(bool (*has_place)(const Node& node)) {
  Node* worst = worst_of(has_place);
  if (worst == nullptr) return false;
  clock_ = std::max(clock_, priority(*worst));
  ++num_evictions_;
  remove(*worst);
  return true;
}

/// Takes the entry away, and with it all blocks that lead to no other.
void PrefixIndex::remove(Node& node) {
  entries_.erase(node.entry->id);
  node.entry.reset();
  Node* at = &node;
  while (at->parent != nullptr && !at->entry && at->children.empty()) {
    Node& parent = *at->parent;
    if (at->block) pools_.blocks.mark_cached(*at->block, false);
    --num_blocks_;
    const auto [first, last] = parent.children.equal_range(at->hash);
    parent.children.erase(std::find_if(first, last, [at](const auto& entry) { return entry.second.get() == at; }));
    at = &parent;
  }
  if (at->parent == nullptr && at->children.empty()) roots_.erase(roots_.find(at->salt));
}

}  // namespace quern::engine
