#pragma once

#include <memory>
#include <string>

#include "base/result.h"
#include "server/chat_request.h"
#include "server/endpoints.h"
#include "server/generation.h"
#include "server/generation_plan.h"

namespace quern::server {

// What the dialects with conversations have in common, from the request as it was read to the engine at work on it.

/// The prompt, cut as the request wants it. Errors: those of render_chat.
Result<PreparedPrompt> prepare_chat(const Service& service, const ChatRequest& request);

/// Prompt and output must fit the window together. `prompt_field`: what the dialect calls its messages.
std::optional<Error> check_chat_window(const Service& service, const ChatRequest& request, std::string_view prompt_field, size_t prompt_tokens);

/// Errors: those of Engine::submit.
Result<std::unique_ptr<Generation>> submit_chat(Service& service, const ChatRequest& request, std::string request_id, PreparedPrompt prompt);

}  // namespace quern::server
