#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "base/json.h"
#include "server/generation_fields.h"
#include "text/tool_schemas.h"

namespace quern::server {

/// What a chat template is given, as the client wrote it; text::normalize_messages checks the messages when they are rendered.
struct Conversation {
  Json messages = Json::array();
  Json tools;  // null or a list, as the template shows them
  std::optional<std::string> forced_call;  // the answer begins with a call: of this function, or of any ("")
  Json template_kwargs = Json::object();
  bool add_generation_prompt = true;
  bool continue_final_message = false;
};

/// A request to /v1/chat/completions.
struct ChatRequest {
  GenerationFields generation;
  Conversation conversation;
  std::optional<int32_t> max_tokens;  // absent: the rest of the window
  bool logprobs = false;
  int32_t top_logprobs = 0;
  std::shared_ptr<const text::ToolSchemas> tools;  // calls are read with these; null: there are none
  bool parallel_tool_calls = true;
};

/// Errors name the field.
Result<ChatRequest> parse_chat_request(const Json& body, const SamplingDefaults& defaults, const RequestLimits& limits, FieldLog* log = nullptr);

/// Which tool the answer has to call, in the words of all dialects.
struct ToolChoice {
  enum class Kind : uint8_t { kAuto, kNone, kRequired, kNamed } kind = Kind::kAuto;
  std::string name;  // kNamed
};
/// Takes the tools away ("none": a model that does not see them does not call them) or forces a call; faults are left in `fields`.
void apply_tool_choice(const ToolChoice& choice, JsonFields& fields, Conversation& conversation);

/// As the template variable of this name; "none" also switches thinking off. What the request's own template variables say stays.
void set_reasoning_effort(const std::string& effort, Conversation& conversation);

/// The conversation of a chat request, or of a /tokenize request with messages; faults are left in `fields`.
Conversation read_conversation(JsonFields& fields);

}  // namespace quern::server
