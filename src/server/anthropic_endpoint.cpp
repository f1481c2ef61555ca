#include "server/anthropic_format.h"
#include "server/anthropic_request.h"
#include "server/answer.h"
#include "server/chat_generation.h"
#include "server/endpoints.h"
#include "server/error_body.h"

namespace quern::server {
namespace {

HttpResponse refuse(const Error& error) { return error_response(Dialect::kAnthropic, error); }

}  // namespace

void describe_message(FieldLog& log) { (void)parse_messages_request(Json::object(), {}, kNoLimits, &log); }
void describe_token_count(FieldLog& log) { (void)parse_count_tokens_request(Json::object(), &log); }

HttpAnswer create_message(const ServicePtr& service, const HttpRequest& http) {
  const auto body = parse_json(http.body, "the request body");
  if (!body) return refuse(body.error());
  const auto parsed = parse_messages_request(*body, service->context.sampling_defaults, service->limits());
  if (!parsed) return refuse(parsed.error());
  const ChatRequest& request = *parsed;
  const GenerationFields& fields = request.generation;
  if (!service->knows_model(fields.model)) return refuse(unknown_model_error(*service, fields.model));
  auto prompt = prepare_chat(*service, request);
  if (!prompt) return refuse(prompt.error());
  if (const auto error = check_chat_window(*service, request, "messages", prompt->ids.size())) return refuse(*error);
  const std::string base_id = base_request_id(http, fields);
  const ResponseHeader header = response_header(*service, fields, "msg_" + base_id);
  auto format = std::make_unique<AnthropicFormat>(header, static_cast<int32_t>(prompt->ids.size()));
  auto generation = submit_chat(*service, request, header.id, std::move(*prompt));
  if (!generation) return refuse(generation.error());
  HttpAnswer answer = make_answer(service, std::move(*generation), std::move(format), fields.stream);
  add_header(answer, "X-Request-Id", base_id);
  add_header(answer, "request-id", base_id);
  return answer;
}

HttpAnswer count_message_tokens(const ServicePtr& service, const HttpRequest& http) {
  const auto body = parse_json(http.body, "the request body");
  if (!body) return refuse(body.error());
  const auto request = parse_count_tokens_request(*body);
  if (!request) return refuse(request.error());
  if (!service->knows_model(request->generation.model)) return refuse(unknown_model_error(*service, request->generation.model));
  const auto prompt = prepare_chat(*service, *request);
  if (!prompt) return refuse(prompt.error());
  return HttpResponse{200, dump_json(Json{{"input_tokens", prompt->ids.size()}})};
}

}  // namespace quern::server
