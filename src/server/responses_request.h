#pragma once

#include <cstdint>
#include <string>

#include "base/json.h"
#include "server/chat_request.h"

namespace quern::server {

/// A request to /v1/responses.
struct ResponsesRequest {
  ChatRequest chat;  // the conversation without that of previous_response_id, which complete_conversation() adds
  Json instructions, metadata = Json::object(), reasoning, text, tool_choice = "auto", tools = Json::array(), user;  // repeated in the response
  Json input_items = Json::array();   // as the client wrote them; a string is one message
  Json messages = Json::array();      // the same in the form of a chat
  std::string previous_response_id;   // empty: none
  bool store = true;
  bool truncate = false;              // "truncation": "auto"
};

/// Errors name the field, as in input[2].content[0].type.
Result<ResponsesRequest> parse_responses_request(const Json& body, const SamplingDefaults& defaults, const RequestLimits& limits,
                                                 FieldLog* log = nullptr);

/// Instructions, then `earlier` messages, then the request's own.
void complete_conversation(ResponsesRequest& request, const Json& earlier);

/// The items of a response's output as messages, one for each turn of the assistant.
Json output_messages(const Json& output);

}  // namespace quern::server
