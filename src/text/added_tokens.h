#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace quern::text {

/// A token that is recognised by its literal text before anything else happens to a text.
struct AddedToken {
  int32_t id;
  std::string content;
  bool special;     // dropped by decode when special tokens are skipped
  bool normalized;  // looked for in the normalized text instead of the text as it came
};

/// Directly after the first character of an added token's literal, this noncharacter says: text, not the token.
inline constexpr std::string_view kEscape = "\uFDD0";

/// `text` without any kEscape.
std::string drop_escapes(std::string_view text);

/// Finds the literals of added tokens: the leftmost, and of those that begin there the longest. Immutable, thread-safe.
class AddedTokenMatcher {
 public:
  struct Match {
    size_t begin, end;
    int32_t id;
  };

  /// Contents are not empty.
  explicit AddedTokenMatcher(std::span<const AddedToken> tokens);

  [[nodiscard]] bool empty() const { return literals_.empty(); }
  /// The first literal at or after `from`, in valid UTF-8. With honour_escapes a literal of one character does not match
  /// before a kEscape either; a longer one never does, since the escape stands within it.
  [[nodiscard]] std::optional<Match> find(std::string_view text, size_t from, bool honour_escapes) const;
  /// `text` with a kEscape in every literal, and in an end of it that a following text could complete to a literal.
  /// Those that `text` brings along are removed first, so that they cannot be forged.
  [[nodiscard]] std::string escape(std::string_view text) const;

 private:
  struct Literal {
    std::string content;
    int32_t id;
  };
  [[nodiscard]] std::span<const Literal> literals_from(char first_byte) const;
  [[nodiscard]] size_t next_candidate(std::string_view text, size_t from) const;

  std::vector<Literal> literals_;           // by first byte, then longest first
  std::array<uint32_t, 257> first_byte_{};  // literals_[first_byte_[b] .. first_byte_[b + 1]) begin with byte b
};

}  // namespace quern::text
