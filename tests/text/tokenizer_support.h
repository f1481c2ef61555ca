#pragma once

#include <string>
#include <string_view>

#include "base/file.h"
#include "base/json.h"
#include "support/standin_tokenizer.h"
#include "text/tokenizer.h"

namespace quern::text::testing {

/// The stand-in's tokenizer, with the pattern of Qwen3 as it comes or that of Qwen3.5 put in its place. Loaded once a process.
inline const Tokenizer& standin(SplitPattern pattern = SplitPattern::kQwen2) {
  const auto load = [](SplitPattern wanted) {
    std::string text = read_file(quern::testing::standin_tokenizer_dir() / "tokenizer.json").value();
    const auto quoted = [](SplitPattern p) { return dump_json(Json(std::string(regex_of(p)))); };
    const size_t at = text.find(quoted(SplitPattern::kQwen2));
    CHECK(at != std::string::npos);
    text.replace(at, quoted(SplitPattern::kQwen2).size(), quoted(wanted));
    return Tokenizer::from_json(text).value();
  };
  static const Tokenizer qwen3 = load(SplitPattern::kQwen2);
  if (pattern == SplitPattern::kQwen2) return qwen3;
  static const Tokenizer qwen3_5 = load(SplitPattern::kQwen3_5);
  return qwen3_5;
}

/// A tokenizer.json with the 256 bytes as tokens 0 to 255 in the order of the byte alphabet (printable ones first), the merges
/// h+e -> 256 and he+y -> 257, and <|a|> (special, 300), <b> (301), <|a|>b (302).
inline Json tiny_tokenizer_json() {
  Json vocab = Json::object();
  const auto utf8 = [](int c) {
    return c < 0x80 ? std::string(1, static_cast<char>(c))
                    : std::string{static_cast<char>(0xC0 | c >> 6), static_cast<char>(0x80 | (c & 0x3F))};
  };
  int next = 0, beyond = 0x100;
  for (const bool printable : {true, false}) {
    for (int byte = 0; byte < 256; ++byte) {
      const bool shown = (byte > 0x20 && byte < 0x7F) || (byte > 0xA0 && byte != 0xAD);
      if (shown == printable) vocab[utf8(shown ? byte : beyond++)] = next++;
    }
  }
  vocab["he"] = 256;
  vocab["hey"] = 257;
  const auto added = [](int id, std::string_view content, bool special) {
    return Json{{"id", id},        {"content", content},  {"single_word", false}, {"lstrip", false},
                {"rstrip", false}, {"normalized", false}, {"special", special}};
  };
  const Json byte_level{{"type", "ByteLevel"}, {"add_prefix_space", false}, {"trim_offsets", false}, {"use_regex", false}};
  const Json split{
      {"type", "Split"}, {"pattern", {{"Regex", regex_of(SplitPattern::kQwen3_5)}}}, {"behavior", "Isolated"}, {"invert", false}};
  return Json{
      {"added_tokens", Json::array({added(300, "<|a|>", true), added(301, "<b>", false), added(302, "<|a|>b", false)})},
      {"normalizer", {{"type", "NFC"}}},
      {"pre_tokenizer", {{"type", "Sequence"}, {"pretokenizers", Json::array({split, byte_level})}}},
      {"post_processor", byte_level},
      {"decoder", byte_level},
      {"model", {{"type", "BPE"}, {"vocab", vocab}, {"merges", Json::array({"h e", Json::array({"he", "y"})})}}},
  };
}

}  // namespace quern::text::testing
