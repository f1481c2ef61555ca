#include "text/added_tokens.h"

#include <algorithm>

#include "text/utf8.h"

namespace quern::text {

std::string drop_escapes(std::string_view text) {
  std::string out;
  out.reserve(text.size());
  while (true) {
    const size_t at = text.find(kEscape);
    out.append(text.substr(0, at));
    if (at == std::string_view::npos) return out;
    text.remove_prefix(at + kEscape.size());
  }
}

AddedTokenMatcher::AddedTokenMatcher(std::span<const AddedToken> tokens) {
  for (const AddedToken& token : tokens) literals_.push_back({token.content, token.id});
  const auto first = [](const Literal& literal) { return static_cast<uint8_t>(literal.content[0]); };
  std::stable_sort(literals_.begin(), literals_.end(), [&](const Literal& a, const Literal& b) {
    return first(a) != first(b) ? first(a) < first(b) : a.content.size() > b.content.size();
  });
  for (const Literal& literal : literals_) ++first_byte_[first(literal) + 1];
  for (size_t b = 0; b < 256; ++b) first_byte_[b + 1] += first_byte_[b];
}

std::span<const AddedTokenMatcher::Literal> AddedTokenMatcher::literals_from(char first_byte) const {
  const auto b = static_cast<uint8_t>(first_byte);
  return std::span(literals_).subspan(first_byte_[b], first_byte_[b + 1] - first_byte_[b]);
}

/// Where the next byte stands that some literal begins with.
size_t AddedTokenMatcher::next_candidate(std::string_view text, size_t from) const {
  while (from < text.size() && literals_from(text[from]).empty()) ++from;
  return from;
}

std::optional<AddedTokenMatcher::Match> AddedTokenMatcher::find(std::string_view text, size_t from, bool honour_escapes) const {
  if (empty()) return std::nullopt;
  for (size_t at = next_candidate(text, from); at < text.size(); at = next_candidate(text, at + 1)) {
    const std::string_view rest = text.substr(at);
    if (honour_escapes && rest.substr(code_point_at(rest, 0).length).starts_with(kEscape)) continue;
    for (const Literal& literal : literals_from(rest[0])) {
      if (rest.starts_with(literal.content)) return Match{at, at + literal.content.size(), literal.id};
    }
  }
  return std::nullopt;
}

std::string AddedTokenMatcher::escape(std::string_view text) const {
  const std::string clean = drop_escapes(text);
  std::string out;
  out.reserve(clean.size());
  size_t copied = 0;
  for (size_t at = next_candidate(clean, 0); at < clean.size(); at = next_candidate(clean, at + 1)) {
    const std::string_view rest = std::string_view(clean).substr(at);
    const auto could_match = [&](const Literal& literal) {
      return rest.starts_with(literal.content) || std::string_view(literal.content).starts_with(rest);
    };
    const auto literals = literals_from(rest[0]);
    if (std::none_of(literals.begin(), literals.end(), could_match)) continue;
    const size_t after = at + code_point_at(rest, 0).length;
    out.append(clean, copied, after - copied).append(kEscape);
    copied = after;
  }
  return out.append(clean, copied);
}

}  // namespace quern::text
