#include "server/answer.h"
#include "server/chat_format.h"
#include "server/chat_generation.h"
#include "server/chat_request.h"
#include "server/endpoints.h"
#include "server/error_body.h"

namespace quern::server {

void describe_chat(FieldLog& log) { (void)parse_chat_request(Json::object(), {}, kNoLimits, &log); }

HttpAnswer render_chat_completion(const ServicePtr& service, const HttpRequest& http) {
  const auto body = parse_json(http.body, "the request body");
  if (!body) return error_response(body.error());
  const auto request = parse_chat_request(*body, service->context.sampling_defaults, service->limits());
  if (!request) return error_response(request.error());
  if (!service->knows_model(request->generation.model)) return unknown_model(*service, request->generation.model);
  const auto prompt = prepare_chat(*service, *request);
  if (!prompt) return error_response(prompt.error());
  Json result = rendered_prompt_json(*service, prompt->ids);
  result["max_model_len"] = service->context.max_model_len;
  return HttpResponse{200, dump_json(result)};
}

HttpAnswer chat_completions(const ServicePtr& service, const HttpRequest& http) {
  const auto body = parse_json(http.body, "the request body");
  if (!body) return error_response(body.error());
  const auto parsed = parse_chat_request(*body, service->context.sampling_defaults, service->limits());
  if (!parsed) return error_response(parsed.error());
  const ChatRequest& request = *parsed;
  const GenerationFields& fields = request.generation;
  if (!service->knows_model(fields.model)) return unknown_model(*service, fields.model);
  auto prompt = prepare_chat(*service, request);
  if (!prompt) return error_response(prompt.error());
  if (const auto error = check_chat_window(*service, request, "messages", prompt->ids.size())) {
    return error_response(*error, "context_length_exceeded");
  }
  const std::string base_id = base_request_id(http, fields);
  ResponseHeader header = response_header(*service, fields, "chatcmpl-" + base_id);
  header.logprobs = request.logprobs;
  header.num_top_logprobs = request.top_logprobs;
  auto format = std::make_unique<ChatFormat>(header, service->context.tokenizer, prompt->ids);
  auto generation = submit_chat(*service, request, header.id, std::move(*prompt));
  if (!generation) return error_response(generation.error());
  HttpAnswer answer = make_answer(service, std::move(*generation), std::move(format), fields.stream);
  add_header(answer, "X-Request-Id", base_id);
  return answer;
}

}  // namespace quern::server
