#include "text/regex_grammar.h"

#include <algorithm>
#include <charconv>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "text/utf8.h"

namespace quern::text {
namespace {

constexpr int kMaxDepth = 100;
constexpr int32_t kMaxCount = 100'000;

const CodePointSet kDigits{{'0', '9'}};
const CodePointSet kWordCharacters{{'0', '9'}, {'A', 'Z'}, {'_', '_'}, {'a', 'z'}};
const CodePointSet kSpaces{{'\t', '\r'}, {' ', ' '}};
const CodePointSet kLineEnds{{'\n', '\n'}, {'\r', '\r'}, {0x2028, 0x2029}};
const CodePointSet kEverything{{0, kLastCodePoint}};

/// A regular expression as it was written.
struct Expression {
  enum class Kind : uint8_t { kCharacters, kSequence, kAlternatives, kRepeat, kBegin, kEnd } kind = Kind::kSequence;
  CodePointSet set;
  std::vector<Expression> parts;
  int32_t min = 0, max = 0;
};

class RegexParser {
 public:
  explicit RegexParser(std::string_view pattern) : pattern_(pattern) {}

  Result<Expression> parse() {
    if (!is_valid_utf8(pattern_)) return invalid_argument("the regular expression is not UTF-8");
    ASSIGN_OR_RETURN(Expression expression, alternatives(0));
    if (!at_end()) return fail("unexpected \")\"");
    return expression;
  }

 private:
  [[nodiscard]] bool at_end() const { return at_ == pattern_.size(); }
  [[nodiscard]] char peek() const { return at_end() ? '\0' : pattern_[at_]; }
  bool take(std::string_view text) {
    if (!pattern_.substr(at_).starts_with(text)) return false;
    at_ += text.size();
    return true;
  }
  [[nodiscard]] Error fail(std::string_view what) const {
    return invalid_argument("the regular expression is malformed at byte {}: {}", at_, what);
  }
  [[nodiscard]] static Error unsupported(std::string_view what) {
    return make_error(ErrorCode::kUnsupported, "{} are not supported in regular expressions", what);
  }

  Result<Expression> alternatives(int depth) {
    if (depth > kMaxDepth) return fail(fmt::format("more than {} nested groups", kMaxDepth));
    Expression out{.kind = Expression::Kind::kAlternatives};
    do {
      ASSIGN_OR_RETURN(Expression one, sequence(depth));
      out.parts.push_back(std::move(one));
    } while (take("|"));
    if (out.parts.size() == 1) {
      Expression only = std::move(out.parts.front());
      return only;
    }
    return out;
  }

  Result<Expression> sequence(int depth) {
    Expression out{.kind = Expression::Kind::kSequence};
    while (!at_end() && peek() != '|' && peek() != ')') {
      ASSIGN_OR_RETURN(Expression item, atom(depth));
      ASSIGN_OR_RETURN(Expression repeated, quantified(std::move(item)));
      out.parts.push_back(std::move(repeated));
    }
    return out;
  }

  Result<Expression> quantified(Expression item) {
    bool has_one = false;
    while (true) {
      int32_t min = 0, max = Grammar::kUnbounded;
      const size_t before = at_;
      if (take("*")) {
      } else if (take("+")) {
        min = 1;
      } else if (take("?")) {
        max = 1;
      } else if (peek() == '{') {
        ASSIGN_OR_RETURN(const bool counted, counts(min, max));
        if (!counted) return item;  // a brace is a character, too
      } else {
        return item;
      }
      if (has_one) {
        at_ = before;
        return fail("a quantifier has nothing to repeat");
      }
      if (item.kind == Expression::Kind::kBegin || item.kind == Expression::Kind::kEnd) {
        at_ = before;
        return fail("an anchor cannot be repeated");
      }
      has_one = true;
      take("?");  // lazy: the same texts
      if (peek() == '+') return unsupported("possessive quantifiers");
      Expression out{.kind = Expression::Kind::kRepeat};
      out.min = min;
      out.max = max;
      out.parts.push_back(std::move(item));
      item = std::move(out);
    }
  }

  /// "{m}", "{m,}", "{,n}" or "{m,n}"; false when it is something else.
  Result<bool> counts(int32_t& min, int32_t& max) {
    const size_t close = pattern_.find('}', at_);
    if (close == std::string_view::npos) return false;
    const std::string_view inside = pattern_.substr(at_ + 1, close - at_ - 1);
    if (inside.empty() || inside == "," || inside.find_first_not_of("0123456789,") != std::string_view::npos) return false;
    const size_t comma = inside.find(',');
    const auto number = [&](std::string_view text, int32_t& out) {
      const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), out);
      return error == std::errc() && end == text.data() + text.size() && out <= kMaxCount;
    };
    const std::string_view first = inside.substr(0, comma);
    const std::string_view second = comma == std::string_view::npos ? first : inside.substr(comma + 1);
    min = 0;
    max = Grammar::kUnbounded;
    if (!first.empty() && !number(first, min)) return fail(fmt::format("a count is malformed or above {}", kMaxCount));
    if (!second.empty() && !number(second, max)) return fail(fmt::format("a count is malformed or above {}", kMaxCount));
    if (max != Grammar::kUnbounded && max < min) return fail("the counts of a quantifier are out of order");
    at_ = close + 1;
    return true;
  }

  Result<Expression> atom(int depth) {
    if (take("(")) return group(depth);
    if (take("^")) return Expression{.kind = Expression::Kind::kBegin};
    if (take("$")) return Expression{.kind = Expression::Kind::kEnd};
    if (take(".")) return characters_of(complement(kLineEnds));
    if (take("[")) return char_class();
    if (peek() == '*' || peek() == '+' || peek() == '?') return fail("a quantifier has nothing to repeat");
    if (take("\\")) {
      if (take("A")) return Expression{.kind = Expression::Kind::kBegin};
      if (take("Z") || take("z")) return Expression{.kind = Expression::Kind::kEnd};
      if (take("b") || take("B")) return unsupported("word boundaries (\\b, \\B)");
      if (peek() >= '1' && peek() <= '9') return unsupported("back references");
      if (peek() == 'k') return unsupported("back references (\\k)");
      ASSIGN_OR_RETURN(CodePointSet set, escape());
      return characters_of(std::move(set));
    }
    const CodePoint c = code_point_at(pattern_, at_);
    at_ += c.length;
    return characters_of({{c.value, c.value}});
  }

  Result<Expression> group(int depth) {
    if (take("?")) {
      if (take(":")) {
      } else if (take("=") || take("!") || take("<=") || take("<!")) {
        return unsupported("lookahead and lookbehind, (?=...), (?!...), (?<=...), (?<!...),");
      } else if (take("P=")) {
        return unsupported("back references (?P=...)");
      } else if (take("P<") || take("<")) {
        const size_t close = pattern_.find('>', at_);
        if (close == std::string_view::npos) return fail("the name of a group has no end");
        at_ = close + 1;
      } else {
        return unsupported("flags and conditions in groups, (?...),");
      }
    }
    ASSIGN_OR_RETURN(Expression inside, alternatives(depth + 1));
    if (!take(")")) return fail("a group has no end");
    return inside;
  }

  static Expression characters_of(CodePointSet set) {
    Expression out{.kind = Expression::Kind::kCharacters};
    out.set = normalized(std::move(set));
    return out;
  }

  /// Behind a backslash: one character, or a class.
  Result<CodePointSet> escape() {
    if (at_end()) return fail("a backslash stands at the end");
    const CodePoint c = code_point_at(pattern_, at_);
    at_ += c.length;
    switch (c.value) {
      case 'd': return kDigits;
      case 'D': return complement(kDigits);
      case 'w': return kWordCharacters;
      case 'W': return complement(kWordCharacters);
      case 's': return kSpaces;
      case 'S': return complement(kSpaces);
      case 't': return one('\t');
      case 'n': return one('\n');
      case 'r': return one('\r');
      case 'f': return one('\f');
      case 'v': return one('\v');
      case '0': return one(0);
      case 'x': return hex(2);
      case 'u':
        if (take("{")) {
          const size_t close = pattern_.find('}', at_);
          if (close == std::string_view::npos || close == at_ || close - at_ > 6) return fail("\\u{...} is malformed");
          ASSIGN_OR_RETURN(CodePointSet set, hex(close - at_));
          ++at_;
          return set;
        }
        return unicode_escape();
      case 'c': {
        const char letter = peek();
        if (!((letter >= 'a' && letter <= 'z') || (letter >= 'A' && letter <= 'Z'))) return fail("\\c wants a letter");
        ++at_;
        return one(static_cast<char32_t>(letter & 0x1F));
      }
      case 'p':
      case 'P': return unsupported("Unicode properties (\\p)");
      default: break;
    }
    if (c.value < 0x80 && ((c.value >= 'a' && c.value <= 'z') || (c.value >= 'A' && c.value <= 'Z') || (c.value >= '0' && c.value <= '9')))
      return fail(fmt::format("the escape \\{} is not known", static_cast<char>(c.value)));
    return one(c.value);
  }
  static CodePointSet one(char32_t c) { return {{c, c}}; }

  Result<CodePointSet> hex(size_t digits) {
    uint32_t value = 0;
    const std::string_view text = pattern_.substr(at_, digits);
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value, 16);
    if (text.size() != digits || error != std::errc() || end != text.data() + text.size()) return fail("hexadecimal digits are missing");
    at_ += digits;
    if (value > kLastCodePoint) return fail("the code point is too high");
    return one(value);
  }

  /// \uHHHH, two of them where the first is a high surrogate.
  Result<CodePointSet> unicode_escape() {
    ASSIGN_OR_RETURN(const CodePointSet first, hex(4));
    const char32_t high = first.front().low;
    if (high < 0xD800 || high > 0xDFFF) return first;
    if (high > 0xDBFF || !take("\\u")) return fail("half a surrogate pair");
    ASSIGN_OR_RETURN(const CodePointSet second, hex(4));
    const char32_t low = second.front().low;
    if (low < 0xDC00 || low > 0xDFFF) return fail("half a surrogate pair");
    return one(0x10000 + ((high - 0xD800) << 10) + (low - 0xDC00));
  }

  Result<Expression> char_class() {
    const bool negated = take("^");
    // Python and ECMAScript do not agree what a bracket means here.
    if (peek() == ']') return fail("a character class is empty; a bracket in a class is written \\]");
    CodePointSet set;
    while (!take("]")) {
      if (at_end()) return fail("a character class has no end");
      if (take("[:")) return unsupported("POSIX classes ([:alpha:])");
      ASSIGN_OR_RETURN(const CodePointSet low, class_member());
      const bool single = low.size() == 1 && low.front().low == low.front().high;
      if (peek() == '-' && at_ + 1 < pattern_.size() && pattern_[at_ + 1] != ']') {
        if (!single) return fail("a range begins with a class");
        ++at_;
        ASSIGN_OR_RETURN(const CodePointSet high, class_member());
        if (high.size() != 1 || high.front().low != high.front().high) return fail("a range ends with a class");
        if (high.front().low < low.front().low) return fail("a range is out of order");
        set.push_back({low.front().low, high.front().low});
      } else {
        set.insert(set.end(), low.begin(), low.end());
      }
    }
    return characters_of(negated ? complement(set) : set);
  }

  Result<CodePointSet> class_member() {
    if (at_end()) return fail("a character class has no end");
    if (take("\\")) {
      if (take("b")) return one('\b');
      return escape();
    }
    const CodePoint c = code_point_at(pattern_, at_);
    at_ += c.length;
    return one(c.value);
  }

  std::string_view pattern_;
  size_t at_ = 0;
};

/// An alternative without the anchors at its ends.
struct Anchored {
  Expression body;
  bool begin = false, end = false;
};

bool has_anchor(const Expression& e) {
  return e.kind == Expression::Kind::kBegin || e.kind == Expression::Kind::kEnd || std::ranges::any_of(e.parts, has_anchor);
}

/// Takes expressions apart until their anchors stand at the ends of alternatives.
Result<void> split(Expression e, bool begin, bool end, std::vector<Anchored>& out) {
  if (e.kind == Expression::Kind::kAlternatives) {
    for (Expression& part : e.parts) RETURN_IF_ERROR(split(std::move(part), begin, end, out));
    return {};
  }
  if (e.kind == Expression::Kind::kBegin || e.kind == Expression::Kind::kEnd) {
    Expression wrapped{.kind = Expression::Kind::kSequence};
    wrapped.parts.push_back(std::move(e));
    e = std::move(wrapped);
  }
  if (e.kind == Expression::Kind::kSequence) {
    while (!e.parts.empty() && e.parts.front().kind == Expression::Kind::kBegin) e.parts.erase(e.parts.begin()), begin = true;
    while (!e.parts.empty() && e.parts.back().kind == Expression::Kind::kEnd) e.parts.pop_back(), end = true;
    // "$^" and the like: what is left of one kind at the other end matches only where the text is empty there.
    if (e.parts.size() == 1 && has_anchor(e.parts.front())) {
      Expression only = std::move(e.parts.front());
      return split(std::move(only), begin, end, out);
    }
    // A group at an end: its alternatives become alternatives of the whole.
    for (const bool front : {true, false}) {
      if (e.parts.empty()) break;
      Expression& outer = front ? e.parts.front() : e.parts.back();
      if (!has_anchor(outer)) continue;
      std::vector<Expression> alternatives;
      if (outer.kind == Expression::Kind::kAlternatives) {
        alternatives = std::move(outer.parts);
      } else if (outer.kind == Expression::Kind::kSequence) {
        alternatives.push_back(std::move(outer));
      } else {
        break;
      }
      if (out.size() + alternatives.size() > 1000) return make_error(ErrorCode::kUnsupported, "so many anchors in groups are not supported in regular expressions");
      for (Expression& alternative : alternatives) {
        Expression whole{.kind = Expression::Kind::kSequence};
        std::vector<Expression> inner;
        if (alternative.kind == Expression::Kind::kSequence) {
          inner = std::move(alternative.parts);
        } else {
          inner.push_back(std::move(alternative));
        }
        if (front) {
          whole.parts = std::move(inner);
          whole.parts.insert(whole.parts.end(), e.parts.begin() + 1, e.parts.end());
        } else {
          whole.parts.assign(e.parts.begin(), e.parts.end() - 1);
          whole.parts.insert(whole.parts.end(), inner.begin(), inner.end());
        }
        RETURN_IF_ERROR(split(std::move(whole), begin, end, out));
      }
      return {};
    }
  }
  if (has_anchor(e)) return make_error(ErrorCode::kUnsupported, "anchors (^ and $) in the middle are not supported in regular expressions");
  out.push_back({std::move(e), begin, end});
  return {};
}

NodeId node_of(Grammar& grammar, const Expression& e, CharForm form) {
  switch (e.kind) {
    case Expression::Kind::kCharacters: return character(grammar, e.set, form);
    case Expression::Kind::kRepeat: return grammar.repeat(node_of(grammar, e.parts.front(), form), e.min, e.max);
    case Expression::Kind::kSequence:
    case Expression::Kind::kAlternatives: {
      std::vector<NodeId> parts;
      for (const Expression& part : e.parts) parts.push_back(node_of(grammar, part, form));
      return e.kind == Expression::Kind::kSequence ? grammar.sequence(std::move(parts)) : grammar.choice(std::move(parts));
    }
    case Expression::Kind::kBegin:
    case Expression::Kind::kEnd: break;
  }
  CHECK_UNREACHABLE();
}

}  // namespace

NodeId character(Grammar& grammar, const CodePointSet& set, CharForm form) {
  if (form == CharForm::kText) return grammar.code_point(set);
  static const CodePointSet kPlain = complement({{0, 0x1F}, {'"', '"'}, {'\\', '\\'}});
  const CodePointSet wanted = normalized(set);
  std::vector<NodeId> alternatives;
  if (const CodePointSet plain = intersection(wanted, kPlain); !plain.empty()) alternatives.push_back(grammar.code_point(plain));
  for (const CodePointRange& range : intersection(wanted, complement(kPlain))) {
    for (char32_t c = range.low; c <= range.high; ++c) {
      switch (c) {
        case '"': alternatives.push_back(grammar.literal("\\\"")); break;
        case '\\': alternatives.push_back(grammar.literal("\\\\")); break;
        case '\b': alternatives.push_back(grammar.literal("\\b")); break;
        case '\f': alternatives.push_back(grammar.literal("\\f")); break;
        case '\n': alternatives.push_back(grammar.literal("\\n")); break;
        case '\r': alternatives.push_back(grammar.literal("\\r")); break;
        case '\t': alternatives.push_back(grammar.literal("\\t")); break;
        default: alternatives.push_back(grammar.literal(fmt::format("\\u{:04x}", static_cast<uint32_t>(c))));
      }
    }
  }
  return grammar.choice(std::move(alternatives));
}

NodeId characters(Grammar& grammar, std::string_view utf8, CharForm form) {
  if (form == CharForm::kText) return grammar.literal(utf8);
  std::vector<NodeId> parts;
  for (size_t at = 0; at < utf8.size();) {
    const CodePoint c = code_point_at(utf8, at);
    parts.push_back(character(grammar, {{c.value, c.value}}, form));
    at += c.length;
  }
  return grammar.sequence(std::move(parts));
}

Result<NodeId> regex_node(Grammar& grammar, std::string_view pattern, CharForm form, bool search) {
  ASSIGN_OR_RETURN(Expression expression, RegexParser(pattern).parse());
  std::vector<Anchored> alternatives;
  RETURN_IF_ERROR(split(std::move(expression), !search, !search, alternatives));
  std::vector<NodeId> nodes;
  for (const Anchored& alternative : alternatives) {
    const auto anything = [&] { return grammar.repeat(character(grammar, kEverything, form), 0, Grammar::kUnbounded); };
    std::vector<NodeId> parts;
    if (!alternative.begin) parts.push_back(anything());
    parts.push_back(node_of(grammar, alternative.body, form));
    if (!alternative.end) parts.push_back(anything());
    nodes.push_back(grammar.sequence(std::move(parts)));
  }
  return grammar.choice(std::move(nodes));
}

Result<Dfa> regex_dfa(std::string_view pattern, CharForm form, bool search) {
  Grammar grammar;
  ASSIGN_OR_RETURN(const NodeId node, regex_node(grammar, pattern, form, search));
  ASSIGN_OR_RETURN(const Dfa dfa, build_dfa(grammar, node, nullptr));
  return dfa.trimmed();
}

}  // namespace quern::text
