#include "text/json_schema_grammar.h"

#include <algorithm>
#include <deque>
#include <map>
#include <set>
#include <utility>

#include "text/json_schema.h"
#include "text/marked_text.h"
#include "text/regex_grammar.h"
#include "text/utf8.h"

namespace quern::text {
namespace {

constexpr size_t kMaxSchemas = 5000;
constexpr int64_t kMaxCountedProperties = 1000;
constexpr int64_t kMaxCountedCharacters = 4000;  // where a pattern has to hold as well
constexpr std::string_view kOpenParameter = "<parameter=", kAfterName = ">\n", kCloseParameter = "\n</parameter>\n";
const CodePointSet kEverything{{0, kLastCodePoint}};

int32_t as_count(int64_t n) { return static_cast<int32_t>(std::clamp<int64_t>(n, 0, INT32_MAX - 1)); }

/// Strings of so many characters in this form; what is no valid string may be among them.
Dfa length_dfa(CharForm form, int64_t min, std::optional<int64_t> max) {
  // States: (characters so far, place within one). Places: 0 between two; 1, 2, 3 bytes of UTF-8 to come; 4 behind a backslash; 5 to 8 hex
  // digits to come, 5 the last.
  constexpr int32_t kPlaces = 9;
  const auto last = static_cast<int32_t>(max ? *max : min);
  Dfa dfa;
  dfa.states.resize(static_cast<size_t>(last + 1) * kPlaces);
  for (int32_t n = 0; n <= last; ++n) {
    const auto at = [&](int32_t place) -> Dfa::State& { return dfa.states[static_cast<size_t>(n * kPlaces + place)]; };
    at(0).accepts = n >= min;
    if (max && n == last) continue;
    const int32_t next = std::min(n + 1, last) * kPlaces, here = n * kPlaces;
    if (form == CharForm::kJsonString) {
      at(0).edges = {{0x00, 0x5B, next}, {0x5C, 0x5C, here + 4}, {0x5D, 0x7F, next}};
    } else {
      at(0).edges = {{0x00, 0x7F, next}};
    }
    at(0).edges.insert(at(0).edges.end(), {{0xC2, 0xDF, here + 1}, {0xE0, 0xEF, here + 2}, {0xF0, 0xF4, here + 3}});
    at(1).edges = {{0x80, 0xBF, next}};
    at(2).edges = {{0x80, 0xBF, here + 1}};
    at(3).edges = {{0x80, 0xBF, here + 2}};
    at(4).edges = {{0x00, 't', next}, {'u', 'u', here + 8}, {'v', 0x7F, next}};
    at(5).edges = {{0x00, 0x7F, next}};
    for (int32_t place = 6; place <= 8; ++place) at(place).edges = {{0x00, 0x7F, here + place - 1}};
  }
  return dfa;
}

/// A member of an object, as the schema lists it.
struct Member {
  std::string name;
  bool required = false;
  Conjunction schemas;
};
/// Members that the schema does not list.
struct Extra {
  NodeId key;
  Conjunction schemas;
};

class SchemaCompiler {
 public:
  SchemaCompiler(Grammar& grammar, const Json& schema, std::string_view field, const JsonStyle& style)
      : grammar_(grammar), reader_(schema, std::string(field)), json_(grammar, style) {}

  Result<NodeId> json() {
    const NodeId node = value({reader_.root()});
    RETURN_IF_ERROR(finish());
    return node;
  }

  Result<NodeId> arguments() {
    ASSIGN_OR_RETURN(const std::vector<SchemaShape> shapes, reader_.shapes({reader_.root()}));
    std::vector<NodeId> alternatives;
    for (const SchemaShape& shape : shapes) {
      if ((shape.types & kJsonObject) == 0 || shape.values) continue;
      ASSIGN_OR_RETURN(const NodeId node, parameters(shape));
      alternatives.push_back(node);
    }
    if (alternatives.empty()) return reader_.error("#", "has to be one of an object: a function's arguments have names");
    RETURN_IF_ERROR(finish());
    return grammar_.choice(std::move(alternatives));
  }

 private:
  /// The rule of values that satisfy all of these.
  NodeId value(Conjunction schemas) {
    std::erase_if(schemas, [](const SchemaPlace& p) { return *p.schema == true || (p.schema->is_object() && p.schema->empty()); });
    if (schemas.empty()) return json_.value();
    std::set<const Json*> key;
    for (const SchemaPlace& place : schemas) key.insert(place.schema);
    const auto [it, is_new] = rules_.emplace(std::move(key), -1);
    if (is_new) {
      it->second = grammar_.add_rule(schemas.front().path);
      todo_.emplace_back(it->second, std::move(schemas));
    }
    return grammar_.rule(it->second);
  }

  /// Defines what value() has promised.
  Result<void> finish() {
    while (!todo_.empty()) {
      const auto [rule, schemas] = std::move(todo_.front());
      todo_.pop_front();
      if (rules_.size() > kMaxSchemas) return reader_.unsupported("#", fmt::format("has more than {} parts", kMaxSchemas));
      ASSIGN_OR_RETURN(const std::vector<SchemaShape> shapes, reader_.shapes(schemas));
      std::vector<NodeId> alternatives;
      for (const SchemaShape& shape : shapes) RETURN_IF_ERROR(add_shape(shape, alternatives));
      grammar_.define(rule, grammar_.choice(std::move(alternatives)));
    }
    return {};
  }

  Result<void> add_shape(const SchemaShape& shape, std::vector<NodeId>& out) {
    if (shape.values) {
      for (const Json& one : *shape.values) {
        ASSIGN_OR_RETURN(const bool allowed, reader_.matches(one, shape));
        if (allowed) out.push_back(json_.constant(one));
      }
      return {};
    }
    if ((shape.types & kJsonObject) != 0) {
      ASSIGN_OR_RETURN(const NodeId node, object(shape));
      out.push_back(node);
    }
    if ((shape.types & kJsonArray) != 0) {
      ASSIGN_OR_RETURN(const NodeId node, array(shape));
      out.push_back(node);
    }
    if ((shape.types & kJsonString) != 0) {
      if (shape.patterns.empty()) {
        out.push_back(json_.string(shape.min_length, shape.max_length));
      } else {
        ASSIGN_OR_RETURN(const NodeId content, text(shape, CharForm::kJsonString));
        out.push_back(json_.quoted(content));
      }
    }
    if ((shape.types & (kJsonNumber | kJsonInteger)) != 0) {
      const bool integers_only = (shape.types & kJsonNumber) == 0;
      if (shape.numbers.is_free()) {
        out.push_back(integers_only ? json_.integer() : json_.number());
      } else {
        auto dfa = decimal_dfa(shape.numbers, integers_only);
        if (!dfa) return reader_.unsupported("#", fmt::format("has a multipleOf, which {}", dfa.error().message));
        out.push_back(dfa->as_node(grammar_));
      }
    }
    if ((shape.types & kJsonBoolean) != 0) out.push_back(json_.boolean());
    if ((shape.types & kJsonNull) != 0) out.push_back(json_.null());
    return {};
  }

  /// Strings that match the shape's patterns and length.
  Result<NodeId> text(const SchemaShape& shape, CharForm form) {
    const bool any_length = shape.min_length == 0 && !shape.max_length;
    const auto located = [&](const Error& error, const std::string& path) {
      Error out = reader_.error(path, fmt::format("cannot be used: {}", error.message));
      out.code = error.code;
      return out;
    };
    if (shape.patterns.size() == 1 && any_length && form == CharForm::kJsonString) {
      const auto [it, is_new] = patterns_.emplace(shape.patterns.front().first, -1);
      if (is_new) {
        const auto node = regex_node(grammar_, shape.patterns.front().first, form, true);
        if (!node) return located(node.error(), shape.patterns.front().second);
        it->second = grammar_.add_rule(shape.patterns.front().second, *node);
      }
      return grammar_.rule(it->second);
    }
    ASSIGN_OR_RETURN(const Dfa dfa, text_dfa(shape, form, located));
    return dfa.as_node(grammar_);
  }

  template <class Located>
  Result<Dfa> text_dfa(const SchemaShape& shape, CharForm form, const Located& located) {
    std::optional<Dfa> out;
    for (const auto& [pattern, path] : shape.patterns) {
      auto dfa = regex_dfa(pattern, form, true);
      if (dfa && out) dfa = intersect(*out, *dfa);
      if (!dfa) return located(dfa.error(), path);
      out = std::move(*dfa);
    }
    if (shape.min_length == 0 && !shape.max_length) return *std::move(out);
    if (std::max(shape.min_length, shape.max_length.value_or(0)) > kMaxCountedCharacters)
      return reader_.unsupported(shape.patterns.front().second,
                                 fmt::format("stands beside a length above {}, which is not supported", kMaxCountedCharacters));
    return intersect(*out, length_dfa(form, shape.min_length, shape.max_length));
  }

  // --- lists

  Result<NodeId> array(const SchemaShape& shape) {
    int64_t most = shape.max_items.value_or(INT64_MAX);
    if (shape.arrays.empty() && shape.min_items == 0 && !shape.max_items) return json_.array();
    size_t num_prefix = 0;
    for (const ArrayPart& part : shape.arrays) num_prefix = std::max(num_prefix, part.prefix.size());
    std::vector<NodeId> prefix;
    for (size_t i = 0; i < num_prefix && static_cast<int64_t>(i) < most; ++i) {
      std::optional<Conjunction> schemas = reader_.item(shape, i);
      if (!schemas) {
        most = static_cast<int64_t>(i);
        break;
      }
      prefix.push_back(value(*std::move(schemas)));
    }
    std::optional<Conjunction> rest = reader_.item(shape, num_prefix);
    const auto k = static_cast<int64_t>(prefix.size());
    if (!rest) most = std::min(most, k);
    if (shape.min_items > most) return grammar_.nothing();
    GrammarGraph graph;
    const auto end = static_cast<int32_t>(k) + 1;
    graph.accepts.assign(static_cast<size_t>(k) + 2, false);
    graph.accepts.back() = true;
    for (int64_t i = 0; i <= k; ++i) {
      const auto at = static_cast<int32_t>(i);
      if (i < k) graph.edges.push_back({at, at + 1, i == 0 ? prefix[0] : grammar_.sequence({json_.comma(), prefix[static_cast<size_t>(i)]})});
      if (i >= shape.min_items && (i < k || i == 0)) graph.edges.push_back({at, end, i == 0 ? grammar_.empty() : json_.space()});
    }
    if (k == 0 ? most > 0 : true) {
      std::vector<NodeId> parts;
      const int64_t done = std::max<int64_t>(k, 1);
      if (rest) {
        const NodeId item = value(*std::move(rest));
        if (k == 0) parts.push_back(item);
        const int32_t max = most == INT64_MAX ? Grammar::kUnbounded : as_count(most - done);
        if (max != 0) parts.push_back(grammar_.repeat(grammar_.sequence({json_.comma(), item}), as_count(shape.min_items - done), max));
      }
      parts.push_back(json_.space());
      if (k > 0 && !rest && shape.min_items > k) return grammar_.nothing();
      graph.edges.push_back({static_cast<int32_t>(k), end, grammar_.sequence(std::move(parts))});
    }
    return json_.brackets(grammar_.graph(std::move(graph)));
  }

  // --- objects

  /// The members in their order; nothing when a required one is forbidden.
  Result<std::optional<std::vector<Member>>> members(const SchemaShape& shape) {
    std::vector<std::string> names;
    const auto add = [&](const std::string& name) {
      if (std::ranges::find(names, name) == names.end()) names.push_back(name);
    };
    for (const ObjectPart& part : shape.objects)
      for (const auto& [name, place] : part.properties) add(name);
    for (const std::string& name : shape.required) add(name);
    std::vector<Member> out;
    for (std::string& name : names) {
      ASSIGN_OR_RETURN(std::optional<Conjunction> schemas, reader_.member(shape, name));
      const bool required = std::ranges::find(shape.required, name) != shape.required.end();
      if (schemas) {
        out.push_back({std::move(name), required, *std::move(schemas)});
      } else if (required) {
        return std::optional<std::vector<Member>>();
      }
    }
    return std::optional(std::move(out));
  }

  /// Members with other names: first those that match a pattern (one only, where several would), then the rest.
  Result<std::vector<Extra>> extras(const SchemaShape& shape, const std::vector<std::string>& names) {
    std::vector<std::pair<std::string, std::string>> patterns;  // and the path of the first
    for (const ObjectPart& part : shape.objects)
      for (const auto& [pattern, place] : part.patterns)
        if (std::ranges::find(patterns, pattern, &std::pair<std::string, std::string>::first) == patterns.end()) patterns.emplace_back(pattern, place.path);
    std::vector<Extra> out;
    const std::optional<Conjunction> additional = reader_.additional(shape);
    if (patterns.empty() && names.empty()) {
      if (additional) out.push_back({json_.string(0, std::nullopt), *additional});
      return out;
    }
    if (patterns.empty() && !additional) return out;
    Grammar scratch;
    std::vector<NodeId> listed;
    for (const std::string& name : names) listed.push_back(characters(scratch, name, CharForm::kJsonString));
    ASSIGN_OR_RETURN(const Dfa all, build_dfa(scratch, scratch.repeat(character(scratch, kEverything, CharForm::kJsonString), 0, Grammar::kUnbounded), nullptr));
    ASSIGN_OR_RETURN(const Dfa known, build_dfa(scratch, scratch.choice(std::move(listed)), nullptr));
    ASSIGN_OR_RETURN(const Dfa unknown, subtract(all, known));
    std::vector<Dfa> by_pattern;
    for (const auto& [pattern, path] : patterns) {
      auto dfa = regex_dfa(pattern, CharForm::kJsonString, true);
      if (!dfa) return reader_.error(path, fmt::format("cannot be used: {}", dfa.error().message));
      by_pattern.push_back(std::move(*dfa));
    }
    for (size_t i = 0; i < patterns.size(); ++i) {
      Conjunction schemas;
      bool allowed = true;
      for (const ObjectPart& part : shape.objects) {
        bool said = false;
        for (const auto& [pattern, place] : part.patterns)
          if (pattern == patterns[i].first) schemas.push_back(place), said = true;
        if (said || !part.additional) continue;
        allowed = allowed && *part.additional->schema != false;
        schemas.push_back(*part.additional);
      }
      if (!allowed) continue;
      ASSIGN_OR_RETURN(Dfa keys, intersect(unknown, by_pattern[i]));
      for (size_t j = 0; j < patterns.size(); ++j) {
        if (j == i) continue;
        ASSIGN_OR_RETURN(keys, subtract(keys, by_pattern[j]));
      }
      out.push_back({json_.quoted(keys.as_node(grammar_)), std::move(schemas)});
    }
    if (additional) {
      Dfa keys = unknown;
      for (const Dfa& dfa : by_pattern) {
        ASSIGN_OR_RETURN(keys, subtract(keys, dfa));
      }
      out.push_back({json_.quoted(keys.as_node(grammar_)), *additional});
    }
    return out;
  }

  /// A way through members, of which optional ones may be left out, and then extras. The nodes of members behind others, and of the first.
  struct MemberNodes {
    bool required = false;
    NodeId first, later;
  };
  Result<GrammarGraph> member_graph(const SchemaShape& shape, const std::vector<MemberNodes>& nodes, const std::vector<MemberNodes>& more, NodeId at_end) {
    const int64_t least = shape.min_properties;
    const bool bounded = shape.max_properties && *shape.max_properties < static_cast<int64_t>(nodes.size()) + (more.empty() ? 0 : INT32_MAX);
    const int64_t most = bounded ? *shape.max_properties : INT64_MAX;
    const int64_t cap = std::max<int64_t>({1, least, bounded ? most : 0});  // counts behind this one are the same
    if (cap > kMaxCountedProperties) return reader_.unsupported("#", fmt::format("counts more than {} properties", kMaxCountedProperties));
    GrammarGraph graph;
    const auto n = static_cast<int64_t>(nodes.size());
    const auto state = [&](int64_t i, int64_t count) { return static_cast<int32_t>(i * (cap + 1) + count); };
    const auto end = state(n, cap) + 1;
    graph.accepts.assign(static_cast<size_t>(end) + 1, false);
    graph.accepts.back() = true;
    const NodeId nothing = grammar_.empty();
    for (int64_t count = 0; count <= cap; ++count) {
      const auto add = [&](int64_t from, int64_t to, const MemberNodes& member) {
        if (count < most) graph.edges.push_back({state(from, count), state(to, std::min(count + 1, cap)), count == 0 ? member.first : member.later});
      };
      for (int64_t i = 0; i < n; ++i) {
        const MemberNodes& member = nodes[static_cast<size_t>(i)];
        add(i, i + 1, member);
        if (!member.required) graph.edges.push_back({state(i, count), state(i + 1, count), nothing});
      }
      for (const MemberNodes& member : more) add(n, n, member);
      if (count >= least) graph.edges.push_back({state(n, count), end, count == 0 ? nothing : at_end});
    }
    return graph;
  }

  Result<NodeId> object(const SchemaShape& shape) {
    if (shape.objects.empty() && shape.required.empty() && shape.min_properties == 0 && !shape.max_properties) return json_.object();
    ASSIGN_OR_RETURN(const std::optional<std::vector<Member>> listed, members(shape));
    if (!listed) return grammar_.nothing();
    const auto nodes_of = [&](NodeId key, const Conjunction& schemas, bool required) {
      const NodeId entry = json_.entry(key, value(schemas));
      return MemberNodes{required, entry, grammar_.sequence({json_.comma(), entry})};
    };
    std::vector<MemberNodes> nodes, more;
    std::vector<std::string> names;
    for (const Member& member : *listed) {
      names.push_back(member.name);
      nodes.push_back(nodes_of(json_.constant(Json(member.name)), member.schemas, member.required));
    }
    // Names that are listed and forbidden are no extras either.
    for (const ObjectPart& part : shape.objects)
      for (const auto& [name, place] : part.properties)
        if (std::ranges::find(names, name) == names.end()) names.push_back(name);
    ASSIGN_OR_RETURN(const std::vector<Extra> others, extras(shape, names));
    for (const Extra& extra : others) more.push_back(nodes_of(extra.key, extra.schemas, false));
    ASSIGN_OR_RETURN(GrammarGraph graph, member_graph(shape, nodes, more, json_.space()));
    return json_.braces(grammar_.graph(std::move(graph)));
  }

  // --- tool calls

  NodeId parameter(NodeId name, NodeId value) {
    return grammar_.sequence({grammar_.literal(kOpenParameter), name, grammar_.literal(kAfterName), value, grammar_.literal(kCloseParameter)});
  }

  Result<NodeId> parameters(const SchemaShape& shape) {
    ASSIGN_OR_RETURN(const std::optional<std::vector<Member>> listed, members(shape));
    if (!listed) return grammar_.nothing();
    std::vector<MemberNodes> nodes, more;
    std::vector<NodeId> names;
    Grammar scratch;
    for (const Member& member : *listed) {
      if (member.name.find_first_of("<>\n\r") != std::string::npos || member.name.empty() || member.name.front() == ' ' || member.name.back() == ' ')
        return reader_.unsupported("#", fmt::format("has a parameter \"{}\", a name that the form of tool calls cannot carry", member.name));
      names.push_back(scratch.literal(member.name));
      ASSIGN_OR_RETURN(const NodeId content, parameter_value(member.schemas));
      const NodeId node = parameter(grammar_.literal(member.name), content);
      nodes.push_back({member.required, node, node});
    }
    if (const std::optional<Conjunction> additional = reader_.additional(shape)) {
      ASSIGN_OR_RETURN(const Dfa any_name, regex_dfa("^[A-Za-z_][A-Za-z0-9_.-]{0,63}$", CharForm::kText, true));
      ASSIGN_OR_RETURN(const Dfa known, build_dfa(scratch, scratch.choice(std::move(names)), nullptr));
      ASSIGN_OR_RETURN(const Dfa unknown, subtract(any_name, known));
      // A name that the schema does not list is read as whatever its text looks like, so it can only be anything.
      if (!additional->empty() && !std::ranges::all_of(*additional, [](const SchemaPlace& p) { return *p.schema == true || (p.schema->is_object() && p.schema->empty()); }))
        return reader_.unsupported("#", "has additionalProperties with a schema, which is not supported for a function's parameters");
      const NodeId node = parameter(unknown.as_node(grammar_), free_text());
      more.push_back({false, node, node});
    }
    ASSIGN_OR_RETURN(GrammarGraph graph, member_graph(shape, nodes, more, grammar_.empty()));
    return grammar_.graph(std::move(graph));
  }

  /// Text between the tags of a parameter: nothing that is read as a tag.
  static const Dfa& safe_text() {
    static const Dfa dfa = plain_text_without({"</parameter>", "\n</function>", "\n</tool_call>", "\n<parameter="});
    return dfa;
  }

 public:
  NodeId free_text() {
    if (free_text_ < 0) free_text_ = grammar_.add_rule("text of a parameter", safe_text().as_node(grammar_));
    return grammar_.rule(free_text_);
  }

 private:
  /// Strings as they are, other values as JSON.
  Result<NodeId> parameter_value(const Conjunction& schemas) {
    ASSIGN_OR_RETURN(const std::vector<SchemaShape> shapes, reader_.shapes(schemas));
    unsigned types = 0;
    for (const SchemaShape& shape : shapes) types |= types_of(shape);
    std::vector<NodeId> alternatives;
    for (const SchemaShape& shape : shapes) {
      SchemaShape others = shape;
      others.types &= ~unsigned{kJsonString};
      if (others.types != 0) RETURN_IF_ERROR(add_shape(others, alternatives));
      if ((shape.types & kJsonString) != 0) RETURN_IF_ERROR(add_text(shape, types & ~unsigned{kJsonString}, alternatives));
    }
    return grammar_.choice(std::move(alternatives));
  }

  static unsigned types_of(const SchemaShape& shape) {
    if (!shape.values) return shape.types;
    unsigned types = 0;
    for (const Json& value : *shape.values)
      types |= value.is_string() ? kJsonString : value.is_boolean() ? kJsonBoolean : value.is_null() ? kJsonNull : value.is_array() ? kJsonArray
               : value.is_object() ? kJsonObject : kJsonNumber | kJsonInteger;
    return types & shape.types;
  }

  /// `other_types`: what else the value may be. A text that could be read as one of these is left out, unless all of these are allowed.
  Result<void> add_text(const SchemaShape& shape, unsigned other_types, std::vector<NodeId>& out) {
    if (shape.values) {
      for (const Json& one : *shape.values) {
        ASSIGN_OR_RETURN(const bool allowed, reader_.matches(one, shape));
        if (!allowed || !one.is_string()) continue;
        const auto& content = one.get_ref<const std::string&>();
        if (!safe_text().accepts(content)) continue;
        if (other_types != 0 && json_value(content, other_types | kJsonString, true) != dump_json(one)) continue;
        out.push_back(grammar_.literal(content));
      }
      return {};
    }
    const bool any_length = shape.min_length == 0 && !shape.max_length;
    ByteSet not_first;  // bytes with which a value of another type, which may have bounds, begins
    if ((other_types & (kJsonNumber | kJsonInteger)) != 0) not_first.merge(ByteSet::of("-0123456789"));
    if ((other_types & kJsonArray) != 0) not_first.merge(ByteSet::of("["));
    if ((other_types & kJsonObject) != 0) not_first.merge(ByteSet::of("{"));
    if (!not_first.empty()) not_first.merge(ByteSet::of(" \t\r\n"));
    if (shape.patterns.empty() && any_length && not_first.empty()) {
      out.push_back(free_text());
      return {};
    }
    if (shape.patterns.empty() && !any_length) {
      // To be counted next to the tags would take a state for each place in a tag at each length; without "<" there are no tags.
      if (!not_first.empty()) not_first.merge(ByteSet::of("<"));
      const NodeId one = grammar_.code_point(complement({{'<', '<'}}));
      const auto times = [&](int64_t fewer) {
        const int32_t max = shape.max_length ? as_count(*shape.max_length - fewer) : Grammar::kUnbounded;
        return grammar_.repeat(one, as_count(shape.min_length - fewer), max);
      };
      if (not_first.empty()) {
        out.push_back(times(0));
        return {};
      }
      if (shape.min_length == 0) out.push_back(grammar_.empty());
      if (!shape.max_length || *shape.max_length > 0) {
        CodePointSet first;
        for (char32_t c = 0; c < 0x80; ++c)
          if (!not_first.has(static_cast<uint8_t>(c))) first.push_back({c, c});
        first.push_back({0x80, kLastCodePoint});
        out.push_back(grammar_.sequence({grammar_.code_point(first), times(1)}));
      }
      return {};
    }
    Dfa dfa = safe_text();
    if (!shape.patterns.empty()) {
      const auto located = [&](const Error& error, const std::string& path) {
        Error located_error = reader_.error(path, fmt::format("cannot be used: {}", error.message));
        located_error.code = error.code;
        return located_error;
      };
      ASSIGN_OR_RETURN(const Dfa matching, text_dfa(shape, CharForm::kText, located));
      ASSIGN_OR_RETURN(dfa, intersect(dfa, matching));
    }
    if (!not_first.empty() && !dfa.states.empty()) {
      Grammar scratch;
      ByteSet first;
      for (int byte = 0; byte < 256; ++byte)
        if (!not_first.has(static_cast<uint8_t>(byte))) first.add(static_cast<uint8_t>(byte));
      const NodeId rest = scratch.repeat(scratch.bytes(ByteSet::range(0, 255)), 0, Grammar::kUnbounded);
      ASSIGN_OR_RETURN(const Dfa begins, build_dfa(scratch, scratch.optional(scratch.sequence({scratch.bytes(first), rest})), nullptr));
      ASSIGN_OR_RETURN(dfa, intersect(dfa, begins));
    }
    out.push_back(dfa.as_node(grammar_));
    return {};
  }

  Grammar& grammar_;
  SchemaReader reader_;
  JsonGrammar json_;
  std::map<std::set<const Json*>, RuleId> rules_;
  std::deque<std::pair<RuleId, Conjunction>> todo_;
  std::map<std::string, RuleId> patterns_;
  RuleId free_text_ = -1;
};

}  // namespace

Result<NodeId> json_schema_node(Grammar& grammar, const Json& schema, std::string_view field, const JsonStyle& style) {
  return SchemaCompiler(grammar, schema, field, style).json();
}

Result<NodeId> tool_arguments_node(Grammar& grammar, const Json& schema, std::string_view field) {
  return SchemaCompiler(grammar, schema, field, JsonStyle{}).arguments();
}

NodeId any_tool_arguments_node(Grammar& grammar) {
  static const Json kAnything = Json::object();
  SchemaCompiler compiler(grammar, kAnything, "", JsonStyle{});
  const NodeId name_start = grammar.code_point(complement({{0, ' '}, {'<', '<'}, {'>', '>'}}));
  const NodeId name_more = grammar.repeat(name_start, 0, 63);
  const NodeId one = grammar.sequence({grammar.literal(kOpenParameter), name_start, name_more, grammar.literal(kAfterName), compiler.free_text(),
                                       grammar.literal(kCloseParameter)});
  return grammar.repeat(one, 0, Grammar::kUnbounded);
}

}  // namespace quern::text
