#pragma once

#include <string>

#include "base/json.h"
#include "server/chat_request.h"

namespace quern::server {

/// A request to /v1/messages, in the form of a chat. Thinking is off unless it is asked for, as in Anthropic's API; a conversation that ends
/// with the assistant's words is continued. Errors name the field, as in messages[2].content[0].type.
Result<ChatRequest> parse_messages_request(const Json& body, const SamplingDefaults& defaults, const RequestLimits& limits, FieldLog* log = nullptr);

/// A request to /v1/messages/count_tokens: the same without what generation needs.
Result<ChatRequest> parse_count_tokens_request(const Json& body, FieldLog* log = nullptr);

}  // namespace quern::server
