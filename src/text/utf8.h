#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace quern::text {

struct CodePoint {
  char32_t value;
  size_t length;  // bytes in UTF-8
};

/// The code point that begins at text[at], in UTF-8 known to be valid.
inline CodePoint code_point_at(std::string_view text, size_t at) {
  const auto byte = [&](size_t i) { return static_cast<char32_t>(static_cast<unsigned char>(text[at + i])); };
  const char32_t lead = byte(0);
  if (lead < 0x80) return {lead, 1};
  if (lead < 0xE0) return {(lead & 0x1F) << 6 | (byte(1) & 0x3F), 2};
  if (lead < 0xF0) return {(lead & 0x0F) << 12 | (byte(1) & 0x3F) << 6 | (byte(2) & 0x3F), 3};
  return {(lead & 0x07) << 18 | (byte(1) & 0x3F) << 12 | (byte(2) & 0x3F) << 6 | (byte(3) & 0x3F), 4};
}

/// U+FFFD, which stands for each maximal part of bytes that is not UTF-8 (Unicode 16.0, section 3.9; Python's errors="replace").
inline constexpr std::string_view kReplacementCharacter = "\xEF\xBF\xBD";

/// Appends `bytes` to `out` as valid UTF-8. A sequence that begins at the end of `bytes` and could still be completed stays
/// out; its length (0 to 3) is returned.
size_t append_as_utf8(std::string_view bytes, std::string& out);

bool is_valid_utf8(std::string_view bytes);
/// `bytes` with everything that is not UTF-8 replaced, an incomplete end included.
std::string to_valid_utf8(std::string_view bytes);

}  // namespace quern::text
