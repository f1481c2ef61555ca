#include "text/utf8.h"

#include <cstdint>
#include <cstring>

namespace quern::text {
namespace {

enum class State { kValid, kInvalid, kIncomplete };

struct Sequence {
  State state;
  size_t length;  // of the whole sequence, of the maximal invalid part, or of what there is of it
};

/// The sequence at the beginning of `bytes`, which is not empty (Unicode 16.0, table 3-7).
Sequence first_sequence(std::string_view bytes) {
  const auto byte = [&](size_t i) { return static_cast<uint8_t>(bytes[i]); };
  const uint8_t lead = byte(0);
  if (lead < 0x80) return {State::kValid, 1};
  if (lead < 0xC2 || lead > 0xF4) return {State::kInvalid, 1};
  const size_t length = lead < 0xE0 ? 2 : lead < 0xF0 ? 3 : 4;
  // The second byte's range keeps out overlong forms, surrogates and what lies beyond U+10FFFF.
  uint8_t low = 0x80, high = 0xBF;
  if (lead == 0xE0) low = 0xA0;
  if (lead == 0xED) high = 0x9F;
  if (lead == 0xF0) low = 0x90;
  if (lead == 0xF4) high = 0x8F;
  for (size_t i = 1; i < length; ++i) {
    if (i == bytes.size()) return {State::kIncomplete, i};
    if (byte(i) < low || byte(i) > high) return {State::kInvalid, i};
    low = 0x80;
    high = 0xBF;
  }
  return {State::kValid, length};
}

size_t ascii_prefix(std::string_view bytes) {
  size_t at = 0;
  for (uint64_t eight; at + sizeof(eight) <= bytes.size(); at += sizeof(eight)) {
    std::memcpy(&eight, bytes.data() + at, sizeof(eight));
    if (eight & 0x8080808080808080ull) break;
  }
  while (at < bytes.size() && static_cast<uint8_t>(bytes[at]) < 0x80) ++at;
  return at;
}

/// Length of the longest prefix that is valid UTF-8.
size_t valid_prefix(std::string_view bytes) {
  size_t at = 0;
  while (true) {
    at += ascii_prefix(bytes.substr(at));
    if (at == bytes.size()) return at;
    const Sequence next = first_sequence(bytes.substr(at));
    if (next.state != State::kValid) return at;
    at += next.length;
  }
}

}  // namespace

size_t append_as_utf8(std::string_view bytes, std::string& out) {
  while (true) {
    const size_t valid = valid_prefix(bytes);
    out.append(bytes.substr(0, valid));
    bytes.remove_prefix(valid);
    if (bytes.empty()) return 0;
    const Sequence broken = first_sequence(bytes);
    if (broken.state == State::kIncomplete) return bytes.size();
    out.append(kReplacementCharacter);
    bytes.remove_prefix(broken.length);
  }
}

bool is_valid_utf8(std::string_view bytes) { return valid_prefix(bytes) == bytes.size(); }

std::string to_valid_utf8(std::string_view bytes) {
  std::string out;
  out.reserve(bytes.size());
  if (append_as_utf8(bytes, out) != 0) out.append(kReplacementCharacter);
  return out;
}

}  // namespace quern::text
