#include "app/text_tokens.h"

#include "text/tokenizer.h"

namespace quern::app {

Result<std::vector<int32_t>> tokens_of_text(const std::filesystem::path& model_dir, std::string_view text) {
  ASSIGN_OR_RETURN(const text::Tokenizer tokenizer, text::Tokenizer::load(model_dir));
  return tokenizer.encode(text, /*parse_special=*/false);
}

}  // namespace quern::app
