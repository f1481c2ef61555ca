#include "text/gbnf_grammar.h"

#include <algorithm>
#include <charconv>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "text/utf8.h"

namespace quern::text {
namespace {

constexpr int kMaxDepth = 100;
constexpr int32_t kMaxCount = 100'000;
constexpr size_t kMaxRules = 10'000;
constexpr size_t kMaxInlinedNodes = 500;

bool is_name_char(char c) {
  return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '_' || c == '-' || c == '.';
}
bool is_name_start(char c) { return is_name_char(c) && c != '.' && c != '-' && !(c >= '0' && c <= '9'); }

/// An expression before names are known to be rules.
struct Item {
  enum class Kind : uint8_t { kText, kCharacters, kName, kSequence, kAlternatives, kRepeat } kind = Kind::kSequence;
  std::string text;  // kText, kName
  CodePointSet set;
  std::vector<Item> parts;
  int32_t min = 0, max = 0;
};

class GbnfParser {
 public:
  explicit GbnfParser(std::string_view text) : text_(text) {}

  Result<ParsedGrammar> parse() {
    if (!is_valid_utf8(text_)) return invalid_argument("the grammar is not UTF-8");
    RETURN_IF_ERROR(refuse_lark());
    for (skip(true); at_ < text_.size(); skip(true)) RETURN_IF_ERROR(rule());
    if (rules_.empty()) return invalid_argument("the grammar has no rules; one looks like: root ::= \"yes\" | \"no\"");
    if (!numbers_.contains("root")) return invalid_argument("the grammar has no rule \"root\", which is the output; its first rule is \"{}\"", rules_.front().first);
    return build();
  }

 private:
  [[nodiscard]] Error fail(std::string_view what) const {
    const auto line = 1 + std::ranges::count(text_.substr(0, std::min(at_, text_.size())), '\n');
    return invalid_argument("line {} of the grammar: {}", line, what);
  }

  /// Lark's rules have one colon; nothing of ours has.
  [[nodiscard]] Result<void> refuse_lark() const {
    const auto refusal = [] {
      return make_error(ErrorCode::kUnsupported, "this is a Lark grammar, which is not supported; write it in EBNF, with rules like: root ::= \"yes\" | \"no\"");
    };
    size_t begin = 0;
    while (begin < text_.size()) {
      const size_t end = std::min(text_.find('\n', begin), text_.size());
      std::string_view line = text_.substr(begin, end - begin);
      begin = end + 1;
      line.remove_prefix(std::min(line.find_first_not_of(" \t\r"), line.size()));
      if (line.starts_with("%import") || line.starts_with("%ignore") || line.starts_with("//")) return refusal();
      size_t name = line.starts_with('?') || line.starts_with('!') ? 1 : 0;
      while (name < line.size() && is_name_char(line[name])) ++name;
      const std::string_view rest = line.substr(std::min(line.find_first_not_of(" \t", name), line.size()));
      if (name > 0 && rest.starts_with(':') && !rest.starts_with("::=")) return refusal();
    }
    return {};
  }

  [[nodiscard]] char peek() const { return at_ < text_.size() ? text_[at_] : '\0'; }
  bool take(std::string_view what) {
    if (!text_.substr(at_).starts_with(what)) return false;
    at_ += what.size();
    return true;
  }
  /// Blanks and comments; newlines, too, if they may stand here.
  void skip(bool newlines) {
    while (at_ < text_.size()) {
      if (peek() == '#') {
        at_ = std::min(text_.find('\n', at_), text_.size());
      } else if (peek() == ' ' || peek() == '\t' || (newlines && (peek() == '\n' || peek() == '\r'))) {
        ++at_;
      } else {
        return;
      }
    }
  }
  /// What follows is a new rule: a name and "::=".
  [[nodiscard]] bool rule_begins() const {
    size_t end = at_;
    while (end < text_.size() && is_name_char(text_[end])) ++end;
    if (end == at_) return false;
    end = text_.find_first_not_of(" \t", end);
    return end != std::string_view::npos && text_.substr(end).starts_with("::=");
  }

  Result<std::string> name() {
    const size_t begin = at_;
    if (!is_name_start(peek())) return fail(fmt::format("expected a rule's name, found \"{}\"", text_.substr(at_, 12)));
    while (is_name_char(peek())) ++at_;
    return std::string(text_.substr(begin, at_ - begin));
  }

  Result<void> rule() {
    ASSIGN_OR_RETURN(const std::string rule_name, name());
    skip(true);
    if (!take("::=")) return fail(fmt::format("expected ::= behind \"{}\"", rule_name));
    ASSIGN_OR_RETURN(Item body, alternatives(0));
    if (rules_.size() == kMaxRules) return fail(fmt::format("more than {} rules", kMaxRules));
    if (!numbers_.emplace(rule_name, rules_.size()).second) return fail(fmt::format("there are two rules \"{}\"", rule_name));
    rules_.emplace_back(rule_name, std::move(body));
    skip(true);
    if (at_ < text_.size() && !rule_begins()) return fail(fmt::format("unexpected \"{}\"", text_.substr(at_, 12)));
    return {};
  }

  Result<Item> alternatives(int depth) {
    if (depth > kMaxDepth) return fail(fmt::format("more than {} nested groups", kMaxDepth));
    Item out{.kind = Item::Kind::kAlternatives};
    do {
      ASSIGN_OR_RETURN(Item one, sequence(depth));
      out.parts.push_back(std::move(one));
      skip(true);
    } while (take("|"));
    return out;
  }

  Result<Item> sequence(int depth) {
    Item out{.kind = Item::Kind::kSequence};
    for (skip(true); at_ < text_.size() && peek() != '|' && peek() != ')' && !rule_begins(); skip(true)) {
      ASSIGN_OR_RETURN(Item item, atom(depth));
      skip(false);
      RETURN_IF_ERROR(quantify(item));
      out.parts.push_back(std::move(item));
    }
    return out;
  }

  Result<void> quantify(Item& item) {
    while (true) {
      Item repeat{.kind = Item::Kind::kRepeat};
      repeat.max = Grammar::kUnbounded;
      if (take("*")) {
      } else if (take("+")) {
        repeat.min = 1;
      } else if (take("?")) {
        repeat.max = 1;
      } else if (take("{")) {
        const size_t close = text_.find('}', at_);
        if (close == std::string_view::npos) return fail("a quantifier has no end");
        RETURN_IF_ERROR(read_counts(text_.substr(at_, close - at_), repeat));
        at_ = close + 1;
      } else {
        return {};
      }
      if (item.kind == Item::Kind::kRepeat && depth_of_repeats(item) > 4) return fail("too many quantifiers one on the other");
      repeat.parts.push_back(std::move(item));
      item = std::move(repeat);
    }
  }
  static int depth_of_repeats(const Item& item) { return item.kind == Item::Kind::kRepeat ? 1 + depth_of_repeats(item.parts.front()) : 0; }

  Result<void> read_counts(std::string_view inside, Item& repeat) {
    const auto number = [&](std::string_view text, int32_t& out) {
      while (text.starts_with(' ')) text.remove_prefix(1);
      while (text.ends_with(' ')) text.remove_suffix(1);
      const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), out);
      return error == std::errc() && end == text.data() + text.size() && out >= 0 && out <= kMaxCount;
    };
    const auto malformed = [&] { return fail(fmt::format("the quantifier {{{}}} is malformed or above {}", inside.substr(0, 32), kMaxCount)); };
    const size_t comma = inside.find(',');
    const std::string_view first = inside.substr(0, comma);
    if (first.find_first_not_of(' ') == std::string_view::npos) {
      if (comma == std::string_view::npos) return malformed();
    } else if (!number(first, repeat.min)) {
      return malformed();
    }
    if (comma == std::string_view::npos) {
      repeat.max = repeat.min;
    } else if (inside.substr(comma + 1).find_first_not_of(' ') != std::string_view::npos && !number(inside.substr(comma + 1), repeat.max)) {
      return malformed();
    }
    if (repeat.max != Grammar::kUnbounded && repeat.max < repeat.min) return malformed();
    return {};
  }

  Result<Item> atom(int depth) {
    if (take("(")) {
      ASSIGN_OR_RETURN(Item inside, alternatives(depth + 1));
      skip(true);
      if (!take(")")) return fail("a group has no end");
      return inside;
    }
    if (peek() == '"' || peek() == '\'') return text();
    if (take("[")) return characters();
    if (take(".")) {
      Item out{.kind = Item::Kind::kCharacters};
      out.set = {{0, kLastCodePoint}};
      return out;
    }
    ASSIGN_OR_RETURN(std::string rule_name, name());
    Item out{.kind = Item::Kind::kName};
    out.text = std::move(rule_name);
    return out;
  }

  Result<Item> text() {
    const char quote = text_[at_++];
    Item out{.kind = Item::Kind::kText};
    while (peek() != quote) {
      if (at_ >= text_.size() || peek() == '\n') return fail("a text in quotes has no end");
      ASSIGN_OR_RETURN(const char32_t c, one_character());
      append_utf8(c, out.text);
    }
    ++at_;
    return out;
  }

  Result<Item> characters() {
    Item out{.kind = Item::Kind::kCharacters};
    const bool negated = take("^");
    while (!take("]")) {
      if (at_ >= text_.size() || peek() == '\n') return fail("a character class has no end");
      ASSIGN_OR_RETURN(const CodePointSet low, class_member());
      if (peek() == '-' && at_ + 1 < text_.size() && text_[at_ + 1] != ']') {
        ++at_;
        ASSIGN_OR_RETURN(const CodePointSet high, class_member());
        if (low.size() != 1 || high.size() != 1 || low.front().low != low.front().high || high.front().low != high.front().high || high.front().low < low.front().low)
          return fail("a range in a character class is out of order");
        out.set.push_back({low.front().low, high.front().low});
      } else {
        out.set.insert(out.set.end(), low.begin(), low.end());
      }
    }
    out.set = negated ? complement(out.set) : normalized(out.set);
    return out;
  }

  Result<CodePointSet> class_member() {
    if (peek() == '\\' && at_ + 1 < text_.size()) {
      const char kind = text_[at_ + 1];
      const CodePointSet digits{{'0', '9'}}, word{{'0', '9'}, {'A', 'Z'}, {'_', '_'}, {'a', 'z'}}, space{{'\t', '\r'}, {' ', ' '}};
      const CodePointSet* set = kind == 'd' || kind == 'D' ? &digits : kind == 'w' || kind == 'W' ? &word : kind == 's' || kind == 'S' ? &space : nullptr;
      if (set != nullptr) {
        at_ += 2;
        return kind < 'a' ? complement(*set) : *set;
      }
    }
    ASSIGN_OR_RETURN(const char32_t c, one_character());
    return CodePointSet{{c, c}};
  }

  Result<char32_t> one_character() {
    if (!take("\\")) {
      const CodePoint c = code_point_at(text_, at_);
      at_ += c.length;
      return c.value;
    }
    const char kind = peek();
    ++at_;
    const auto hex = [&](size_t digits) -> Result<char32_t> {
      uint32_t value = 0;
      const std::string_view number = text_.substr(std::min(at_, text_.size()), digits);
      const auto [end, error] = std::from_chars(number.data(), number.data() + number.size(), value, 16);
      if (number.size() != digits || error != std::errc() || end != number.data() + number.size() || value > kLastCodePoint || (value >= 0xD800 && value <= 0xDFFF))
        return fail("an escape has too few hexadecimal digits, or is no character");
      at_ += digits;
      return static_cast<char32_t>(value);
    };
    switch (kind) {
      case 'n': return U'\n';
      case 'r': return U'\r';
      case 't': return U'\t';
      case 'f': return U'\f';
      case 'v': return U'\v';
      case 'b': return U'\b';
      case '0': return U'\0';
      case 'x': return hex(2);
      case 'u': return hex(4);
      case 'U': return hex(8);
      default: break;
    }
    if (at_ > text_.size() || kind == '\0' || is_name_start(kind)) return fail(fmt::format("the escape \\{} is not known", kind));
    if (static_cast<unsigned char>(kind) >= 0x80) return fail("a backslash stands before a character that needs none");
    return static_cast<char32_t>(kind);
  }

  static void append_utf8(char32_t c, std::string& out) {
    const auto byte = [&](char32_t value) { out += static_cast<char>(static_cast<unsigned char>(value)); };
    if (c < 0x80) return byte(c);
    if (c < 0x800) return byte(0xC0 | c >> 6), byte(0x80 | (c & 0x3F));
    if (c < 0x10000) return byte(0xE0 | c >> 12), byte(0x80 | (c >> 6 & 0x3F)), byte(0x80 | (c & 0x3F));
    byte(0xF0 | c >> 18), byte(0x80 | (c >> 12 & 0x3F)), byte(0x80 | (c >> 6 & 0x3F)), byte(0x80 | (c & 0x3F));
  }

  // --- from names to rules

  Result<ParsedGrammar> build() {
    out_.grammar = {};
    for (const auto& [rule_name, body] : rules_) out_.grammar.add_rule(rule_name);
    find_recursive();
    inlined_.assign(rules_.size(), -1);
    sizes_.assign(rules_.size(), 0);
    for (size_t i = 0; i < rules_.size(); ++i) {
      size_t size = 0;
      ASSIGN_OR_RETURN(const NodeId body, body_of(i, size));
      out_.grammar.define(static_cast<RuleId>(i), body);
    }
    out_.root = static_cast<RuleId>(numbers_.at("root"));
    return std::move(out_);
  }

  static void names_in(const Item& item, std::vector<std::string_view>& out) {
    if (item.kind == Item::Kind::kName) out.push_back(item.text);
    for (const Item& part : item.parts) names_in(part, out);
  }

  /// Rules that can reach themselves; the others may be written where they are named, so that one automaton sees through them.
  void find_recursive() {
    const size_t n = rules_.size();
    std::vector<std::vector<size_t>> next(n);
    for (size_t i = 0; i < n; ++i) {
      std::vector<std::string_view> names;
      names_in(rules_[i].second, names);
      for (const std::string_view name : names)
        if (const auto found = numbers_.find(name); found != numbers_.end()) next[i].push_back(found->second);
    }
    recursive_.assign(n, false);
    // A rule is recursive, or leads to one, when it stays after all whose names are settled were taken away.
    std::vector<size_t> open(n), ready;
    std::vector<std::vector<size_t>> users(n);
    for (size_t i = 0; i < n; ++i) {
      open[i] = next[i].size();
      for (const size_t j : next[i]) users[j].push_back(i);
      if (open[i] == 0) ready.push_back(i);
    }
    std::vector<bool> settled(n);
    while (!ready.empty()) {
      const size_t i = ready.back();
      ready.pop_back();
      settled[i] = true;
      for (const size_t user : users[i])
        if (--open[user] == 0) ready.push_back(user);
    }
    for (size_t i = 0; i < n; ++i) recursive_[i] = !settled[i];
  }

  Result<NodeId> body_of(size_t rule, size_t& size) {
    if (inlined_[rule] < 0) {
      size_t own = 0;
      ASSIGN_OR_RETURN(inlined_[rule], node_of(rules_[rule].second, own));
      sizes_[rule] = own;
    }
    size += sizes_[rule];
    return inlined_[rule];
  }

  Result<NodeId> node_of(const Item& item, size_t& size) {
    Grammar& grammar = out_.grammar;
    ++size;
    switch (item.kind) {
      case Item::Kind::kText: size += item.text.size(); return grammar.literal(item.text);
      case Item::Kind::kCharacters: return grammar.code_point(item.set);
      case Item::Kind::kName: {
        const auto found = numbers_.find(item.text);
        if (found == numbers_.end()) return invalid_argument("the grammar has no rule \"{}\"", item.text);
        if (!recursive_[found->second] && (inlined_[found->second] >= 0 || inline_depth_ < kMaxDepth)) {
          size_t own = 0;
          ++inline_depth_;
          ASSIGN_OR_RETURN(const NodeId body, body_of(found->second, own));
          --inline_depth_;
          if (own <= kMaxInlinedNodes) {
            size += own;
            return body;
          }
        }
        return grammar.rule(static_cast<RuleId>(found->second));
      }
      case Item::Kind::kRepeat: {
        size_t own = 0;
        ASSIGN_OR_RETURN(const NodeId body, node_of(item.parts.front(), own));
        size += own * static_cast<size_t>(std::clamp(item.max == Grammar::kUnbounded ? item.min + 1 : item.max, 1, 16));
        return grammar.repeat(body, item.min, item.max);
      }
      case Item::Kind::kSequence:
      case Item::Kind::kAlternatives: {
        std::vector<NodeId> parts;
        for (const Item& part : item.parts) {
          ASSIGN_OR_RETURN(const NodeId node, node_of(part, size));
          parts.push_back(node);
        }
        return item.kind == Item::Kind::kSequence ? grammar.sequence(std::move(parts)) : grammar.choice(std::move(parts));
      }
    }
    CHECK_UNREACHABLE();
  }

  std::string_view text_;
  size_t at_ = 0;
  std::vector<std::pair<std::string, Item>> rules_;
  std::map<std::string, size_t, std::less<>> numbers_;
  ParsedGrammar out_;
  std::vector<bool> recursive_;
  std::vector<NodeId> inlined_;
  int inline_depth_ = 0;
  std::vector<size_t> sizes_;
};

}  // namespace

Result<ParsedGrammar> parse_gbnf(std::string_view text) { return GbnfParser(text).parse(); }

}  // namespace quern::text
