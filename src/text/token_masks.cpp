#include "text/token_masks.h"

#include <algorithm>
#include <utility>

#include "text/grammar_frames.h"

namespace quern::text {
namespace {

/// Walks the vocabulary's trie with a stack of one frame whose parent is not known.
class MaskWalk {
 public:
  struct Found {
    std::vector<std::vector<int32_t>> staying;  // by need
    struct Rest {
      int32_t node;   // of the trie, with its whole subtree
      int32_t count;
    };
    std::vector<Rest> rests;
    size_t work = 0;
  };

  MaskWalk(const PushdownAutomaton& automaton, int32_t state, const TokenTrie& trie)
      : automaton_(automaton),
        trie_(trie),
        rule_number_(automaton.rule_of(state)),
        rule_(automaton.rules()[static_cast<size_t>(rule_number_)]),
        walker_(automaton, frames_, rule_.counts ? rule_number_ : PushdownAutomaton::kNone),
        levels_(static_cast<size_t>(trie.max_depth()) + 1) {
    levels_[0].state = state;
    levels_[0].alive = true;
  }

  Found run() {
    for (int32_t node = 0; node < trie_.num_nodes();) {
      ++found_.work;
      node = visit(node) ? node + 1 : trie_.subtree_end(node);
    }
    return std::move(found_);
  }

 private:
  /// Where the walk stands after so many bytes: one frame on the unknown parent as long as nothing was called, else stacks.
  struct Level {
    bool simple = true, alive = false;
    int32_t state = 0, count = 0;
    int32_t left = -1;  // simple: what it had counted if it may leave here
    StackSet stacks;
    size_t num_frames = 0;
  };

  /// False when nothing below `node` has to be looked at.
  bool visit(int32_t node) {
    const Level& from = levels_[static_cast<size_t>(trie_.depth(node))];
    Level& to = levels_[static_cast<size_t>(trie_.depth(node)) + 1];
    const uint8_t byte = trie_.byte(node);
    if (rule_.follow.has(byte)) {
      if (from.simple) {
        if (from.left >= 0) found_.rests.push_back({node, from.left});
      } else {
        for (const int32_t count : from.stacks.left) found_.rests.push_back({node, count});
      }
    }
    if (!from.alive) return false;
    step(from, byte, to);
    const bool may_leave = to.simple ? to.left >= 0 : !to.stacks.left.empty();
    if (!to.alive && !may_leave) return false;
    if (trie_.first_value(node) < trie_.values_end(node)) add_staying(node, need(to));
    return true;
  }

  void step(const Level& from, uint8_t byte, Level& to) {
    frames_.truncate(from.num_frames);
    to.num_frames = from.num_frames;
    to.left = -1;
    to.alive = false;
    to.simple = true;
    if (from.simple) {
      to.state = automaton_.next(from.state, byte);
      if (to.state == PushdownAutomaton::kNone) return;
      const bool is_head = automaton_.is_loop_head(to.state);
      to.count = from.count + (is_head ? 1 : 0);
      if (!automaton_.has_calls(to.state)) {
        to.alive = automaton_.has_edges(to.state);
        if (is_head || automaton_.accepts(to.state)) to.left = to.count;
        return;
      }
      walker_.enter(to.state, to.count, FrameStore::kUnknown, to.stacks);
    } else {
      walker_.step(from.stacks, byte, to.stacks);
    }
    to.simple = false;
    to.alive = !to.stacks.tops.empty();
    to.num_frames = frames_.size();
  }

  /// Bodies that have to be left at the start for the stack to be where it is.
  [[nodiscard]] int32_t need(const Level& level) const {
    if (!rule_.counts) return 0;
    const auto of = [&](int32_t state, int32_t count) { return automaton_.is_loop_head(state) ? count : count + 1; };
    if (level.simple) return of(level.state, level.count);
    int32_t least = INT32_MAX;
    for (int32_t top : level.stacks.tops) {
      while (frames_.frame(top).parent != FrameStore::kUnknown) top = frames_.frame(top).parent;
      least = std::min(least, of(frames_.frame(top).state, frames_.frame(top).count));
    }
    for (const int32_t count : level.stacks.left) least = std::min(least, count);
    return least;
  }

  void add_staying(int32_t node, int32_t need) {
    const auto at = static_cast<size_t>(need);
    if (found_.staying.size() <= at) found_.staying.resize(at + 1);
    for (int32_t i = trie_.first_value(node); i < trie_.values_end(node); ++i)
      found_.staying[at].push_back(trie_.values()[static_cast<size_t>(i)]);
  }

  const PushdownAutomaton& automaton_;
  const TokenTrie& trie_;
  const int32_t rule_number_;
  const PushdownAutomaton::Rule& rule_;
  FrameStore frames_;
  StackWalker walker_;
  std::vector<Level> levels_;
  Found found_;
};

}  // namespace

StateMask::StateMask(const PushdownAutomaton& automaton, int32_t state, const TokenVocabulary& vocabulary) : num_tokens_(vocabulary.num_tokens()) {
  const TokenTrie& trie = vocabulary.trie();
  MaskWalk::Found found = MaskWalk(automaton, state, trie).run();
  work_ = found.work;
  staying_ = std::move(found.staying);
  if (staying_.empty()) staying_.emplace_back();
  size_t total = 0;
  for (std::vector<int32_t>& tokens : staying_) {
    total += tokens.size();
    tokens.shrink_to_fit();
    num_staying_.push_back(total);
  }
  words_ = std::vector<std::atomic<const Words*>>(staying_.size());

  std::vector<TokenTrie::Entry> rests;
  for (const MaskWalk::Found::Rest& rest : found.rests) {
    for (int32_t i = trie.first_value(rest.node); i < trie.subtree_values_end(rest.node); ++i) {
      const int32_t token = trie.values()[static_cast<size_t>(i)];
      rests.push_back({std::string(vocabulary.bytes(token).substr(static_cast<size_t>(trie.depth(rest.node)))), static_cast<int32_t>(leaving_.size())});
      leaving_.push_back({token, rest.count});
    }
  }
  rests_ = TokenTrie(std::move(rests));
  size_bytes_ = sizeof(*this) + total * sizeof(int32_t) + rests_.size_bytes() + leaving_.size() * sizeof(Leaving);
  if (staying_.size() == 1 && total * 32 > static_cast<size_t>(num_tokens_)) {  // the list would be longer than the mask
    (void)words_for(0);
    size_bytes_ -= total * sizeof(int32_t);
    staying_.front() = {};
  }
}

const StateMask::Words& StateMask::words_for(size_t need) const {
  if (const Words* made = words_[need].load(std::memory_order_acquire)) return *made;
  auto words = std::make_unique<Words>((static_cast<size_t>(num_tokens_) + 31) / 32);
  for (size_t n = 0; n <= need; ++n)
    for (const int32_t token : staying_[n]) (*words)[static_cast<size_t>(token) / 32] |= 1u << (token % 32);
  const std::lock_guard lock(mutex_);
  if (const Words* made = words_[need].load(std::memory_order_acquire)) return *made;
  size_bytes_ += words->size() * sizeof(uint32_t);
  owned_words_.push_back(std::move(words));
  words_[need].store(owned_words_.back().get(), std::memory_order_release);
  return *owned_words_.back();
}

void StateMask::add_staying(int32_t room, std::span<uint32_t> mask) const {
  const size_t need = std::min(static_cast<size_t>(std::max(room, 0)), staying_.size() - 1);
  if (num_staying_[need] * 32 > static_cast<size_t>(num_tokens_)) {
    const Words& words = words_for(need);
    const size_t n = std::min(words.size(), mask.size());
    for (size_t i = 0; i < n; ++i) mask[i] |= words[i];
    return;
  }
  for (size_t n = 0; n <= need; ++n)
    for (const int32_t token : staying_[n])
      if (static_cast<size_t>(token) / 32 < mask.size()) mask[static_cast<size_t>(token) / 32] |= 1u << (token % 32);
}

RuleMasks::~RuleMasks() {
  for (std::atomic<const StateMask*>& mask : masks_) delete mask.load();
}

const StateMask& RuleMasks::get(const PushdownAutomaton& automaton, int32_t state, int32_t offset, const TokenVocabulary& vocabulary) {
  std::atomic<const StateMask*>& place = masks_[static_cast<size_t>(offset)];
  if (const StateMask* made = place.load(std::memory_order_acquire)) return *made;
  auto mask = std::make_unique<const StateMask>(automaton, state, vocabulary);
  const StateMask* expected = nullptr;
  if (place.compare_exchange_strong(expected, mask.get(), std::memory_order_acq_rel)) return *mask.release();
  return *expected;  // another thread was faster
}

size_t RuleMasks::size_bytes() const {
  size_t size = masks_.size() * sizeof(masks_.front());
  for (const std::atomic<const StateMask*>& mask : masks_)
    if (const StateMask* made = mask.load(std::memory_order_acquire)) size += made->size_bytes();
  return size;
}

std::shared_ptr<RuleMasks> TokenMasks::of_rule(const PushdownAutomaton::Rule& rule) {
  if (rule.key.empty()) return std::make_shared<RuleMasks>(rule.num_states);
  const std::lock_guard lock(mutex_);
  std::erase_if(shared_, [](const auto& item) { return item.second.expired(); });
  std::weak_ptr<RuleMasks>& place = shared_[rule.key];
  std::shared_ptr<RuleMasks> masks = place.lock();
  if (masks == nullptr) place = masks = std::make_shared<RuleMasks>(rule.num_states);
  return masks;
}

}  // namespace quern::text
