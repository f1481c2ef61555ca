#include "engine/prefix_index.h"

#include <algorithm>
#include <map>
#include <numeric>
#include <utility>
#include <vector>

#include "base/hash.h"
#include "support/test_support.h"

namespace quern::engine {
namespace {

using EntryId = PrefixIndex::EntryId;

/// An index, its pools, and sequences that are strings of block names: "abc" has the tokens of block a, then those of b and c.
class Bed {
 public:
  explicit Bed(int32_t num_blocks = 64, int32_t num_snapshots = 16, int32_t num_host_blocks = 0, int32_t num_host_snapshots = 0)
      : blocks_(num_blocks),
        snapshots_(num_snapshots),
        host_blocks_(num_host_blocks),
        host_snapshots_(num_host_snapshots),
        index_({blocks_, snapshots_, host_blocks_, host_snapshots_}, {.snapshot_bytes = 4, .block_bytes = 1}, ops_) {}

  static std::vector<int32_t> tokens(std::string_view names) {
    std::vector<int32_t> all;
    for (const char name : names)
      for (int32_t i = 0; i < kBlockSize; ++i) all.push_back(name * 1000 + i);
    return all;
  }
  /// P or D for every block.
  static std::vector<uint8_t> rows(std::string_view kinds) {
    std::vector<uint8_t> all;
    for (const char kind : kinds) all.push_back(kind == 'D' ? 0 : kBlockSize);
    return all;
  }

  /// A sequence that has computed `names` leaves its last boundary; it takes blocks of the index where it can resume. Nothing when known.
  std::optional<EntryId> add(std::string_view names, std::string kinds = {}, std::string_view salt = {}, bool confirm = true) {
    kinds.resize(names.size(), 'P');
    const std::vector<int32_t> all = tokens(names);
    const std::vector<uint8_t> how = rows(kinds);
    PrefixIndex::Hit hit = index_.find({.salt = salt, .tokens = all, .prompt_rows = how}, true);
    if (hit.entry != 0) index_.use(hit.entry);
    std::vector<BlockRef> held = std::move(hit.blocks);
    while (held.size() < names.size()) held.push_back(*blocks_.acquire());
    auto snapshot = snapshots_.acquire();
    if (!snapshot) {
      EXPECT_TRUE(index_.evict_snapshot());
      snapshot = snapshots_.acquire();
    }
    const auto entry = index_.add({.salt = salt, .tokens = all, .prompt_rows = how}, held, *std::move(snapshot));
    if (entry && confirm) index_.confirm(*entry);
    return entry;
  }
  /// Blocks that `names` can resume behind.
  int32_t find(std::string_view names, std::string_view salt = {}) {
    const PrefixIndex::Hit hit = look(names, salt);
    if (hit.entry != 0) index_.use(hit.entry);
    return static_cast<int32_t>(hit.blocks.size());
  }
  PrefixIndex::Hit look(std::string_view names, std::string_view salt = {}) {
    const std::vector<int32_t> all = tokens(names);
    return index_.find({.salt = salt, .tokens = all, .prompt_rows = {}});
  }
  BlockPool& blocks() { return blocks_; }
  SnapshotPool& snapshots() { return snapshots_; }
  [[nodiscard]] HostBlockPool& host_blocks() { return host_blocks_; }
  [[nodiscard]] HostSnapshotPool& host_snapshots() { return host_snapshots_; }
  std::vector<worker::StateOp> take_ops() { return std::exchange(ops_, {}); }
  PrefixIndex& operator*() { return index_; }
  PrefixIndex* operator->() { return &index_; }

 private:
  BlockPool blocks_;
  SnapshotPool snapshots_;
  HostBlockPool host_blocks_;
  HostSnapshotPool host_snapshots_;
  std::vector<worker::StateOp> ops_;
  PrefixIndex index_;
};

TEST(PrefixIndex, ResumesAtTheDeepestBoundaryThatHasASnapshot) {
  Bed bed;
  bed.add("abc");
  bed.add("abcdef");
  EXPECT_EQ(bed.find("abcdefgh"), 6);
  EXPECT_EQ(bed.find("abcdex"), 3) << "blocks alone prove nothing";
  EXPECT_EQ(bed.find("ab"), 0);
  EXPECT_EQ(bed.find("xabc"), 0);
  EXPECT_EQ(bed->num_blocks(), 6) << "the second shares the first's blocks";
}

TEST(PrefixIndex, TellsWhereAPathIsLeft) {
  Bed bed;
  bed.add("ab");
  bed.add("abcdef");
  const PrefixIndex::Hit hit = bed.look("abcdxy");
  EXPECT_EQ(hit.blocks.size(), 2u);
  EXPECT_EQ(hit.num_known_blocks, 4);
}

TEST(PrefixIndex, ComparesWholeTokensAndOnlyWholeBlocks) {
  Bed bed;
  bed.add("ab");
  std::vector<int32_t> tokens = Bed::tokens("ab");
  tokens.push_back(5);
  EXPECT_EQ(bed->find({.salt = {}, .tokens = tokens, .prompt_rows = {}}).blocks.size(), 2u);
  tokens[100] += 1;
  EXPECT_EQ(bed->find({.salt = {}, .tokens = tokens, .prompt_rows = {}}).blocks.size(), 0u);
}

TEST(PrefixIndex, SharesNothingBetweenSalts) {
  Bed bed;
  bed.add("abc", {}, "mine");
  EXPECT_EQ(bed.find("abc"), 0);
  EXPECT_EQ(bed.find("abc", "yours"), 0);
  EXPECT_EQ(bed.find("abc", "mine"), 3);
}

TEST(PrefixIndex, KeepsRowsApartThatWereComputedDifferently) {
  Bed bed;
  bed.add("abc", "PDD");
  EXPECT_EQ(bed.find("abc"), 3) << "without a wish, anything";
  const auto find_as = [&](std::string_view kinds) {
    const std::vector<int32_t> tokens = Bed::tokens("abc");
    const std::vector<uint8_t> rows = Bed::rows(kinds);
    return bed->find({.salt = {}, .tokens = tokens, .prompt_rows = rows}).blocks.size();
  };
  EXPECT_EQ(find_as("PDD"), 3u);
  EXPECT_EQ(find_as("PPD"), 0u);
  EXPECT_TRUE(bed.add("abc", "PPP").has_value());
  EXPECT_EQ(find_as("PPP"), 3u);
  EXPECT_EQ(bed.look("abc").prompt_rows, Bed::rows("PPP")) << "what a miss would compute comes first";
}

TEST(PrefixIndex, FindsABoundaryOnlyOnceItsCopyIsDone) {
  Bed bed;
  bed.add("ab");
  const auto entry = bed.add("abcd", {}, {}, false);
  EXPECT_EQ(bed.look("abcd").blocks.size(), 2u);
  EXPECT_TRUE(bed.look("abcd").pending);
  EXPECT_FALSE(bed.look("abxx").pending);
  bed->confirm(*entry);
  EXPECT_EQ(bed.look("abcd").blocks.size(), 4u);
  EXPECT_FALSE(bed.look("abcd").pending);
}

TEST(PrefixIndex, AddsABoundaryOnce) {
  Bed bed;
  EXPECT_TRUE(bed.add("ab").has_value());
  EXPECT_FALSE(bed.add("ab").has_value());
  EXPECT_EQ(bed.snapshots().num_free(), 15);
  EXPECT_EQ(bed.blocks().num_free(), 62);
}

TEST(PrefixIndex, WithdrawsWhatWasNotToBeTrustedButNotWhatOthersAdded) {
  Bed bed;
  bed.add("ab");
  const auto faulty = bed.add("abcd");
  bed.add("abcdef");
  bed->withdraw(*faulty);
  EXPECT_EQ(bed.find("abcd"), 2);
  EXPECT_EQ(bed.find("abcdef"), 6);
  bed->withdraw(*faulty);
  bed->confirm(*faulty);
  EXPECT_EQ(bed.find("abcd"), 2);
}

TEST(PrefixIndex, GivesBackEveryBlockWithItsLastBoundary) {
  Bed bed;
  std::vector<EntryId> entries;
  for (const char* names : {"abc", "abd", "ab", "axy", "q"}) entries.push_back(*bed.add(names));
  for (const char* names : {"abc", "q"}) entries.push_back(*bed.add(names, {}, "salt"));
  EXPECT_EQ(bed->num_blocks(), 7 + 4);
  for (const EntryId entry : entries) bed->withdraw(entry);
  EXPECT_EQ(bed->num_blocks(), 0);
  EXPECT_EQ(bed->num_entries(), 0);
  EXPECT_EQ(bed.blocks().num_free(), 64);
  EXPECT_EQ(bed.snapshots().num_free(), 16);
}

TEST(PrefixIndex, ForgetsTheLeastRecentlyUsedOfEqualBoundaries) {
  Bed bed(64, 3);
  bed.add("a");
  bed.add("b");
  bed.add("c");
  EXPECT_EQ(bed.find("a"), 1);
  bed.add("d");
  EXPECT_EQ(bed.look("b").entry, 0u);
  EXPECT_EQ(bed.find("a"), 1);
  // One eviction later, what was not used in between is older than what was.
  bed.add("e");
  bed.add("f");
  EXPECT_EQ(bed.look("c").entry, 0u);
}

TEST(PrefixIndex, ForgetsWhatSavesLeastWorkPerByte) {
  Bed bed(64, 3);
  bed.add("abcdefgh");   // 512 rows for a snapshot and eight blocks
  bed.add("abcdefghi");  // 64 more for another snapshot and a block
  bed.add("xyz");
  bed.add("uv");
  EXPECT_EQ(bed.look("abcdefghi").blocks.size(), 8u);
  EXPECT_EQ(bed.look("xyz").blocks.size(), 3u);
}

TEST(PrefixIndex, EvictsNoSnapshotThatSomebodyIsAboutToRestoreAndNonePending) {
  Bed bed(64, 2);
  bed.add("a");
  const PrefixIndex::Hit hit = bed.look("a");
  bed.add("b", {}, {}, false);
  EXPECT_FALSE(bed->evict_snapshot());
  EXPECT_FALSE(bed->evict_blocks());
}

TEST(PrefixIndex, FreesBlocksFromTheEndsOfPathsThatNobodyUses) {
  Bed bed(8, 8);
  bed.add("ab");
  bed.add("abcd");
  bed.add("xy");
  const PrefixIndex::Hit used = bed.look("xy");
  EXPECT_EQ(bed.blocks().num_free(), 2);
  EXPECT_EQ(bed.blocks().num_idle(), 4);
  EXPECT_TRUE(bed->evict_blocks());
  EXPECT_EQ(bed.look("abcd").blocks.size(), 2u) << "not the boundary in the middle, which frees nothing";
  EXPECT_TRUE(bed->evict_blocks());
  EXPECT_FALSE(bed->evict_blocks()) << "xy is in use";
  EXPECT_EQ(bed.blocks().num_free(), 6);
  EXPECT_EQ(bed.look("xy").blocks.size(), 2u);
}

std::string describe(const std::vector<worker::StateOp>& ops) {
  using Kind = worker::StateOp::Kind;
  std::string text;
  for (const worker::StateOp& op : ops)
    text += op.kind == Kind::kBlockToHost ? "block> " : op.kind == Kind::kBlockFromHost ? "<block " : op.kind == Kind::kSnapshotToHost ? "state> " : "<state ";
  return text;
}

TEST(PrefixIndex, MovesWhatTheDeviceHasNoRoomForToHostMemoryAndBack) {
  Bed bed(4, 1, 8, 2);
  bed.add("ab");
  bed.add("xy");
  EXPECT_EQ(describe(bed.take_ops()), "state> ");
  EXPECT_EQ(bed.blocks().num_free(), 0);
  EXPECT_TRUE(bed->evict_blocks());
  EXPECT_EQ(describe(bed.take_ops()), "block> block> ");
  EXPECT_EQ(bed.blocks().num_free(), 2);
  EXPECT_EQ(bed->num_evictions(), 0u);

  PrefixIndex::Hit hit = bed.look("ab");
  EXPECT_EQ(hit.num_host_blocks, 2);
  EXPECT_EQ(hit.num_rows(), 128);
  EXPECT_FALSE(hit.on_device());
  bed->pin(hit.entry);
  EXPECT_TRUE(bed->evict_snapshot());
  bed->load(hit);
  bed->unpin(hit.entry);
  EXPECT_EQ(describe(bed.take_ops()), "state> <block <block <state ");
  EXPECT_EQ(hit.blocks.size(), 2u);
  EXPECT_TRUE(bed.look("ab").on_device());
  EXPECT_EQ(bed.host_blocks().num_free(), 8);
  EXPECT_EQ(bed.host_snapshots().num_free(), 1) << "the other's";
}

TEST(PrefixIndex, ForgetsFromHostMemoryWhatIsWorthLeast) {
  Bed bed(6, 6, 3, 6);
  bed.add("ab");
  bed.add("cd");
  bed.add("ef");
  EXPECT_TRUE(bed->evict_blocks());
  EXPECT_TRUE(bed->evict_blocks());
  EXPECT_EQ(bed->num_evictions(), 1u) << "three places for four blocks";
  EXPECT_EQ(bed.look("ab").entry, 0u);
  EXPECT_EQ(bed.look("cd").num_host_blocks, 2);
  EXPECT_EQ(bed.blocks().num_free(), 4);
  EXPECT_EQ(bed.look("ef").blocks.size(), 2u);
}

TEST(PrefixIndex, APrefixOnTheDeviceHasItsEndInHostMemory) {
  Bed bed(4, 4, 8, 4);
  bed.add("ab");
  bed.add("abcd");
  EXPECT_TRUE(bed->evict_blocks());
  PrefixIndex::Hit hit = bed.look("abcd");
  EXPECT_EQ(hit.blocks.size(), 2u);
  EXPECT_EQ(hit.num_host_blocks, 2);
  const std::vector<int32_t> tokens = Bed::tokens("abcd");
  EXPECT_EQ(bed->find({.salt = {}, .tokens = tokens, .prompt_rows = {}}, true).blocks.size(), 2u);
  EXPECT_EQ(bed->find({.salt = {}, .tokens = tokens, .prompt_rows = {}}, true).num_host_blocks, 0);
}

TEST(PrefixIndex, FreesABlockThatStandsBeforeOneInUse) {
  Bed bed(4, 4);
  bed.add("a");
  // Another sequence has computed the same block for itself, and goes on running.
  const std::vector<int32_t> tokens = Bed::tokens("ab");
  const std::vector<uint8_t> rows = Bed::rows("PP");
  const std::vector<BlockRef> own = {*bed.blocks().acquire(), *bed.blocks().acquire()};
  bed->confirm(*bed->add({.salt = {}, .tokens = tokens, .prompt_rows = rows}, own, *bed.snapshots().acquire()));
  EXPECT_EQ(bed.blocks().num_idle(), 1);
  EXPECT_EQ(bed.blocks().num_free(), 1);
  while (bed->evict_blocks()) {
  }
  EXPECT_EQ(bed.blocks().num_idle(), 0);
  EXPECT_EQ(bed.blocks().num_free(), 2);
}

/// The index against a list of all boundaries ever confirmed: it may forget, but never invent, and no block is lost.
TEST(PrefixIndex, ARandomWalkNeverFindsWhatWasNotAdded) {
  for (const uint64_t seed : {1, 2, 3}) {
    SCOPED_TRACE(seed);
    SplitMix64 random(seed);
    const auto below = [&](uint64_t n) { return random.next() % n; };
    Bed bed(40, 6, seed == 1 ? 0 : 12, seed == 1 ? 0 : 3);
    std::map<std::string, EntryId> added;
    std::vector<PrefixIndex::Hit> held;
    uint64_t num_hits = 0;
    for (int i = 0; i < 3000; ++i) {
      std::string names;
      for (uint64_t length = 1 + below(7); names.size() < length;) names.push_back(static_cast<char>('a' + below(3)));
      const PrefixIndex::Hit hit = bed.look(names);
      if (hit.entry != 0) {
        const std::string prefix = names.substr(0, static_cast<size_t>(hit.num_rows() / kBlockSize));
        ASSERT_TRUE(added.contains(prefix)) << prefix;
        ASSERT_EQ(added[prefix], hit.entry);
        ++num_hits;
      }
      if (below(4) == 0) held.push_back(hit);
      if (held.size() > 2 || (!held.empty() && below(3) == 0)) held.erase(held.begin());
      while (bed.blocks().num_free() < static_cast<int32_t>(names.size()) && bed->evict_blocks()) {
      }
      if (bed.blocks().num_free() < static_cast<int32_t>(names.size())) continue;
      if (bed.snapshots().num_free() == 0 && !bed->evict_snapshot()) continue;
      if (const auto entry = bed.add(names)) added[names] = *entry;
      if (below(10) == 0 && !added.empty()) {
        const auto which = std::next(added.begin(), static_cast<ptrdiff_t>(below(added.size())));
        bed->withdraw(which->second);
        added.erase(which);
      }
    }
    EXPECT_GT(num_hits, 100u);
    EXPECT_GT(bed->num_evictions(), 100u);
    held.clear();
    for (const auto& [names, entry] : added) bed->withdraw(entry);
    EXPECT_EQ(bed.host_blocks().num_free(), bed.host_blocks().size());
    EXPECT_EQ(bed.host_snapshots().num_free(), bed.host_snapshots().size());
    EXPECT_EQ(bed.blocks().num_free(), 40);
    EXPECT_EQ(bed->num_blocks(), 0);
  }
}

}  // namespace
}  // namespace quern::engine
