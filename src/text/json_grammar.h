#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string_view>
#include <utility>

#include "base/json.h"
#include "text/finite_automaton.h"
#include "text/grammar.h"

namespace quern::text {

struct JsonStyle {
  /// White space may stand behind "{", "[", "," and ":" and before "}" and "]": nothing, one blank, or a line break and up to 64 blanks or
  /// tabs, so that a model can indent but not write blanks for ever. Without, there is none.
  bool whitespace = true;
};

/// JSON's parts in a grammar; each is one rule, made when it is first wanted.
class JsonGrammar {
 public:
  JsonGrammar(Grammar& grammar, const JsonStyle& style) : grammar_(grammar), style_(style) {}

  NodeId space();
  /// A string of so many characters (code points), with any escapes; surrogates come in pairs.
  NodeId string(int64_t min_length, std::optional<int64_t> max_length);
  /// A string whose content, as it stands between the quotes, is `content`.
  NodeId quoted(NodeId content);
  NodeId integer();
  NodeId number();
  NodeId boolean();
  NodeId null() { return grammar_.literal("null"); }
  /// Any object, any list, any value at all.
  NodeId object();
  NodeId array();
  NodeId value();
  /// This value: numbers as they are written, strings with the shortest escapes, white space as everywhere.
  NodeId constant(const Json& value);

  /// "{" ... "}", "[" ... "]" around what may be empty; `key`: with its quotes.
  NodeId braces(NodeId inside);
  NodeId brackets(NodeId inside);
  NodeId entry(NodeId key, NodeId value);
  /// "," and white space
  NodeId comma();

 private:
  NodeId once(std::string_view name, NodeId (JsonGrammar::*make)());
  NodeId make_space();
  NodeId make_string() { return string_node(0, std::nullopt); }
  NodeId make_integer();
  NodeId make_number();
  NodeId make_object();
  NodeId make_array();
  NodeId make_value();
  NodeId string_node(int64_t min_length, std::optional<int64_t> max_length);
  NodeId string_character();

  Grammar& grammar_;
  JsonStyle style_;
  std::map<std::string_view, RuleId> rules_;
  std::map<std::pair<int64_t, int64_t>, RuleId> strings_;
  std::optional<NodeId> character_;
};

}  // namespace quern::text
