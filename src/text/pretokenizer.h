#pragma once

#include <cstddef>
#include <optional>
#include <string_view>

namespace quern::text {

/// The regular expressions that cut text into pieces, within which BPE merges. A scanner by hand stands for each.
enum class SplitPattern {
  kNone,     // no pattern: a stretch of text is one piece
  kQwen2,    // Qwen2, Qwen2.5, Qwen3: marks (\p{M}) count as punctuation
  kQwen3_5,  // Qwen3.5 and later: marks belong to words
};

/// The pattern with this source text, as written in tokenizer.json; nothing for any other.
std::optional<SplitPattern> find_split_pattern(std::string_view regex);
/// The source text; empty for kNone.
std::string_view regex_of(SplitPattern pattern);

/// Length in bytes of the piece at the beginning of `text`: what is left of a stretch, not empty, valid UTF-8.
size_t next_piece(SplitPattern pattern, std::string_view text);

}  // namespace quern::text
