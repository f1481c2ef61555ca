#pragma once

#include <cstdint>
#include <string>
#include <variant>
#include <vector>

#include "base/json.h"
#include "server/generation_fields.h"

namespace quern::server {

/// Text, or token ids.
using PromptInput = std::variant<std::string, std::vector<int32_t>>;

inline constexpr size_t kMaxPrompts = 256;

/// A request to /v1/completions.
struct CompletionRequest {
  GenerationFields generation;
  std::vector<PromptInput> prompts;  // each gets n choices
  int32_t max_tokens = 16;           // 0: only the prompt
  int32_t logprobs = -1;             // -1: none
  bool echo = false;                 // the prompt stands before the output
};

/// Errors name the field.
Result<CompletionRequest> parse_completion_request(const Json& body, const SamplingDefaults& defaults, const RequestLimits& limits,
                                                   FieldLog* log = nullptr);

}  // namespace quern::server
