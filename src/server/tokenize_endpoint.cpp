#include "server/chat_prompt.h"
#include "server/chat_request.h"
#include "server/endpoints.h"
#include "server/error_body.h"
#include "server/token_logprobs.h"

namespace quern::server {
namespace {

Error no_tokenizer() { return make_error(ErrorCode::kInvalidArgument, "this model has no tokenizer; its prompts are token ids"); }

}  // namespace

HttpAnswer tokenize(const ServicePtr& service, const HttpRequest& http) {
  const auto body = parse_json(http.body, "the request body");
  if (!body) return error_response(body.error());
  if (!body->is_object()) return error_response(invalid_argument("the request body has to be a JSON object, found {}", json_kind(*body)));
  JsonFields fields(*body);
  const std::string model = fields.string("model", 1024).value_or("");
  const bool with_strings = fields.boolean("return_token_strs").value_or(false);
  fields.boolean("add_special_tokens");  // the tokenizer adds none
  std::vector<int32_t> ids;
  const text::Tokenizer* tokenizer = service->context.tokenizer;
  if (fields.find("messages") != nullptr) {
    const Conversation conversation = read_conversation(fields);
    if (const auto status = fields.status(); !status) return error_response(status.error());
    if (!service->knows_model(model)) return unknown_model(*service, model);
    auto prompt = render_chat(*service, conversation);
    if (!prompt) return error_response(prompt.error());
    ids = std::move(prompt->ids);
  } else {
    const auto prompt = fields.string("prompt", SIZE_MAX);
    if (!prompt) fields.fail("prompt", "is required, or messages");
    if (const auto status = fields.status(); !status) return error_response(status.error());
    if (!service->knows_model(model)) return unknown_model(*service, model);
    if (tokenizer == nullptr) return error_response(no_tokenizer());
    ids = tokenizer->encode(*prompt);
  }
  Json result;
  result["count"] = ids.size();
  result["max_model_len"] = service->context.max_model_len;
  result["tokens"] = ids;
  result["token_strs"] = nullptr;
  if (with_strings) {
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
  if (!body->is_object()) return error_response(invalid_argument("the request body has to be a JSON object, found {}", json_kind(*body)));
  JsonFields fields(*body);
  const std::string model = fields.string("model", 1024).value_or("");
  const auto tokens = fields.integers("tokens", 0, service->limits().vocab_size - 1, SIZE_MAX);
  if (!tokens) fields.fail("tokens", "is required");
  if (const auto status = fields.status(); !status) return error_response(status.error());
  if (!service->knows_model(model)) return unknown_model(*service, model);
  if (service->context.tokenizer == nullptr) return error_response(no_tokenizer());
  Json result;
  result["prompt"] = service->context.tokenizer->decode(*tokens, false);
  return HttpResponse{200, dump_json(result)};
}

}  // namespace quern::server
