#pragma once

#include <memory>

#include "server/endpoints.h"
#include "server/generation.h"
#include "server/http_message.h"
#include "server/output_format.h"

namespace quern::server {

/// The answer that writes the outputs of `generation` in `format`: an event stream, or one response at the end.
HttpAnswer make_answer(ServicePtr service, std::unique_ptr<Generation> generation, std::unique_ptr<OutputFormat> format, bool stream);

}  // namespace quern::server
