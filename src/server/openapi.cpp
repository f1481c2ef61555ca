#include <algorithm>
#include <array>
#include <optional>
#include <string>

#include "server/route.h"

// The document is made from what dispatches and reads requests: the routes (api.cpp), and for each the members that its reader asks for
// (FieldLog) with the types and ranges that it checks. Only words, and shapes that the reader looks at itself, stand here.

namespace quern::server {
namespace {

struct FieldDoc {
  std::string_view reader;  // Route::reader; empty: all that have no words of their own
  std::string_view name;
  std::string_view text;
  std::string_view schema = {};  // JSON, where the reader's own check does not say it
};

constexpr std::string_view kFormatObject =
    R"({"type": ["object", "null"], "properties": {"type": {"enum": ["text", "json_object", "json_schema", "regex", "grammar"]}}, "required": ["type"]})";
constexpr std::string_view kRefused = R"({"type": "null"})";  // anything else is a 400 that names the field
constexpr std::string_view kStringOrList = R"({"type": ["string", "array", "null"], "items": {"type": "string"}})";

constexpr auto kFields = std::to_array<FieldDoc>({
    {"", "model", "Any served name; another is a 404"},
    {"", "temperature", "0 is greedy. Default: the model's"},
    {"", "top_p", "Above 0. Default: the model's", R"({"type": ["number", "null"], "exclusiveMinimum": 0, "maximum": 1})"},
    {"", "min_p", "Tokens less likely than this share of the likeliest are left out. Default: the model's"},
    {"", "top_k", "0 and -1 switch it off. Default: the model's"},
    {"", "repetition_penalty", "Over prompt and output. Default: the model's"},
    {"", "presence_penalty", "Over the output"},
    {"", "frequency_penalty", "Over the output"},
    {"", "logit_bias", "Token id to a number from -100 to 100; at most 1024 entries",
     R"({"type": ["object", "null"], "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100}})"},
    {"", "seed", "Equal seeds give equal text", R"({"type": ["integer", "null"]})"},
    {"", "n", "Choices per prompt; the first equals that of n = 1"},
    {"", "min_tokens", "No stop token before so many tokens"},
    {"", "stop", "Looked for in all text, reasoning too; not part of the output", kStringOrList},
    {"", "stop_token_ids", "Token ids that end the output"},
    {"", "ignore_eos", "The model's own end-of-sequence tokens do not end the output"},
    {"", "include_stop_str_in_output", "The stop stays in the text"},
    {"", "skip_special_tokens", "Special tokens have no text. Default: true"},
    {"", "stream", "Server-sent events"},
    {"", "stream_options", "With stream: include_usage adds a last chunk with usage, continuous_usage_stats the usage so far to every chunk",
     R"({"type": ["object", "null"], "properties": {"include_usage": {"type": "boolean"}, "continuous_usage_stats": {"type": "boolean"}}})"},
    {"", "priority", "Lower runs earlier"},
    {"", "cache_salt", "Prompts share cached prefixes only with the same salt"},
    {"", "return_token_ids", "Adds token_ids to choices, and prompt_token_ids"},
    {"", "return_tokens_as_token_ids", "Log-probabilities name tokens token_id:N"},
    {"", "prompt_logprobs", "Log-probabilities of the prompt's tokens, with so many alternatives"},
    {"", "truncate_prompt_tokens", "Only the last so many tokens of the prompt; -1: as many as fit", R"({"type": ["integer", "null"], "minimum": -1, "not": {"const": 0}})"},
    {"", "request_id", "The answer's id is made from it, unless the request has an X-Request-Id header"},
    {"", "response_format", "The form of the content", kFormatObject},
    {"", "structured_outputs", "The form of the content: one of json, regex, choice, grammar and json_object",
     R"({"type": ["object", "null"], "properties": {"json": {"type": ["object", "string", "boolean"]}, "regex": {"type": "string"}, "choice": {"type": "array", "items": {"type": "string"}}, "grammar": {"type": "string"}, "json_object": {"type": "boolean"}, "disable_any_whitespace": {"type": "boolean"}}})"},
    {"", "guided_json", "As structured_outputs.json: a JSON schema, or the text of one", R"({"type": ["object", "string", "boolean", "null"]})"},
    {"", "guided_regex", "As structured_outputs.regex: all of the content has to match", R"({"type": ["string", "null"]})"},
    {"", "guided_choice", "As structured_outputs.choice: one of these texts", R"({"type": ["array", "null"], "minItems": 1, "items": {"type": "string", "minLength": 1}})"},
    {"", "guided_grammar", "As structured_outputs.grammar: EBNF whose rule root is the content", R"({"type": ["string", "null"]})"},
    {"", "guided_json_object", "As structured_outputs.json_object: any JSON object", R"({"type": ["boolean", "null"]})"},
    {"", "guided_whitespace_pattern", "Refused", kRefused},
    {"", "best_of", "Only 1: ask for several choices with n", R"({"enum": [1, null]})"},
    {"", "use_beam_search", "Only false", R"({"enum": [false, null]})"},
    {"", "prompt_embeds", "Refused: prompts are text or token ids", kRefused},
    {"", "suffix", "Only empty: the model does not fill in the middle", R"({"enum": ["", null]})"},
    {"", "allowed_token_ids", "Refused", kRefused},
    {"", "bad_words", "Refused", kRefused},
    {"", "logits_processors", "Refused", kRefused},

    {"", "messages", "The conversation", R"({"type": "array", "minItems": 1, "items": {"type": "object", "required": ["role"]}})"},
    {"", "tools", "Functions that the model may call", R"({"type": ["array", "null"], "items": {"type": "object"}})"},
    {"", "tool_choice", "auto, none, required, or a function", R"({"type": ["string", "object", "null"]})"},
    {"", "parallel_tool_calls", "false: the first call ends the answer"},
    {"", "chat_template_kwargs", "Variables of the chat template, such as {\"enable_thinking\": false}"},
    {"", "enable_thinking", "Short for the template variable of this name"},
    {"", "reasoning_effort", "Short for the template variable of this name; none also switches thinking off"},
    {"", "add_generation_prompt", "The template opens the assistant's turn. Default: true"},
    {"", "continue_final_message", "The answer continues the last message instead"},
    {"chat", "max_completion_tokens", "Default: the rest of the window"},
    {"chat", "max_tokens", "The older name of max_completion_tokens"},
    {"chat", "logprobs", "Log-probabilities of the output's tokens"},
    {"chat", "top_logprobs", "With logprobs: so many alternatives"},
    {"chat", "modalities", "Only text", R"({"type": ["array", "null"], "items": {"const": "text"}})"},
    {"chat", "echo", "Only false", R"({"enum": [false, null]})"},
    {"chat", "functions", "Refused: use tools", kRefused},
    {"chat", "chat_template", "Refused: the server's is used", kRefused},
    {"chat", "documents", "Refused", kRefused},
    {"chat", "audio", "Refused", kRefused},
    {"chat", "web_search_options", "Refused", kRefused},

    {"completion", "prompt", "A text, a list of texts, a list of token ids, or a list of such lists",
     R"({"anyOf": [{"type": "string", "minLength": 1}, {"type": "array", "minItems": 1, "items": {"type": ["string", "integer", "array"]}}]})"},
    {"completion", "max_tokens", "Default 16; 0: only the prompt"},
    {"completion", "logprobs", "So many alternatives per token"},
    {"completion", "echo", "The prompt stands before the output, with its log-probabilities"},

    {"responses", "input", "A text, or items: message, reasoning, function_call, function_call_output",
     R"({"anyOf": [{"type": "string"}, {"type": "array", "minItems": 1, "items": {"type": "object"}}]})"},
    {"responses", "instructions", "The system message; not kept for the next response"},
    {"responses", "previous_response_id", "Goes on from a stored response"},
    {"responses", "max_output_tokens", "Default: the rest of the window"},
    {"responses", "store", "The response is kept in memory, for previous_response_id and GET. Default: true"},
    {"responses", "reasoning", "effort: as reasoning_effort of a chat; summary: there are none, the reasoning itself is in the output",
     R"({"type": ["object", "null"], "properties": {"effort": {"type": ["string", "null"]}, "summary": {"type": ["string", "null"]}}})"},
    {"responses", "text", "format: constrained output", R"({"type": ["object", "null"], "properties": {"format": {"type": ["object", "null"]}}})"},
    {"responses", "truncation", "disabled, or auto: the oldest messages are left out when the prompt is too long", R"({"enum": ["auto", "disabled", null]})"},
    {"responses", "include", "Accepted where it names what this server never has; log-probabilities are refused", R"({"type": ["array", "null"], "items": {"type": "string"}})"},
    {"responses", "metadata", "Up to 16 strings, repeated in the response", R"({"type": ["object", "null"], "additionalProperties": {"type": "string"}})"},
    {"responses", "user", "Repeated in the response"},
    {"responses", "stream_options", "Nothing is obfuscated; the usage is in the last event anyway", R"({"type": ["object", "null"]})"},
    {"responses", "background", "Only false", R"({"enum": [false, null]})"},
    {"responses", "top_logprobs", "Only 0", R"({"enum": [0, null]})"},
    {"responses", "n", "Only 1", R"({"enum": [1, null]})"},
    {"responses", "prompt_logprobs", "Refused", kRefused},
    {"responses", "return_token_ids", "Only false", R"({"enum": [false, null]})"},
    {"responses", "return_tokens_as_token_ids", "Only false", R"({"enum": [false, null]})"},
    {"responses", "conversation", "Refused: use previous_response_id", kRefused},
    {"responses", "prompt", "Refused", kRefused},
    {"responses", "context_management", "Refused", kRefused},
    {"responses", "moderation", "Refused", kRefused},

    {"anthropic", "system", "A text, or a list of text blocks", R"({"type": ["string", "array", "null"], "items": {"type": "object"}})"},
    {"anthropic", "max_tokens", "Required", R"({"type": "integer", "minimum": 1})"},
    {"anthropic", "stop_sequences", "Up to 16", R"({"type": ["array", "null"], "items": {"type": "string", "minLength": 1}})"},
    {"anthropic", "thinking", "enabled or adaptive: the model thinks first; budget_tokens is not enforced. Default: disabled",
     R"({"type": ["object", "null"], "properties": {"type": {"enum": ["enabled", "adaptive", "disabled"]}, "budget_tokens": {"type": "integer"}}, "required": ["type"]})"},
    {"anthropic", "output_config", "effort: as reasoning_effort of a chat; format: the form of the content",
     R"({"type": ["object", "null"], "properties": {"effort": {"type": ["string", "null"]}, "format": {"type": ["object", "null"]}}})"},
    {"anthropic", "output_format", "As output_config.format", kFormatObject},
    {"anthropic", "tool_choice", "auto, any, none, or a tool; disable_parallel_tool_use: the first call ends the answer",
     R"({"type": ["object", "null"], "properties": {"type": {"enum": ["auto", "any", "none", "tool"]}, "name": {"type": "string"}}, "required": ["type"]})"},
    {"anthropic", "stream_options", "Without effect: the usage is in the stream anyway", R"({"type": ["object", "null"]})"},
    {"anthropic", "n", "Only 1", R"({"enum": [1, null]})"},
    {"anthropic", "prompt_logprobs", "Refused", kRefused},
    {"anthropic", "return_token_ids", "Only false", R"({"enum": [false, null]})"},
    {"anthropic", "return_tokens_as_token_ids", "Only false", R"({"enum": [false, null]})"},
    {"anthropic", "container", "Refused", kRefused},
    {"anthropic", "mcp_servers", "Only empty: call them yourself, as tools", R"({"type": ["array", "null"], "maxItems": 0})"},
    {"anthropic", "context_management", "Without effect: nothing is left out of the conversation"},

    {"tokenize", "messages", "A conversation", R"({"type": ["array", "null"], "items": {"type": "object", "required": ["role"]}})"},
    {"tokenize", "prompt", "A text, where there are no messages"},
    {"tokenize", "return_token_strs", "The tokens' texts as well"},
    {"tokenize", "add_special_tokens", "Without effect: the tokenizer adds none"},
    {"detokenize", "tokens", "Token ids", R"({"type": "array", "items": {"type": "integer", "minimum": 0}})"},
});

struct ReaderDoc {
  std::string_view reader, required, example;  // JSON
};
constexpr auto kReaders = std::to_array<ReaderDoc>({
    {"chat", R"(["messages"])", R"({"messages": [{"role": "user", "content": "What is 17 + 25?"}], "max_completion_tokens": 64})"},
    {"completion", R"(["prompt"])", R"({"prompt": "Once upon a time", "max_tokens": 16})"},
    {"responses", R"(["input"])", R"({"input": "What is 17 + 25?", "max_output_tokens": 64})"},
    {"anthropic", R"(["messages", "max_tokens"])", R"({"messages": [{"role": "user", "content": "What is 17 + 25?"}], "max_tokens": 64})"},
    {"tokenize", "[]", R"({"prompt": "Once upon a time"})"},
    {"detokenize", R"(["tokens"])", R"({"tokens": [1, 2, 3]})"},
});

Json json(std::string_view text) { return parse_json(text, "openapi.cpp").value(); }

const FieldDoc* find_doc(std::string_view reader, std::string_view name) {
  const auto of = [&](std::string_view r) { return std::ranges::find_if(kFields, [&](const FieldDoc& d) { return d.reader == r && d.name == name; }); };
  if (const auto own = of(reader); own != kFields.end()) return &*own;
  const auto common = of("");
  return common == kFields.end() ? nullptr : &*common;
}

/// null counts as absent, so every type takes it.
void allow_null(Json& schema) {
  const auto type = schema.find("type");
  if (type != schema.end() && type->is_string()) *type = Json::array({*type, "null"});
}

Json body_schema(const Route& route) {
  const auto reader = std::ranges::find_if(kReaders, [&](const ReaderDoc& r) { return r.reader == route.reader; });
  CHECK(reader != kReaders.end());
  FieldLog log;
  route.describe(log);
  Json schema = {{"type", "object"}, {"properties", Json::object()}, {"required", Json::array()}};
  Json example = Json::object();
  const Json whole_example = json(reader->example);
  for (const FieldLog::Field& field : log.fields()) {
    const FieldDoc* doc = find_doc(route.reader, field.name);
    Json property = doc != nullptr && !doc->schema.empty() ? json(doc->schema) : field.schema;
    if (doc == nullptr || doc->schema.empty()) allow_null(property);
    if (doc != nullptr) property["description"] = doc->text;
    schema["properties"][field.name] = std::move(property);
    if (whole_example.contains(field.name)) example[field.name] = whole_example[field.name];
  }
  for (const Json& name : json(reader->required)) {
    if (schema["properties"].contains(name.get_ref<const std::string&>())) schema["required"].push_back(name);
  }
  schema["additionalProperties"] = true;
  schema["description"] = "Members that are not listed are ignored.";
  schema["examples"] = Json::array({example});
  return schema;
}

Json content(std::string_view type, Json schema) {
  Json json;
  json[std::string(type)] = {{"schema", std::move(schema)}};
  return json;
}

std::string operation_id(const Route& route) {
  std::string id = route.method == "GET" ? "get" : route.method == "DELETE" ? "delete" : "post";
  for (const char c : route.path) id += (c >= 'a' && c <= 'z') || (c >= '0' && c <= '9') ? c : '_';
  return id;
}

Json operation(const Route& route) {
  Json op;
  op["operationId"] = operation_id(route);
  op["summary"] = route.summary;
  op["parameters"] = Json::array({{{"$ref", "#/components/parameters/X-Request-Id"}}});
  if (const size_t open = route.path.find('{'); open != std::string_view::npos) {
    const std::string name(route.path.substr(open + 1, route.path.find('}') - open - 1));
    op["parameters"].push_back({{"name", name}, {"in", "path"}, {"required", true}, {"schema", {{"type", "string"}}}});
  }
  Json good = {{"description", "The answer"}};
  const char* type = route.path == "/metrics" ? "text/plain" : route.path == "/" ? "text/html" : "application/json";
  good["content"] = content(type, {{"type", type == std::string_view("application/json") ? "object" : "string"}});
  if (route.describe != nullptr) {
    Json schema = body_schema(route);
    if (schema["properties"].contains("stream") && !route.path.ends_with("/render")) {
      good["content"].update(content("text/event-stream", {{"type", "string"}}));
    }
    op["requestBody"] = {{"required", true}, {"content", content("application/json", std::move(schema))}};
  }
  op["responses"]["200"] = std::move(good);
  const char* error = route.dialect == Dialect::kAnthropic ? "#/components/schemas/AnthropicError" : "#/components/schemas/Error";
  op["responses"]["default"] = {{"description", "What went wrong"}, {"content", content("application/json", {{"$ref", error}})}};
  if (route.endpoint == nullptr) op["security"] = Json::array();
  return op;
}

Json components() {
  return json(R"({
    "parameters": {"X-Request-Id": {"name": "X-Request-Id", "in": "header", "required": false, "schema": {"type": "string", "maxLength": 128},
      "description": "The client's name for the request, up to 128 printable ASCII characters; answers repeat it, and their ids are made from it"}},
    "schemas": {
      "Error": {"type": "object", "required": ["error"], "properties": {"error": {"type": "object", "required": ["message", "type", "param", "code"],
        "properties": {"message": {"type": "string"}, "type": {"type": "string"}, "param": {"type": ["string", "null"], "description": "The field"},
        "code": {"type": ["string", "null"]}}}}},
      "AnthropicError": {"type": "object", "required": ["type", "error"], "properties": {"type": {"const": "error"},
        "error": {"type": "object", "required": ["type", "message"], "properties": {"type": {"type": "string"}, "message": {"type": "string"}}}}}},
    "securitySchemes": {"bearer": {"type": "http", "scheme": "bearer"}, "key": {"type": "apiKey", "in": "header", "name": "x-api-key"}}})");
}

}  // namespace

bool matches(std::string_view pattern, std::string_view path) {
  const size_t open = pattern.find('{');
  if (open == std::string_view::npos) return path == pattern || (pattern.size() > 1 && pattern.ends_with('/') && path.starts_with(pattern));
  const std::string_view front = pattern.substr(0, open), back = pattern.substr(pattern.find('}') + 1);
  return path.size() > front.size() + back.size() && path.starts_with(front) && path.ends_with(back);
}

Json openapi_document(std::span<const Route> routes, std::string_view version) {
  Json document;
  document["openapi"] = "3.1.0";
  document["info"] = {{"title", "quern"}, {"version", version}, {"description", "A server of OpenAI's and Anthropic's APIs for one model"}};
  document["paths"] = Json::object();
  for (const Route& route : routes) {
    if (route.summary.empty()) continue;
    std::string method(route.method);
    std::ranges::transform(method, method.begin(), [](char c) { return static_cast<char>(c | 0x20); });
    document["paths"][std::string(route.path)][method] = operation(route);
  }
  document["components"] = components();
  document["security"] = Json::array({Json{{"bearer", Json::array()}}, Json{{"key", Json::array()}}, Json::object()});
  return document;
}

}  // namespace quern::server
