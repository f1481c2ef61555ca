#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string_view>
#include <vector>

#include "text/grammar_frames.h"
#include "text/pushdown_automaton.h"
#include "text/token_masks.h"

namespace quern::text {

/// A grammar over the tokens of one vocabulary, ready to use; many outputs may follow it at the same time. Thread-safe.
class TokenGrammar {
 public:
  /// Works out the masks of the automaton's states, too, up to a bound; those that are left are made when they are first wanted.
  /// Errors: those of PushdownAutomaton::compile.
  static Result<std::shared_ptr<const TokenGrammar>> compile(const Grammar& grammar, RuleId root, TokenMasks& masks);

  [[nodiscard]] const PushdownAutomaton& automaton() const { return automaton_; }
  [[nodiscard]] const TokenVocabulary& vocabulary() const { return *vocabulary_; }
  [[nodiscard]] const StateMask& mask(int32_t state) const {
    const auto rule = static_cast<size_t>(automaton_.rule_of(state));
    return masks_[rule]->get(automaton_, state, state - automaton_.rules()[rule].first_state, *vocabulary_);
  }
  /// Memory that it holds now; masks shared with other grammars count in each.
  [[nodiscard]] size_t size_bytes() const;

 private:
  TokenGrammar(PushdownAutomaton automaton, TokenMasks& masks);
  PushdownAutomaton automaton_;
  const TokenVocabulary* vocabulary_;
  std::vector<std::shared_ptr<RuleMasks>> masks_;  // by rule
};

/// Follows one output. One owner, one thread.
class GrammarMatcher {
 public:
  /// end_ids: tokens that may end the output where it is complete.
  GrammarMatcher(std::shared_ptr<const TokenGrammar> grammar, std::vector<int32_t> end_ids);

  /// Sets the bits of all tokens that may come next; none where nothing more can come and there are no end_ids.
  void fill_mask(std::span<uint32_t> mask);
  /// False, and nothing has changed, when the token may not come next. An end id is no part of the text; nothing comes behind it.
  bool accept(int32_t token);
  bool accept_bytes(std::string_view bytes);
  /// Takes the last accepted tokens (or pieces of bytes) back.
  void rollback(int32_t num_tokens);
  /// The text may end here.
  [[nodiscard]] bool is_complete() const { return current().complete; }
  /// And it has to.
  [[nodiscard]] bool is_finished() const { return current().complete && current().num_tops == 0; }
  [[nodiscard]] int32_t num_accepted() const { return static_cast<int32_t>(history_.size()) - 1; }

 private:
  struct Point {
    size_t first_top = 0, num_tops = 0, num_frames = 0;
    bool complete = false;
  };
  [[nodiscard]] const Point& current() const { return history_.back(); }
  void push(const StackSet& stacks);
  void add_leaving(const StateMask& mask, const FrameStore::Frame& frame, std::span<uint32_t> bits);

  std::shared_ptr<const TokenGrammar> grammar_;
  std::vector<int32_t> end_ids_;
  FrameStore frames_;
  StackWalker walker_;
  std::vector<int32_t> tops_;   // of all points, one after the other
  std::vector<Point> history_;  // the beginning, then one for each accepted token
  std::vector<StackSet> levels_;
  std::vector<size_t> level_frames_;
  StackSet from_, to_;
};

}  // namespace quern::text
