#include "server/answer.h"
#include "server/completion_format.h"
#include "server/completion_request.h"
#include "server/endpoints.h"
#include "server/error_body.h"
#include "server/generation_plan.h"

namespace quern::server {
namespace {

/// Token ids and text of a prompt, cut as the request wants it. The text is only made when it will be shown.
Result<EchoedPrompt> read_prompt(const Service& service, const CompletionRequest& request, PromptInput input, bool with_text) {
  const text::Tokenizer* tokenizer = service.context.tokenizer;
  EchoedPrompt prompt;
  if (auto* ids = std::get_if<std::vector<int32_t>>(&input)) {
    prompt.ids = std::move(*ids);
  } else if (tokenizer == nullptr) {
    return Error{ErrorCode::kInvalidArgument, "prompt: this model has no tokenizer, so the prompt has to be a list of token ids", "prompt"};
  } else {
    prompt.text = std::move(std::get<std::string>(input));
    prompt.ids = tokenizer->encode(prompt.text);
  }
  if (prompt.ids.empty()) return Error{ErrorCode::kInvalidArgument, "prompt: is empty; at least one token is needed", "prompt"};
  PreparedPrompt cut{std::move(prompt.ids), {}, false, {}};
  truncate_prompt(service, request.generation, request.max_tokens, cut);
  const bool as_sent = !prompt.text.empty() && !request.generation.truncate_prompt_tokens;
  prompt.ids = std::move(cut.ids);
  if (with_text && tokenizer != nullptr && !as_sent) prompt.text = tokenizer->decode(prompt.ids, false);
  return prompt;
}

}  // namespace

void describe_completion(FieldLog& log) { (void)parse_completion_request(Json::object(), {}, kNoLimits, &log); }

HttpAnswer render_completion(const ServicePtr& service, const HttpRequest& http) {
  const auto body = parse_json(http.body, "the request body");
  if (!body) return error_response(body.error());
  auto request = parse_completion_request(*body, service->context.sampling_defaults, service->limits());
  if (!request) return error_response(request.error());
  if (!service->knows_model(request->generation.model)) return unknown_model(*service, request->generation.model);
  Json prompts = Json::array();
  for (PromptInput& input : request->prompts) {
    const auto prompt = read_prompt(*service, *request, std::move(input), false);
    if (!prompt) return error_response(prompt.error());
    prompts.push_back(rendered_prompt_json(*service, prompt->ids));
  }
  return HttpResponse{200, dump_json(Json{{"prompts", std::move(prompts)}, {"max_model_len", service->context.max_model_len}})};
}

HttpAnswer completions(const ServicePtr& service, const HttpRequest& http) {
  const auto body = parse_json(http.body, "the request body");
  if (!body) return error_response(body.error());
  auto parsed = parse_completion_request(*body, service->context.sampling_defaults, service->limits());
  if (!parsed) return error_response(parsed.error());
  CompletionRequest& request = *parsed;
  const GenerationFields& fields = request.generation;
  if (!service->knows_model(fields.model)) return unknown_model(*service, fields.model);
  if (!fields.stop.empty() && service->context.tokenizer == nullptr) {
    return error_response(Error{ErrorCode::kInvalidArgument, "stop: this model has no tokenizer; use stop_token_ids", "stop"});
  }

  const std::string base_id = base_request_id(http, fields);
  GenerationPlan plan;
  plan.request_id = "cmpl-" + base_id;
  plan.max_tokens = request.max_tokens;
  plan.num_logprobs = request.logprobs;
  plan.prompt_logprobs = request.echo ? request.logprobs : -1;
  text::OutputShape shape;
  shape.content = fields.content_format;
  auto grammar = service->constraints.compiled(shape);
  if (!grammar) return error_response(grammar.error());
  plan.grammar = std::move(*grammar);
  std::vector<EchoedPrompt> prompts;
  std::vector<ChoiceRequest> choices;
  for (PromptInput& input : request.prompts) {
    auto prompt = read_prompt(*service, request, std::move(input), request.echo);
    if (!prompt) return error_response(prompt.error());
    if (const auto error = check_window(*service, "prompt", prompt->ids.size(), request.max_tokens)) {
      return error_response(*error, "context_length_exceeded");
    }
    add_choices(*service, fields, plan, PreparedPrompt{prompt->ids, {}, false, {}}, choices);
    prompts.push_back(std::move(*prompt));
  }
  auto generation = Generation::submit(*service->context.engine, service->metrics, std::move(choices), fields.n);
  if (!generation) return error_response(generation.error());

  ResponseHeader header = response_header(*service, fields, plan.request_id);
  header.logprobs = request.logprobs >= 0;
  header.num_top_logprobs = request.logprobs;
  auto format =
      std::make_unique<CompletionFormat>(std::move(header), service->context.tokenizer, std::move(prompts), fields.n, request.echo);
  HttpAnswer answer = make_answer(service, std::move(*generation), std::move(format), fields.stream);
  add_header(answer, "X-Request-Id", base_id);
  return answer;
}

}  // namespace quern::server
