#pragma once

#include <vector>

#include "server/chunk_writer.h"
#include "server/output_format.h"
#include "server/token_logprobs.h"

namespace quern::server {

/// chat.completion and chat.completion.chunk. Reasoning stands in `reasoning_content` and, for newer clients of vLLM, in `reasoning`.
class ChatFormat final : public OutputFormat {
 public:
  /// prompt_ids: shown when header.token_ids or prompt_logprobs is set.
  ChatFormat(ResponseHeader header, const text::Tokenizer* tokenizer, std::vector<int32_t> prompt_ids);

  void begin(int32_t choice, std::string& out) override;
  void delta(int32_t choice, const OutputDelta& delta, const OutputUsage& usage, std::string& out) override;
  void finish(const OutputUsage& usage, std::string& out) override;
  Json response(std::span<const OutputDelta> choices, const OutputUsage& usage) override;

 private:
  void append_logprobs(const OutputDelta& delta, std::string& out) const;
  [[nodiscard]] Json prompt_logprobs(const OutputDelta& delta) const;

  ResponseHeader header_;
  TokenNames names_;
  ChunkWriter writer_;
  std::vector<int32_t> prompt_ids_;
  bool prompt_pending_ = true;  // its log-probabilities are still to be told
};

}  // namespace quern::server
