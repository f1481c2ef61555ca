#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/result.h"
#include "text/finite_automaton.h"
#include "text/grammar.h"

namespace quern::text {

/// A grammar as one deterministic automaton a rule, which call each other. From every state that is left the end can be reached, so that a
/// text which the automaton has followed so far can always be completed. Immutable, thread-safe.
///
/// A rule that counts stands for its body `min` to `max` times, without unrolling it: its start is the place between two bodies, and how often
/// the body was complete lies beside the state.
class PushdownAutomaton {
 public:
  static constexpr int32_t kNone = -1;
  struct Call {
    int32_t start;  // of the called rule
    int32_t to;     // where to go on
    bool is_tail;   // nothing follows there but the end of this rule
  };
  struct Rule {
    int32_t first_state = 0, num_states = 0;  // the start comes first
    bool counts = false;
    int32_t min = 0, max = 0;
    ByteSet follow;   // bytes that may come next when the rule is complete
    std::string key;  // rules with equal keys are the same automaton with the same bytes behind it; empty: it calls others
  };

  /// Errors: kInvalidArgument for a grammar that allows no text, is left-recursive or too large.
  static Result<PushdownAutomaton> compile(const Grammar& grammar, RuleId root);

  [[nodiscard]] int32_t start() const { return 0; }
  [[nodiscard]] int32_t num_states() const { return static_cast<int32_t>(states_.size()); }
  [[nodiscard]] int32_t rule_of(int32_t state) const { return at(state).rule; }
  [[nodiscard]] const std::vector<Rule>& rules() const { return rules_; }
  [[nodiscard]] bool accepts(int32_t state) const { return at(state).accepts; }
  /// The place between two bodies of a rule that counts.
  [[nodiscard]] bool is_loop_head(int32_t state) const { return at(state).loop_head; }
  [[nodiscard]] bool has_edges(int32_t state) const { return at(state).num_edges > 0; }
  [[nodiscard]] bool has_calls(int32_t state) const { return at(state).num_calls > 0; }
  [[nodiscard]] int32_t next(int32_t state, uint8_t byte) const {
    const State& s = at(state);
    if (s.table >= 0) return tables_[static_cast<size_t>(s.table) * 256 + byte];
    for (int32_t i = 0; i < s.num_edges; ++i) {
      const Dfa::Edge& edge = edges_[static_cast<size_t>(s.first_edge + i)];
      if (byte < edge.low) return kNone;
      if (byte <= edge.high) return edge.to;
    }
    return kNone;
  }
  [[nodiscard]] std::span<const Call> calls(int32_t state) const {
    const State& s = at(state);
    return {calls_.data() + s.first_call, static_cast<size_t>(s.num_calls)};
  }
  [[nodiscard]] size_t size_bytes() const;

 private:
  struct State {
    int32_t rule = 0;
    int32_t first_edge = 0, num_edges = 0;
    int32_t first_call = 0, num_calls = 0;
    int32_t table = kNone;  // of 256 targets, where there are many edges
    bool accepts = false, loop_head = false;
  };
  friend class PushdownCompiler;
  [[nodiscard]] const State& at(int32_t state) const { return states_[static_cast<size_t>(state)]; }

  std::vector<State> states_;
  std::vector<Dfa::Edge> edges_;
  std::vector<Call> calls_;
  std::vector<int32_t> tables_;
  std::vector<Rule> rules_;
};

}  // namespace quern::text
