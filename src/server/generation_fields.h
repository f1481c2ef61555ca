#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "engine/request.h"
#include "server/json_fields.h"
#include "server/sampling_defaults.h"
#include "text/output_grammar.h"

namespace quern::server {

/// What requests are checked against.
struct RequestLimits {
  int32_t vocab_size = 0;
  int32_t max_model_len = 0;
};

/// For readers that only tell which fields there are.
inline constexpr RequestLimits kNoLimits{INT32_MAX, INT32_MAX};

inline constexpr int32_t kMaxChoices = 16;
using engine::kMaxLogprobs;
inline constexpr size_t kMaxStopStrings = 16;
inline constexpr size_t kMaxStopBytes = 4096;

/// The fields that /v1/chat/completions and /v1/completions have in common.
struct GenerationFields {
  std::string model;                // empty: not said
  engine::SamplingParams sampling;  // without seed, stop_ids and num_logprobs
  std::optional<uint64_t> seed;
  int32_t n = 1;
  std::vector<std::string> stop;
  std::vector<int32_t> stop_token_ids;
  bool ignore_eos = false;
  bool include_stop_str_in_output = false;
  bool skip_special_tokens = true;
  bool stream = false;
  bool include_usage = false;           // a last chunk with the usage
  bool continuous_usage_stats = false;  // and the usage so far in every chunk
  bool return_token_ids = false;
  bool return_tokens_as_token_ids = false;  // logprobs name tokens "token_id:N"
  int32_t priority = 0;
  std::string cache_salt;
  std::optional<text::ContentFormat> content_format;  // what the content has to be
  int32_t prompt_logprobs = -1;                    // -1: none; n: of every prompt token, with the n most likely
  std::optional<int32_t> truncate_prompt_tokens;   // -1: as many as fit
  std::string request_id;                          // empty: not said
};

/// Reads them; faults are left in `fields`. Fields whose promise we cannot keep yet are refused, unknown ones are ignored.
GenerationFields read_generation_fields(JsonFields& fields, const SamplingDefaults& defaults, const RequestLimits& limits);

/// For dialects whose answers are one output without token ids: what asks for more is refused.
void require_plain_output(const GenerationFields& generation, JsonFields& fields);

}  // namespace quern::server
