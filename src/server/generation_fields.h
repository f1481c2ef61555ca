#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "engine/request.h"
#include "server/json_fields.h"
#include "server/sampling_defaults.h"

namespace quern::server {

/// What requests are checked against.
struct RequestLimits {
  int32_t vocab_size = 0;
  int32_t max_model_len = 0;
};

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
};

/// Reads them; faults are left in `fields`. Fields whose promise we cannot keep yet are refused, unknown ones are ignored.
GenerationFields read_generation_fields(JsonFields& fields, const SamplingDefaults& defaults, const RequestLimits& limits);

}  // namespace quern::server
