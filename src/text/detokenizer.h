#pragma once

#include <cstdint>
#include <string>

#include "text/tokenizer.h"

namespace quern::text {

/// Turns tokens into text while they arrive. All that push() and finish() return, one after the other, is what
/// Tokenizer::decode() makes of all tokens together, wherever the stream is cut. One owner, one thread.
class StreamingDetokenizer {
 public:
  /// Borrows the tokenizer, which has to outlive it.
  StreamingDetokenizer(const Tokenizer& tokenizer, bool skip_special_tokens)
      : tokenizer_(tokenizer), skip_special_tokens_(skip_special_tokens) {}

  /// The text that `id` completes. A character whose last bytes are still to come is held back.
  std::string push(int32_t id);
  /// U+FFFD for a character that nothing completes any more, once; else nothing.
  std::string finish();

 private:
  const Tokenizer& tokenizer_;
  bool skip_special_tokens_;
  std::string held_;  // the beginning of a character, at most 3 bytes
};

}  // namespace quern::text
