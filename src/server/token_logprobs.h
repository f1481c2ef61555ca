#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "base/json.h"
#include "engine/request.h"
#include "text/tokenizer.h"

namespace quern::server {

/// How a token is named in log-probabilities.
class TokenNames {
 public:
  /// tokenizer: null for a model without one; tokens are then named "token_id:N", as they are with `as_ids`.
  TokenNames(const text::Tokenizer* tokenizer, bool as_ids) : tokenizer_(tokenizer), as_ids_(as_ids || tokenizer == nullptr) {}
  /// UTF-8; a token whose bytes are not has U+FFFD there.
  [[nodiscard]] std::string name(int32_t id) const;
  /// The token's bytes; those of the name when tokens are named by id.
  [[nodiscard]] std::string bytes(int32_t id) const;

 private:
  const text::Tokenizer* tokenizer_;
  bool as_ids_;
};

/// Log-probabilities below this, -inf and NaN are given as this: JSON has no infinity.
inline constexpr double kLogprobFloor = -9999.0;

/// {"content": [{"token", "logprob", "bytes", "top_logprobs": [...]}], "refusal": null}
Json chat_logprobs(const TokenNames& names, std::span<const int32_t> ids, std::span<const engine::TokenLogprobs> logprobs, int32_t num_top);

/// [null, {"id": {"logprob", "rank", "decoded_token"}, ...}, ...], one for each prompt token, as vLLM has them. logprobs: of every token but
/// the first; empty: null.
Json prompt_logprobs_json(const TokenNames& names, std::span<const int32_t> ids, std::span<const engine::TokenLogprobs> logprobs, int32_t num_top);

/// {"tokens", "token_logprobs", "top_logprobs", "text_offset"}, which grows token by token.
class CompletionLogprobs {
 public:
  CompletionLogprobs(const TokenNames& names, int32_t num_top) : names_(names), num_top_(num_top) {}
  /// logprobs: parallel to ids; null for a prompt's first token.
  void add(int32_t id, const engine::TokenLogprobs* logprobs);
  /// What was added since the last call. Offsets count code points from the beginning of the choice's text.
  Json take();

 private:
  TokenNames names_;
  int32_t num_top_;
  int64_t num_code_points_ = 0;
  Json tokens_ = Json::array(), token_logprobs_ = Json::array(), top_logprobs_ = Json::array(), text_offset_ = Json::array();
};

}  // namespace quern::server
