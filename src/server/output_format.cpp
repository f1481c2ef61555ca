#include "server/output_format.h"

#include "server/error_body.h"

namespace quern::server {

void OutputFormat::fail(const Error& error, std::string& out) {
  append_error_event(error, out);
  append_done_event(out);
}

HttpResponse OutputFormat::failure(const Error& error) { return error_response(error); }

Json usage_json(const OutputUsage& usage) {
  Json json;
  json["prompt_tokens"] = usage.prompt_tokens;
  json["completion_tokens"] = usage.completion_tokens;
  json["total_tokens"] = int64_t{usage.prompt_tokens} + usage.completion_tokens;
  json["prompt_tokens_details"] = {{"cached_tokens", usage.cached_tokens}};
  json["completion_tokens_details"] = {{"reasoning_tokens", usage.reasoning_tokens}};
  return json;
}

Json response_head(const ResponseHeader& header, std::string_view object) {
  Json json;
  json["id"] = header.id;
  json["object"] = object;
  json["created"] = header.created;
  json["model"] = header.model;
  return json;
}

void append_end(const OutputDelta& output, Json& choice) {
  choice["finish_reason"] = output.end ? Json(output.end->finish_reason) : Json();
  choice["stop_reason"] = nullptr;
  if (output.end && output.end->stop_string) {
    choice["stop_reason"] = *output.end->stop_string;
  } else if (output.end && output.end->stop_token) {
    choice["stop_reason"] = *output.end->stop_token;
  }
}

void append_error_event(const Error& error, std::string& out) {
  out += "data: ";
  out += dump_json(error_body(error));
  out += "\n\n";
}

void append_done_event(std::string& out) { out += "data: [DONE]\n\n"; }

}  // namespace quern::server
