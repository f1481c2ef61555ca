#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "engine/request.h"

namespace quern::server {

/// Why an output ended, in OpenAI's words and vLLM's.
struct OutputEnd {
  std::string_view finish_reason = "stop";  // "stop" or "length"
  std::optional<std::string> stop_string;   // the stop string that matched
  std::optional<int32_t> stop_token;        // the id from stop_token_ids that ended it; an eos id is not named
};

/// What one piece of news adds to an output. Adding up the pieces gives the same output wherever the stream was cut.
struct OutputDelta {
  std::string reasoning;
  std::string content;
  std::vector<int32_t> token_ids;
  std::vector<engine::TokenLogprobs> logprobs;         // parallel to token_ids when asked for
  std::vector<engine::TokenLogprobs> prompt_logprobs;  // once, of every prompt token but the first
  std::optional<OutputEnd> end;

  void append(OutputDelta other);
};

struct OutputUsage {
  int32_t prompt_tokens = 0;
  int32_t completion_tokens = 0;
  int32_t cached_tokens = 0;
  int32_t reasoning_tokens = 0;
};

}  // namespace quern::server
