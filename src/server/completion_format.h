#pragma once

#include <vector>

#include "server/chunk_writer.h"
#include "server/output_format.h"
#include "server/token_logprobs.h"

namespace quern::server {

/// text_completion, whole and in chunks.
class CompletionFormat final : public OutputFormat {
 public:
  /// Choice i belongs to prompts[i / choices_per_prompt]. echo: the prompt's text, and its log-probabilities, stand before the output.
  CompletionFormat(ResponseHeader header, const text::Tokenizer* tokenizer, std::vector<EchoedPrompt> prompts, int32_t choices_per_prompt,
                   bool echo);

  void begin(int32_t choice, std::string& out) override;
  void delta(int32_t choice, const OutputDelta& delta, const OutputUsage& usage, std::string& out) override;
  void finish(const OutputUsage& usage, std::string& out) override;
  Json response(std::span<const OutputDelta> choices, const OutputUsage& usage) override;

 private:
  struct Choice {
    CompletionLogprobs logprobs;
    bool begun = false;
  };
  [[nodiscard]] const EchoedPrompt& prompt_of(size_t choice) const { return prompts_[choice / static_cast<size_t>(choices_per_prompt_)]; }
  Choice& choice_at(size_t choice);
  [[nodiscard]] Json prompt_logprobs(size_t choice, const OutputDelta& delta) const;
  /// The log-probabilities of this delta, before them those of an echoed prompt when `with_prompt`.
  Json take_logprobs(size_t choice, const OutputDelta& delta, bool with_prompt);

  ResponseHeader header_;
  TokenNames names_;
  ChunkWriter writer_;
  std::vector<EchoedPrompt> prompts_;
  int32_t choices_per_prompt_;
  bool echo_;
  std::vector<Choice> choices_;
};

}  // namespace quern::server
