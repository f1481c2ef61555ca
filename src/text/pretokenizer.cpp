#include "text/pretokenizer.h"

#include "base/check.h"
#include "text/unicode_category.h"
#include "text/utf8.h"

namespace quern::text {
namespace {

constexpr std::string_view kQwen2Regex =
    R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)";
constexpr std::string_view kQwen3_5Regex =
    R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)";

struct Char {
  Category category;
  size_t length;
};

Char char_at(std::string_view text, size_t at) {
  const CodePoint c = code_point_at(text, at);
  return {category_of(c.value), c.length};
}

bool is_line_break(char c) { return c == '\r' || c == '\n'; }

/// (?i:'s|'t|'re|'ve|'m|'ll|'d) where text[0] is the apostrophe; 0 where it does not match. By Unicode's folding of case,
/// the long s (U+017F) is an s; no other character outside ASCII folds to one of these letters.
size_t contraction(std::string_view text) {
  const auto lower = [&](size_t i) { return i < text.size() ? static_cast<char>(text[i] | 0x20) : '\0'; };
  switch (lower(1)) {
    case 's':
    case 't':
    case 'm':
    case 'd': return 2;
    case 'r':
    case 'v': return lower(2) == 'e' ? 3 : 0;
    case 'l': return lower(2) == 'l' ? 3 : 0;
    default: return text.substr(1, 2) == "\u017F" ? 3 : 0;
  }
}

/// The alternatives of the regular expression, in their order. Every code point is a word character, a number, a space or
/// punctuation, and each of these classes ends in an alternative that takes at least one, so there are no gaps.
template <bool kMarksJoinWords>
size_t next_qwen_piece(std::string_view text) {
  const auto is_word = [](Char c) { return c.category == Category::kLetter || (kMarksJoinWords && c.category == Category::kMark); };
  const auto is_punctuation = [](Char c) { return c.category == Category::kOther || (!kMarksJoinWords && c.category == Category::kMark); };
  const auto skip_word = [&](size_t at) {
    while (at < text.size()) {
      const Char c = char_at(text, at);
      if (!is_word(c)) break;
      at += c.length;
    }
    return at;
  };

  if (text[0] == '\'') {
    if (const size_t length = contraction(text)) return length;
  }
  const Char first = char_at(text, 0);

  // [^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+   A mark that leads is the optional character or the first of the word: the same piece.
  if (is_word(first)) return skip_word(first.length);
  // \p{N}
  if (first.category == Category::kNumber) return first.length;
  if (!is_line_break(text[0]) && first.length < text.size()) {
    const Char second = char_at(text, first.length);
    if (is_word(second)) return skip_word(first.length + second.length);
  }

  // ` ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*`
  size_t at = text[0] == ' ' ? 1 : 0;
  const size_t begin = at;
  while (at < text.size()) {
    const Char c = char_at(text, at);
    if (!is_punctuation(c)) break;
    at += c.length;
  }
  if (at > begin) {
    while (at < text.size() && is_line_break(text[at])) ++at;
    return at;
  }

  // \s*[\r\n]+ takes a run of spaces up to its last line break; \s+(?!\S) the run at the end of the stretch, or all but the
  // last of one that something follows; \s+ what is left.
  size_t last_begin = 0, line_break_end = 0;
  at = 0;
  while (at < text.size()) {
    const Char c = char_at(text, at);
    if (c.category != Category::kSpace) break;
    last_begin = at;
    at += c.length;
    if (is_line_break(text[last_begin])) line_break_end = at;
  }
  if (line_break_end > 0) return line_break_end;
  return at < text.size() && last_begin > 0 ? last_begin : at;
}

}  // namespace

std::optional<SplitPattern> find_split_pattern(std::string_view regex) {
  for (const SplitPattern pattern : {SplitPattern::kQwen2, SplitPattern::kQwen3_5}) {
    if (regex == regex_of(pattern)) return pattern;
  }
  return std::nullopt;
}

std::string_view regex_of(SplitPattern pattern) {
  switch (pattern) {
    case SplitPattern::kNone: return {};
    case SplitPattern::kQwen2: return kQwen2Regex;
    case SplitPattern::kQwen3_5: return kQwen3_5Regex;
  }
  CHECK_UNREACHABLE();
}

size_t next_piece(SplitPattern pattern, std::string_view text) {
  switch (pattern) {
    case SplitPattern::kNone: return text.size();
    case SplitPattern::kQwen2: return next_qwen_piece<false>(text);
    case SplitPattern::kQwen3_5: return next_qwen_piece<true>(text);
  }
  CHECK_UNREACHABLE();
}

}  // namespace quern::text
