#pragma once

#include "base/result.h"
#include "server/chat_request.h"
#include "server/endpoints.h"
#include "server/generation_plan.h"

namespace quern::server {

/// The conversation as the model's template writes it, in tokens. Control tokens in what users wrote stay text.
/// Errors: kInvalidArgument with the template's own words when it refuses; kUnsupported without a template or tokenizer.
Result<PreparedPrompt> render_chat(const Service& service, const Conversation& conversation);

}  // namespace quern::server
