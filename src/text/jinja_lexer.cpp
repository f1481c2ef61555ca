#include "text/jinja_lexer.h"

#include <algorithm>
#include <charconv>

#include "text/jinja_strings.h"

namespace quern::text::jinja {
namespace {

constexpr auto npos = std::string_view::npos;

/// Line ends become "\n"; one at the very end is dropped.
std::string normalize_lines(std::string_view source) {
  std::string out;
  out.reserve(source.size());
  for (size_t i = 0; i < source.size(); ++i) {
    if (source[i] != '\r') {
      out += source[i];
    } else {
      out += '\n';
      if (i + 1 < source.size() && source[i + 1] == '\n') ++i;
    }
  }
  if (!out.empty() && out.back() == '\n') out.pop_back();
  return out;
}

bool is_name_start(char c) { return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '_' || (c & 0x80); }
bool is_decimal(char c) { return c >= '0' && c <= '9'; }

class Lexer {
 public:
  explicit Lexer(std::string_view source) : source_(normalize_lines(source)), rest_(source_) {}

  Result<std::vector<Token>> run() {
    while (!rest_.empty()) {
      const size_t tag = find_tag();
      std::string_view text = rest_.substr(0, tag);
      if (tag == npos) {
        emit(TokenKind::kText, std::string(text));
        advance(text.size());
        break;
      }
      const char kind = rest_[tag + 1];
      const char sign = sign_at(tag + 2);
      text = before_tag(text, sign, kind != '{');
      if (!text.empty()) emit(TokenKind::kText, std::string(text));
      advance(tag + 2 + (sign != 0));
      if (kind == '#') {
        RETURN_IF_ERROR(skip_comment());
      } else if (kind == '%' && skip_raw_begin()) {
        RETURN_IF_ERROR(read_raw());
      } else {
        RETURN_IF_ERROR(read_tag(kind == '%'));
      }
    }
    emit(TokenKind::kEnd, "");
    return std::move(tokens_);
  }

 private:
  [[nodiscard]] Error error(std::string_view message) const { return invalid_argument("line {}: {}", line_, message); }

  void emit(TokenKind kind, std::string text) { tokens_.push_back(Token{kind, line_, std::move(text)}); }

  void advance(size_t bytes) {
    line_ += static_cast<int>(std::count(rest_.begin(), rest_.begin() + static_cast<std::ptrdiff_t>(bytes), '\n'));
    rest_.remove_prefix(bytes);
  }
  void skip_space() { advance(rest_.size() - strip_left(rest_).size()); }

  [[nodiscard]] size_t find_tag() const {
    for (size_t at = rest_.find('{'); at != npos && at + 1 < rest_.size(); at = rest_.find('{', at + 1)) {
      if (const char c = rest_[at + 1]; c == '{' || c == '%' || c == '#') return at;
    }
    return npos;
  }
  [[nodiscard]] char sign_at(size_t at) const { return at < rest_.size() && (rest_[at] == '-' || rest_[at] == '+') ? rest_[at] : char{0}; }

  /// The text in front of a tag with the white space removed that the tag's sign, or lstrip_blocks, takes away.
  [[nodiscard]] std::string_view before_tag(std::string_view text, char sign, bool lstrip) const {
    if (sign == '-') return strip_right(text);
    if (sign == '+' || !lstrip) return text;
    const size_t newline = text.rfind('\n');
    const size_t line_begin = newline == npos ? 0 : newline + 1;
    if ((line_begin > 0 || at_line_start_) && strip_left(text.substr(line_begin)).empty()) return text.substr(0, line_begin);
    return text;
  }

  /// Behind the end of a tag: "-" takes all white space, otherwise trim_blocks takes one newline.
  void after_tag(char sign, bool trim_newline) {
    const size_t before = rest_.size();
    std::string_view taken = rest_;
    if (sign == '-')
      skip_space();
    else if (sign != '+' && trim_newline && !rest_.empty() && rest_[0] == '\n')
      advance(1);
    taken = taken.substr(0, before - rest_.size());
    at_line_start_ = !taken.empty() && taken.back() == '\n';
  }

  Result<void> skip_comment() {
    const size_t end = rest_.find("#}");
    if (end == npos) return error("Missing end of comment tag");
    char sign = end > 0 ? rest_[end - 1] : char{0};
    if (sign != '-' && sign != '+') sign = 0;
    advance(end + 2);
    after_tag(sign, true);
    return {};
  }

  /// Behind "{%": true, and the tag is consumed, when it is a raw tag.
  bool skip_raw_begin() {
    std::string_view s = strip_left(rest_);
    if (!s.starts_with("raw")) return false;
    s = strip_left(s.substr(3));
    const char sign = s.starts_with('-') ? '-' : char{0};
    if (sign) s.remove_prefix(1);
    if (!s.starts_with("%}")) return false;
    advance(rest_.size() - s.size() + 2);
    after_tag(sign, false);
    return true;
  }

  Result<void> read_raw() {
    for (size_t tag = rest_.find("{%"); tag != npos; tag = rest_.find("{%", tag + 1)) {
      const char sign = sign_at(tag + 2);
      std::string_view s = strip_left(rest_.substr(tag + 2 + (sign != 0)));
      if (!s.starts_with("endraw")) continue;
      s = strip_left(s.substr(6));
      const char end_sign = s.starts_with('-') || s.starts_with('+') ? s[0] : char{0};
      if (end_sign) s.remove_prefix(1);
      if (!s.starts_with("%}")) continue;
      if (const auto text = before_tag(rest_.substr(0, tag), sign, true); !text.empty()) emit(TokenKind::kText, std::string(text));
      advance(rest_.size() - s.size() + 2);
      after_tag(end_sign, true);
      return {};
    }
    return error("Missing end of raw directive");
  }

  Result<void> read_tag(bool block) {
    emit(block ? TokenKind::kBlockBegin : TokenKind::kPrintBegin, "");
    const std::string_view end = block ? "%}" : "}}";
    std::string open_brackets;
    while (true) {
      skip_space();
      if (rest_.empty()) return error(fmt::format("unexpected end of template, expected '{}'", end));
      if (open_brackets.empty()) {
        const char sign = rest_[0] == '-' || (block && rest_[0] == '+') ? rest_[0] : char{0};
        if (rest_.substr(sign != 0).starts_with(end)) {
          emit(block ? TokenKind::kBlockEnd : TokenKind::kPrintEnd, "");
          advance(2 + (sign != 0));
          after_tag(sign, block);
          return {};
        }
      }
      const char c = rest_[0];
      if (is_name_start(c))
        read_name();
      else if (is_decimal(c))
        RETURN_IF_ERROR(read_number());
      else if (c == '"' || c == '\'')
        RETURN_IF_ERROR(read_string(c));
      else
        RETURN_IF_ERROR(read_operator(open_brackets));
    }
  }

  void read_name() {
    size_t size = 1;
    while (size < rest_.size() && (is_name_start(rest_[size]) || is_decimal(rest_[size]))) ++size;
    emit(TokenKind::kName, std::string(rest_.substr(0, size)));
    advance(size);
  }

  Result<void> read_number() {
    const auto digits = [&](size_t at, auto&& is_part) {  // end of digits that may have single underscores between them
      while (at < rest_.size() && (is_part(rest_[at]) || (rest_[at] == '_' && at + 1 < rest_.size() && is_part(rest_[at + 1])))) ++at;
      return at;
    };
    int base = 10;
    size_t begin = 0, end;
    if (rest_.size() > 2 && rest_[0] == '0' && std::string_view("xXoObB").find(rest_[1]) != npos) {
      const char marker = static_cast<char>(rest_[1] | 0x20);
      base = marker == 'x' ? 16 : marker == 'o' ? 8 : 2;
      begin = 2;
      end = digits(2, [&](char c) {
        const int value = is_decimal(c) ? c - '0' : (c | 0x20) >= 'a' && (c | 0x20) <= 'f' ? (c | 0x20) - 'a' + 10 : 99;
        return value < base;
      });
    } else {
      end = digits(0, is_decimal);
    }
    bool is_float = false;
    const bool after_dot = !tokens_.empty() && tokens_.back().kind == TokenKind::kOperator && tokens_.back().text == ".";
    if (base == 10 && !after_dot) {
      if (end + 1 < rest_.size() && rest_[end] == '.' && is_decimal(rest_[end + 1])) {
        is_float = true;
        end = digits(end + 1, is_decimal);
      }
      if (end < rest_.size() && (rest_[end] | 0x20) == 'e') {
        const size_t exponent = end + 1 + (end + 1 < rest_.size() && (rest_[end + 1] == '+' || rest_[end + 1] == '-'));
        if (exponent < rest_.size() && is_decimal(rest_[exponent])) {
          is_float = true;
          end = digits(exponent, is_decimal);
        }
      }
    }
    std::string text(rest_.substr(begin, end - begin));
    std::erase(text, '_');
    Token token{is_float ? TokenKind::kFloat : TokenKind::kInteger, line_, text};
    const char* const last = text.data() + text.size();
    const auto parsed =
        is_float ? std::from_chars(text.data(), last, token.number) : std::from_chars(text.data(), last, token.integer, base);
    if (parsed.ec != std::errc() || parsed.ptr != last) return error(fmt::format("the number {} is out of range", rest_.substr(0, end)));
    tokens_.push_back(std::move(token));
    advance(end);
    return {};
  }

  Result<void> read_string(char quote) {
    const int line = line_;
    std::string out;
    size_t at = 1;
    const auto hex = [&](size_t count) -> Result<char32_t> {
      uint32_t value = 0;
      const std::string_view part = rest_.substr(std::min(at, rest_.size()), count);
      const auto parsed = std::from_chars(part.data(), part.data() + part.size(), value, 16);
      if (part.size() != count || parsed.ptr != part.data() + count) return error("truncated escape in a string");
      if (value > 0x10FFFF || (value >= 0xD800 && value < 0xE000)) return error("a string escape is not a character");
      at += count;
      return static_cast<char32_t>(value);
    };
    while (at < rest_.size() && rest_[at] != quote) {
      if (rest_[at] != '\\') {
        out += rest_[at++];
        continue;
      }
      if (++at == rest_.size()) break;
      const char c = rest_[at++];
      switch (c) {
        case '\n': break;
        case '\\':
        case '\'':
        case '"': out += c; break;
        case 'a': out += '\a'; break;
        case 'b': out += '\b'; break;
        case 'f': out += '\f'; break;
        case 'n': out += '\n'; break;
        case 'r': out += '\r'; break;
        case 't': out += '\t'; break;
        case 'v': out += '\v'; break;
        case 'x':
        case 'u':
        case 'U': {
          ASSIGN_OR_RETURN(const char32_t code_point, hex(c == 'x' ? 2 : c == 'u' ? 4 : 8));
          append_code_point(out, code_point);
          break;
        }
        case '0':
        case '1':
        case '2':
        case '3':
        case '4':
        case '5':
        case '6':
        case '7': {
          char32_t value = static_cast<char32_t>(c - '0');
          for (int i = 0; i < 2 && at < rest_.size() && rest_[at] >= '0' && rest_[at] <= '7'; ++i) {
            value = value * 8 + static_cast<char32_t>(rest_[at++] - '0');
          }
          append_code_point(out, value);
          break;
        }
        case 'N': return error("\\N{...} escapes are not supported");
        default: out += '\\', out += c;
      }
    }
    if (at >= rest_.size()) return error("a string has no end");
    tokens_.push_back(Token{TokenKind::kString, line, std::move(out)});
    advance(at + 1);
    return {};
  }

  Result<void> read_operator(std::string& open_brackets) {
    static constexpr std::string_view kTwo[] = {"**", "//", "==", "!=", ">=", "<="};
    for (const std::string_view op : kTwo) {
      if (rest_.starts_with(op)) {
        emit(TokenKind::kOperator, std::string(op));
        advance(2);
        return {};
      }
    }
    const char c = rest_[0];
    if (std::string_view("+-*/%~[](){}<>=.:|,").find(c) == npos) return error(fmt::format("unexpected character {:?}", c));
    if (c == '(' || c == '[' || c == '{') open_brackets += c;
    if (c == ')' || c == ']' || c == '}') {
      const char open = c == ')' ? '(' : c == ']' ? '[' : '{';
      if (open_brackets.empty() || open_brackets.back() != open) return error(fmt::format("unexpected '{}'", c));
      open_brackets.pop_back();
    }
    emit(TokenKind::kOperator, std::string(1, c));
    advance(1);
    return {};
  }

  const std::string source_;
  std::string_view rest_;
  int line_ = 1;
  bool at_line_start_ = true;
  std::vector<Token> tokens_;
};

}  // namespace

Result<std::vector<Token>> tokenize(std::string_view source) {
  if (!is_valid_utf8(source)) return invalid_argument("the template is not valid UTF-8");
  return Lexer(source).run();
}

}  // namespace quern::text::jinja
