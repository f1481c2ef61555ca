#pragma once

#include <cstdint>
#include <filesystem>

#include "base/json.h"
#include "base/result.h"

namespace quern::tools {

/// Ids of the tokenizer that goes with made-up weights: 256 byte tokens, then Qwen3.6's added tokens in their order.
struct TokenIds {
  static constexpr int64_t kEndOfText = 256, kEndOfTurn = 258, kVisionStart = 265, kVisionEnd = 266, kImagePad = 268, kVideoPad = 269;
  static constexpr int64_t kCount = 289;
};

/// tokenizer.json, tokenizer_config.json, chat_template.jinja and generation_config.json. `vocab_size` is at least TokenIds::kCount; ids
/// above stay unused, as in the real vocabulary.
Result<void> write_text_files(const std::filesystem::path& folder, int64_t vocab_size);

/// Points a config's token ids at this tokenizer.
void set_token_ids(Json& config);

}  // namespace quern::tools
