#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "text/finite_automaton.h"
#include "text/tokenizer.h"

namespace quern::text {

/// A tag that a reader of the text looks for: as text, and as the token of that name where there is one.
struct TextMark {
  std::string text;
  std::optional<int32_t> token;
  static TextMark of(const Tokenizer& tokenizer, std::string_view text);
};

/// Free output, any added tokens included, up to and with the first mark of `ends`; without those of `forbidden`.
Dfa text_until(const std::vector<TextMark>& ends, const std::vector<TextMark>& forbidden);
/// Free output without the marks; it may end anywhere.
Dfa text_without(const std::vector<TextMark>& forbidden);
/// UTF-8 text without added tokens, of which "\n" + text has none of these strings in it.
Dfa plain_text_without(const std::vector<std::string>& forbidden);

}  // namespace quern::text
