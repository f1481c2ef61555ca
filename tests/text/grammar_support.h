#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <utility>

#include "support/test_support.h"
#include "text/grammar_frames.h"
#include "text/json_schema_grammar.h"
#include "text/pushdown_automaton.h"

namespace quern::text {

/// Follows texts byte by byte, without tokens.
class TextJudge {
 public:
  static Result<TextJudge> of_node(Grammar grammar, NodeId node) {
    const RuleId root = grammar.add_rule("test", node);
    return of_rule(grammar, root);
  }
  static Result<TextJudge> of_rule(const Grammar& grammar, RuleId root) {
    ASSIGN_OR_RETURN(PushdownAutomaton automaton, PushdownAutomaton::compile(grammar, root));
    return TextJudge(std::move(automaton));
  }
  static Result<TextJudge> of_schema(const Json& schema, const JsonStyle& style = {}) {
    Grammar grammar;
    ASSIGN_OR_RETURN(const NodeId node, json_schema_node(grammar, schema, "schema", style));
    return of_node(std::move(grammar), node);
  }

  /// How many bytes it follows, or -1 when that is all of them and the text is complete.
  [[nodiscard]] int stops_at(std::string_view text) const {
    FrameStore frames;
    StackWalker walker(*automaton_, frames);
    StackSet now, next;
    walker.begin(now);
    for (size_t i = 0; i < text.size(); ++i) {
      walker.step(now, static_cast<uint8_t>(text[i]), next);
      if (next.empty()) return static_cast<int>(i);
      std::swap(now, next);
    }
    return now.complete ? -1 : static_cast<int>(text.size());
  }
  [[nodiscard]] bool accepts(std::string_view text) const { return stops_at(text) == -1; }
  [[nodiscard]] const PushdownAutomaton& automaton() const { return *automaton_; }

 private:
  explicit TextJudge(PushdownAutomaton automaton) : automaton_(std::make_shared<const PushdownAutomaton>(std::move(automaton))) {}
  std::shared_ptr<const PushdownAutomaton> automaton_;
};

}  // namespace quern::text
