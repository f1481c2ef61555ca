#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "base/result.h"
#include "text/added_tokens.h"
#include "text/bpe.h"
#include "text/pretokenizer.h"

namespace quern::text {

/// What a tokenizer.json says, as far as byte-level BPE needs it.
struct TokenizerSpec {
  struct Token {
    int32_t id;
    std::string bytes;
  };
  std::vector<Token> vocab;
  std::vector<Merge> merges;  // by rank
  std::vector<AddedToken> added_tokens;
  SplitPattern pattern = SplitPattern::kNone;
  bool nfc = false;
  bool ignore_merges = false;  // a piece that is a token as a whole is that token, whatever the merges say
};

/// Reads a tokenizer.json. Errors name what was found and what is supported instead: only models, normalizers,
/// pre-tokenizers and decoders that this program computes exactly are taken.
Result<TokenizerSpec> parse_tokenizer_json(std::string_view text);

/// Adds those tokens of a tokenizer_config.json's added_tokens_decoder that `spec` lacks. Errors: the same id with another text.
Result<void> add_tokens_of_config(std::string_view tokenizer_config, TokenizerSpec& spec);

}  // namespace quern::text
