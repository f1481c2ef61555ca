#pragma once

#include <cstdint>
#include <functional>
#include <string_view>
#include <vector>

#include "base/result.h"
#include "text/grammar.h"

namespace quern::text {

/// A deterministic automaton over bytes, but for calls of other rules, which stand beside the bytes. State 0 is the start.
struct Dfa {
  struct Edge {
    uint8_t low, high;
    int32_t to;
  };
  struct Call {
    RuleId rule;
    int32_t to;  // where to go on when the rule is complete
  };
  struct State {
    bool accepts = false;
    std::vector<Edge> edges;  // ascending, apart from each other
    std::vector<Call> calls;
  };
  std::vector<State> states;

  [[nodiscard]] bool has_calls() const;
  /// No accepted text is the beginning of another, and none is empty.
  [[nodiscard]] bool is_prefix_free() const;
  /// Only for automata without calls.
  [[nodiscard]] bool accepts(std::string_view text) const;
  /// Without states that no accepted text passes; no state at all when nothing is accepted. Without calls only.
  [[nodiscard]] Dfa trimmed() const;
  /// As a part of a grammar.
  [[nodiscard]] NodeId as_node(Grammar& grammar) const;
};

/// Repetitions of more than so many times become rules that count, where they can.
inline constexpr int32_t kMaxUnrolled = 20;

/// Called for a repetition of a prefix-free body; returns the rule that stands for it.
using LiftRepeat = std::function<RuleId(NodeId body, int32_t min, int32_t max, Dfa automaton)>;

/// What building several automata may cost together.
struct BuildBudget {
  size_t states = 3'000'000;  // of nondeterministic automata
  size_t work = 60'000'000;   // edges and states looked at while they are made deterministic
};

/// The automaton of `node`. With `lift`, long repetitions become calls; without, everything is unrolled, and rules may not be called.
/// budget: what is left of it afterwards; null: one of its own. Errors: kInvalidArgument when it would be too large.
Result<Dfa> build_dfa(const Grammar& grammar, NodeId node, const LiftRepeat* lift, BuildBudget* budget = nullptr);

/// Texts that both accept, or that `a` accepts and `b` does not. Without calls. Errors: kInvalidArgument when it would be too large.
Result<Dfa> intersect(const Dfa& a, const Dfa& b);
Result<Dfa> subtract(const Dfa& a, const Dfa& b);

}  // namespace quern::text
