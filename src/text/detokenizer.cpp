#include "text/detokenizer.h"

#include "text/utf8.h"

namespace quern::text {

std::string StreamingDetokenizer::push(int32_t id) {
  std::string text;
  if (skip_special_tokens_ && tokenizer_.is_special(id)) return text;
  held_.append(tokenizer_.token_bytes(id));
  const size_t incomplete = append_as_utf8(held_, text);
  held_.erase(0, held_.size() - incomplete);
  return text;
}

std::string StreamingDetokenizer::finish() {
  std::string text;
  if (!held_.empty()) text = kReplacementCharacter;
  held_.clear();
  return text;
}

}  // namespace quern::text
