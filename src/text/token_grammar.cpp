#include "text/token_grammar.h"

#include <algorithm>
#include <utility>

namespace quern::text {
namespace {

/// Nodes of the vocabulary's trie that compile() looks at, at most: some tenths of a second.
constexpr size_t kMaxWork = 40'000'000;

void set_bit(std::span<uint32_t> mask, int32_t token) {
  const auto t = static_cast<size_t>(token);
  if (t / 32 < mask.size()) mask[t / 32] |= 1u << (t % 32);
}

}  // namespace

TokenGrammar::TokenGrammar(PushdownAutomaton automaton, TokenMasks& masks) : automaton_(std::move(automaton)), vocabulary_(&masks.vocabulary()) {
  for (const PushdownAutomaton::Rule& rule : automaton_.rules()) masks_.push_back(masks.of_rule(rule));
}

Result<std::shared_ptr<const TokenGrammar>> TokenGrammar::compile(const Grammar& grammar, RuleId root, TokenMasks& masks) {
  ASSIGN_OR_RETURN(PushdownAutomaton automaton, PushdownAutomaton::compile(grammar, root));
  std::shared_ptr<const TokenGrammar> compiled(new TokenGrammar(std::move(automaton), masks));
  size_t work = 0;
  const std::vector<PushdownAutomaton::Rule>& rules = compiled->automaton_.rules();
  for (size_t r = 0; r < rules.size(); ++r) {
    for (int32_t s = 0; s < rules[r].num_states && work < kMaxWork; ++s) {
      const int32_t state = rules[r].first_state + s;
      if (compiled->automaton_.has_edges(state) && !compiled->masks_[r]->has(s)) work += compiled->mask(state).work();
    }
  }
  return Result<std::shared_ptr<const TokenGrammar>>(std::move(compiled));
}

size_t TokenGrammar::size_bytes() const {
  size_t size = sizeof(*this) + automaton_.size_bytes();
  for (const auto& masks : masks_) size += masks->size_bytes();
  return size;
}

GrammarMatcher::GrammarMatcher(std::shared_ptr<const TokenGrammar> grammar, std::vector<int32_t> end_ids)
    : grammar_(std::move(grammar)), end_ids_(std::move(end_ids)), walker_(grammar_->automaton(), frames_) {
  walker_.begin(from_);
  push(from_);
}

void GrammarMatcher::push(const StackSet& stacks) {
  history_.push_back({tops_.size(), stacks.tops.size(), frames_.size(), stacks.complete});
  tops_.insert(tops_.end(), stacks.tops.begin(), stacks.tops.end());
}

void GrammarMatcher::fill_mask(std::span<uint32_t> mask) {
  const Point point = current();
  const PushdownAutomaton& automaton = grammar_->automaton();
  for (size_t i = 0; i < point.num_tops; ++i) {
    const FrameStore::Frame frame = frames_.frame(tops_[point.first_top + i]);
    const StateMask& of_state = grammar_->mask(frame.state);
    const PushdownAutomaton::Rule& rule = automaton.rules()[static_cast<size_t>(automaton.rule_of(frame.state))];
    of_state.add_staying(rule.counts ? rule.max - frame.count : 0, mask);
    if (!of_state.rests().empty()) add_leaving(of_state, frame, mask);
  }
  if (point.complete)
    for (const int32_t id : end_ids_) set_bit(mask, id);
}

/// Follows what leaving tokens have left on the stack below the frame.
void GrammarMatcher::add_leaving(const StateMask& mask, const FrameStore::Frame& frame, std::span<uint32_t> bits) {
  const PushdownAutomaton& automaton = grammar_->automaton();
  const PushdownAutomaton::Rule& rule = automaton.rules()[static_cast<size_t>(automaton.rule_of(frame.state))];
  const int32_t least = rule.counts ? rule.min - frame.count : 0, most = rule.counts ? rule.max - frame.count : INT32_MAX;
  const TokenTrie& trie = mask.rests();
  if (levels_.size() <= static_cast<size_t>(trie.max_depth())) {
    levels_.resize(static_cast<size_t>(trie.max_depth()) + 1);
    level_frames_.resize(levels_.size());
  }
  const size_t num_frames = frames_.size();
  walker_.leave(frame.parent, levels_[0]);
  level_frames_[0] = frames_.size();
  for (int32_t node = 0; node < trie.num_nodes();) {
    const auto depth = static_cast<size_t>(trie.depth(node));
    frames_.truncate(level_frames_[depth]);
    walker_.step(levels_[depth], trie.byte(node), levels_[depth + 1]);
    level_frames_[depth + 1] = frames_.size();
    if (levels_[depth + 1].empty()) {
      node = trie.subtree_end(node);
      continue;
    }
    for (int32_t i = trie.first_value(node); i < trie.values_end(node); ++i) {
      const StateMask::Leaving& leaving = mask.leaving()[static_cast<size_t>(trie.values()[static_cast<size_t>(i)])];
      if (leaving.count >= least && leaving.count <= most) set_bit(bits, leaving.token);
    }
    ++node;
  }
  frames_.truncate(num_frames);
}

bool GrammarMatcher::accept(int32_t token) {
  const std::string_view bytes = grammar_->vocabulary().bytes(token);
  if (!bytes.empty() && accept_bytes(bytes)) return true;
  if (!is_complete() || std::ranges::find(end_ids_, token) == end_ids_.end()) return false;
  StackSet end;
  end.complete = true;
  push(end);
  return true;
}

bool GrammarMatcher::accept_bytes(std::string_view bytes) {
  const Point point = current();
  from_.clear();
  from_.tops.assign(tops_.begin() + static_cast<std::ptrdiff_t>(point.first_top), tops_.begin() + static_cast<std::ptrdiff_t>(point.first_top + point.num_tops));
  from_.complete = point.complete;
  for (const char c : bytes) {
    walker_.step(from_, static_cast<uint8_t>(c), to_);
    std::swap(from_, to_);
    if (from_.empty()) {
      frames_.truncate(point.num_frames);
      return false;
    }
  }
  push(from_);
  return true;
}

void GrammarMatcher::rollback(int32_t num_tokens) {
  for (int32_t i = 0; i < num_tokens && history_.size() > 1; ++i) {
    tops_.resize(current().first_top);
    history_.pop_back();
  }
  frames_.truncate(current().num_frames);
}

}  // namespace quern::text
