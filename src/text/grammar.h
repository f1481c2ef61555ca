#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "text/byte_set.h"

// What an output has to look like, as rules over bytes. Schemas, regular expressions, grammars of users and the form of tool calls are all
// written in it; pushdown_automaton.h makes an automaton of it.

namespace quern::text {

/// Inclusive.
struct CodePointRange {
  char32_t low, high;
};
/// Ascending, apart from each other.
using CodePointSet = std::vector<CodePointRange>;

inline constexpr char32_t kLastCodePoint = 0x10FFFF;
/// In order and joined, without surrogates and what lies beyond kLastCodePoint.
CodePointSet normalized(CodePointSet set);
/// All other code points.
CodePointSet complement(const CodePointSet& set);
CodePointSet intersection(const CodePointSet& a, const CodePointSet& b);

using NodeId = int32_t;
using RuleId = int32_t;

/// A part of a grammar whose form no expression has: nodes along the edges from `start` to an accepting state.
struct GrammarGraph {
  struct Edge {
    int32_t from, to;
    NodeId node;
  };
  int32_t start = 0;
  std::vector<bool> accepts;  // by state
  std::vector<Edge> edges;
};

/// A context-free grammar over bytes. Nodes are made from the leaves up and never change; rules may refer to each other in any way.
class Grammar {
 public:
  enum class Kind : uint8_t { kNothing, kBytes, kSequence, kChoice, kRepeat, kRule, kGraph };
  struct Node {
    Kind kind = Kind::kNothing;
    ByteSet bytes;                 // kBytes: any one of them
    std::vector<NodeId> children;  // kSequence, kChoice, kRepeat (one)
    int32_t min = 0, max = 0;      // kRepeat; max kUnbounded: no end
    RuleId rule = 0;               // kRule
    std::shared_ptr<const GrammarGraph> graph;
  };
  struct Rule {
    std::string name;
    NodeId body = -1;
  };
  static constexpr int32_t kUnbounded = -1;

  /// No text at all, not even the empty one.
  NodeId nothing();
  NodeId empty();
  NodeId bytes(const ByteSet& set);
  NodeId literal(std::string_view text);
  NodeId sequence(std::vector<NodeId> parts);
  NodeId choice(std::vector<NodeId> alternatives);
  NodeId repeat(NodeId body, int32_t min, int32_t max);
  NodeId optional(NodeId body) { return repeat(body, 0, 1); }
  /// One code point of the set, in UTF-8.
  NodeId code_point(const CodePointSet& set);
  /// The token with this id, and not its text (token_trie.h).
  NodeId token(int32_t id);
  NodeId graph(GrammarGraph graph);
  /// A reference.
  NodeId rule(RuleId rule);

  RuleId add_rule(std::string name);
  void define(RuleId rule, NodeId body) { rules_[static_cast<size_t>(rule)].body = body; }
  /// add_rule and define.
  RuleId add_rule(std::string name, NodeId body);

  [[nodiscard]] const Node& node(NodeId id) const { return nodes_[static_cast<size_t>(id)]; }
  [[nodiscard]] const std::vector<Rule>& rules() const { return rules_; }
  [[nodiscard]] size_t num_nodes() const { return nodes_.size(); }

 private:
  NodeId add(Node node);
  std::vector<Node> nodes_;
  std::vector<Rule> rules_;
};

}  // namespace quern::text
