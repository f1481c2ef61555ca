#include "server/chat_prompt.h"
#include "server/chat_request.h"
#include "server/endpoints.h"
#include "server/error_body.h"
#include "server/token_logprobs.h"

namespace quern::server {
namespace {

struct TokenizeRequest {
  std::string model;
  bool with_strings = false;
  std::optional<Conversation> conversation;  // else the prompt
  std::string prompt;
};

Result<TokenizeRequest> parse_tokenize_request(const Json& body, FieldLog* log = nullptr) {
  if (!body.is_object()) return invalid_argument("the request body has to be a JSON object, found {}", json_kind(body));
  JsonFields fields(body, {}, log);
  TokenizeRequest request;
  request.model = fields.string("model", 1024).value_or("");
  request.with_strings = fields.boolean("return_token_strs").value_or(false);
  fields.boolean("add_special_tokens");  // the tokenizer adds none
  const bool has_messages = fields.find("messages") != nullptr;
  if (!has_messages) {
    const auto prompt = fields.string("prompt", SIZE_MAX);
    if (!prompt) fields.fail("prompt", "is required, or messages");
    request.prompt = prompt.value_or("");
  }
  if (has_messages || log != nullptr) request.conversation = read_conversation(fields);
  RETURN_IF_ERROR(fields.status());
  return request;
}

struct DetokenizeRequest {
  std::string model;
  std::vector<int32_t> tokens;
};

Result<DetokenizeRequest> parse_detokenize_request(const Json& body, int32_t vocab_size, FieldLog* log = nullptr) {
  if (!body.is_object()) return invalid_argument("the request body has to be a JSON object, found {}", json_kind(body));
  JsonFields fields(body, {}, log);
  DetokenizeRequest request;
  request.model = fields.string("model", 1024).value_or("");
  auto tokens = fields.integers("tokens", 0, vocab_size - 1, SIZE_MAX);
  if (!tokens) fields.fail("tokens", "is required");
  RETURN_IF_ERROR(fields.status());
  request.tokens = *std::move(tokens);
  return request;
}

Error no_tokenizer() { return make_error(ErrorCode::kInvalidArgument, "this model has no tokenizer; its prompts are token ids"); }

}  // namespace

void describe_tokenize(FieldLog& log) { (void)parse_tokenize_request(Json::object(), &log); }
void describe_detokenize(FieldLog& log) { (void)parse_detokenize_request(Json::object(), INT32_MAX, &log); }

HttpAnswer tokenize(const ServicePtr& service, const HttpRequest& http) {
  const auto body = parse_json(http.body, "the request body");
  if (!body) return error_response(body.error());
  const auto request = parse_tokenize_request(*body);
  if (!request) return error_response(request.error());
  if (!service->knows_model(request->model)) return unknown_model(*service, request->model);
  const text::Tokenizer* tokenizer = service->context.tokenizer;
  std::vector<int32_t> ids;
  if (request->conversation) {
    auto prompt = render_chat(*service, *request->conversation);
    if (!prompt) return error_response(prompt.error());
    ids = std::move(prompt->ids);
  } else {
    if (tokenizer == nullptr) return error_response(no_tokenizer());
    ids = tokenizer->encode(request->prompt);
  }
  Json result;
  result["count"] = ids.size();
  result["max_model_len"] = service->context.max_model_len;
  result["tokens"] = ids;
  result["token_strs"] = nullptr;
  if (request->with_strings) {
    const TokenNames names(tokenizer, false);
    Json strings = Json::array();
    for (const int32_t id : ids) strings.push_back(names.name(id));
    result["token_strs"] = std::move(strings);
  }
  return HttpResponse{200, dump_json(result)};
}

HttpAnswer detokenize(const ServicePtr& service, const HttpRequest& http) {
  const auto body = parse_json(http.body, "the request body");
  if (!body) return error_response(body.error());
  const auto request = parse_detokenize_request(*body, service->limits().vocab_size);
  if (!request) return error_response(request.error());
  if (!service->knows_model(request->model)) return unknown_model(*service, request->model);
  if (service->context.tokenizer == nullptr) return error_response(no_tokenizer());
  return HttpResponse{200, dump_json(Json{{"prompt", service->context.tokenizer->decode(request->tokens, false)}})};
}

}  // namespace quern::server
