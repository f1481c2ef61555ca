#include "text/json_grammar.h"

#include <algorithm>
#include <string>
#include <vector>

#include "text/decimal_grammar.h"
#include "text/regex_grammar.h"

namespace quern::text {
namespace {

constexpr int32_t kMaxIndent = 64;

}  // namespace

NodeId JsonGrammar::once(std::string_view name, NodeId (JsonGrammar::*make)()) {
  const auto found = rules_.find(name);
  if (found != rules_.end()) return grammar_.rule(found->second);
  const RuleId rule = grammar_.add_rule(std::string(name));
  rules_.emplace(name, rule);
  grammar_.define(rule, (this->*make)());
  return grammar_.rule(rule);
}

NodeId JsonGrammar::space() { return style_.whitespace ? once("white space", &JsonGrammar::make_space) : grammar_.empty(); }
NodeId JsonGrammar::integer() { return once("integer", &JsonGrammar::make_integer); }
NodeId JsonGrammar::number() { return once("number", &JsonGrammar::make_number); }
NodeId JsonGrammar::object() { return once("object", &JsonGrammar::make_object); }
NodeId JsonGrammar::array() { return once("list", &JsonGrammar::make_array); }
NodeId JsonGrammar::value() { return once("value", &JsonGrammar::make_value); }
NodeId JsonGrammar::boolean() { return grammar_.choice({grammar_.literal("true"), grammar_.literal("false")}); }

NodeId JsonGrammar::make_space() {
  const NodeId indent = grammar_.repeat(grammar_.bytes(ByteSet::of(" \t")), 0, kMaxIndent);
  return grammar_.choice({grammar_.empty(), grammar_.literal(" "), grammar_.sequence({grammar_.literal("\n"), indent})});
}

NodeId JsonGrammar::make_integer() {
  const NodeId more = grammar_.repeat(grammar_.bytes(ByteSet::range('0', '9')), 0, kMaxDigits - 1);
  return grammar_.choice(
      {grammar_.literal("0"), grammar_.sequence({grammar_.optional(grammar_.literal("-")), grammar_.bytes(ByteSet::range('1', '9')), more})});
}

NodeId JsonGrammar::make_number() { return any_number(grammar_); }

NodeId JsonGrammar::string_character() {
  if (character_) return *character_;
  const NodeId hex = grammar_.bytes(ByteSet::of("0123456789abcdefABCDEF"));
  const auto u = [&](NodeId first, NodeId second) { return grammar_.sequence({grammar_.literal("\\u"), first, second, hex, hex}); };
  const NodeId not_d = grammar_.bytes(ByteSet::of("0123456789abcefABCEF")), d = grammar_.bytes(ByteSet::of("dD"));
  const NodeId high = grammar_.bytes(ByteSet::of("89abAB")), low = grammar_.bytes(ByteSet::of("cdefCDEF"));
  character_ = grammar_.choice({
      grammar_.code_point(complement({{0, 0x1F}, {'"', '"'}, {'\\', '\\'}})),
      grammar_.sequence({grammar_.literal("\\"), grammar_.bytes(ByteSet::of("\"\\/bfnrt"))}),
      u(not_d, hex),
      u(d, grammar_.bytes(ByteSet::of("01234567"))),
      grammar_.sequence({u(d, high), u(d, low)}),
  });
  return *character_;
}

NodeId JsonGrammar::string_node(int64_t min_length, std::optional<int64_t> max_length) {
  const auto bounded = [](int64_t n) { return static_cast<int32_t>(std::min<int64_t>(n, INT32_MAX - 1)); };
  return quoted(grammar_.repeat(string_character(), bounded(min_length), max_length ? bounded(*max_length) : Grammar::kUnbounded));
}

NodeId JsonGrammar::string(int64_t min_length, std::optional<int64_t> max_length) {
  if (min_length == 0 && !max_length) return once("string", &JsonGrammar::make_string);
  const auto [it, is_new] = strings_.emplace(std::pair(min_length, max_length.value_or(-1)), -1);
  if (is_new) it->second = grammar_.add_rule("string", string_node(min_length, max_length));
  return grammar_.rule(it->second);
}

NodeId JsonGrammar::quoted(NodeId content) { return grammar_.sequence({grammar_.literal("\""), content, grammar_.literal("\"")}); }

NodeId JsonGrammar::comma() { return grammar_.sequence({grammar_.literal(","), space()}); }
NodeId JsonGrammar::braces(NodeId inside) { return grammar_.sequence({grammar_.literal("{"), space(), inside, grammar_.literal("}")}); }
NodeId JsonGrammar::brackets(NodeId inside) { return grammar_.sequence({grammar_.literal("["), space(), inside, grammar_.literal("]")}); }
NodeId JsonGrammar::entry(NodeId key, NodeId value) { return grammar_.sequence({key, grammar_.literal(":"), space(), value}); }

NodeId JsonGrammar::make_object() {
  const NodeId one = entry(string(0, std::nullopt), value());
  const NodeId more = grammar_.repeat(grammar_.sequence({comma(), one}), 0, Grammar::kUnbounded);
  return braces(grammar_.optional(grammar_.sequence({one, more, space()})));
}

NodeId JsonGrammar::make_array() {
  const NodeId one = value();
  const NodeId more = grammar_.repeat(grammar_.sequence({comma(), one}), 0, Grammar::kUnbounded);
  return brackets(grammar_.optional(grammar_.sequence({one, more, space()})));
}

NodeId JsonGrammar::make_value() { return grammar_.choice({object(), array(), string(0, std::nullopt), number(), boolean(), null()}); }

NodeId JsonGrammar::constant(const Json& value) {
  if (value.is_string()) return quoted(characters(grammar_, value.get_ref<const std::string&>(), CharForm::kJsonString));
  if (!value.is_structured()) return grammar_.literal(dump_json(value));
  std::vector<NodeId> parts;
  for (const auto& [key, member] : value.items()) {
    if (!parts.empty()) parts.push_back(comma());
    parts.push_back(value.is_array() ? constant(member) : entry(constant(Json(key)), constant(member)));
  }
  if (!parts.empty()) parts.push_back(space());
  const NodeId inside = grammar_.sequence(std::move(parts));
  return value.is_array() ? brackets(inside) : braces(inside);
}

}  // namespace quern::text
