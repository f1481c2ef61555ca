#include <algorithm>
#include <charconv>
#include <variant>
#include <vector>

#include "server/answer.h"
#include "server/chat_generation.h"
#include "server/endpoints.h"
#include "server/error_body.h"
#include "server/responses_format.h"
#include "server/responses_request.h"

namespace quern::server {
namespace {

constexpr std::string_view kPath = "/v1/responses/";

/// The id in /v1/responses/{id} and what is below it.
std::string id_of(const HttpRequest& request) {
  const std::string_view rest = std::string_view(request.path).substr(kPath.size());
  return std::string(rest.substr(0, rest.find('/')));
}

/// The value of a query's member, without percent-decoding; empty without one.
std::string_view query_value(std::string_view query, std::string_view name) {
  for (size_t begin = 0; begin < query.size();) {
    const std::string_view one = query.substr(begin, query.find('&', begin) - begin);
    if (one.size() > name.size() && one.starts_with(name) && one[name.size()] == '=') return one.substr(name.size() + 1);
    begin += one.size() + 1;
  }
  return {};
}

HttpResponse wrong_query(std::string_view name, std::string_view expected) {
  Error error = invalid_argument("{}: {}", name, expected);
  error.field = name;
  return error_response(error);
}

/// Of a prompt that cannot be made. What is wrong with the messages is wrong with the input here.
HttpResponse bad_prompt(Error error) {
  if (error.field.starts_with("messages")) error.field = "input";
  return error_response(error);
}

HttpResponse not_stored(std::string_view id, std::string_view field) {
  Error error = make_error(ErrorCode::kNotFound,
                           "there is no response \"{}\": it was never made, not stored, deleted, or is so long ago that others have taken its place",
                           id.substr(0, 256));
  error.field = field;
  return error_response(error, "response_not_found");
}

/// "truncation": "auto": leaves out the oldest messages that are not instructions, as few as needed. Results go with their calls.
Result<PreparedPrompt> prepare_truncated(const Service& service, ResponsesRequest& request) {
  const Json all = request.chat.conversation.messages;
  const size_t first = request.instructions.is_null() ? 0 : 1;
  const auto without = [&](size_t dropped) {
    Json& messages = request.chat.conversation.messages;
    messages = Json::array();
    messages.insert(messages.end(), all.begin(), all.begin() + static_cast<std::ptrdiff_t>(first));
    size_t begin = first + dropped;
    while (begin < all.size() && dropped > 0 && all[begin]["role"] == "tool") ++begin;
    messages.insert(messages.end(), all.begin() + static_cast<std::ptrdiff_t>(begin), all.end());
    return prepare_chat(service, request.chat);
  };
  const auto fits = [&](const PreparedPrompt& prompt) { return !check_chat_window(service, request.chat, "input", prompt.ids.size()); };
  auto prompt = without(0);
  if (!prompt || fits(*prompt)) return prompt;
  // The fewest that let it fit: a shorter conversation has a shorter prompt.
  size_t low = 0, high = 0;  // low do not suffice; high do, or are all but the last message
  for (size_t i = first + 1; i < all.size(); ++i) {
    if (all[i]["role"] == "user") high = i - first;  // a template may want a question
  }
  if (high == 0) return prompt;
  while (high - low > 1) {
    const size_t middle = low + (high - low) / 2;
    auto shorter = without(middle);
    if (!shorter || !fits(*shorter)) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return without(high);
}

/// A request and the messages of the response that it goes on from.
struct ReadRequest {
  ResponsesRequest request;
  Json earlier = Json::array();
};
std::variant<ReadRequest, HttpResponse> read_request(const Service& service, const HttpRequest& http) {
  const auto body = parse_json(http.body, "the request body");
  if (!body) return error_response(body.error());
  auto parsed = parse_responses_request(*body, service.context.sampling_defaults, service.limits());
  if (!parsed) return error_response(parsed.error());
  ReadRequest read{*std::move(parsed)};
  const std::string& model = read.request.chat.generation.model;
  if (!service.knows_model(model)) return unknown_model(service, model);
  const std::string& previous_id = read.request.previous_response_id;
  if (!previous_id.empty()) {
    const auto previous = service.responses.find(previous_id);
    if (previous == nullptr) return not_stored(previous_id, "previous_response_id");
    read.earlier = previous->messages;
  }
  complete_conversation(read.request, read.earlier);
  return read;
}

}  // namespace

void describe_response(FieldLog& log) { (void)parse_responses_request(Json::object(), {}, kNoLimits, &log); }

HttpAnswer create_response(const ServicePtr& service, const HttpRequest& http) {
  auto read = read_request(*service, http);
  if (auto* refusal = std::get_if<HttpResponse>(&read)) return std::move(*refusal);
  auto& [request, earlier] = std::get<ReadRequest>(read);
  const GenerationFields& fields = request.chat.generation;
  auto prompt = request.truncate ? prepare_truncated(*service, request) : prepare_chat(*service, request.chat);
  if (!prompt) return bad_prompt(prompt.error());
  if (const auto error = check_chat_window(*service, request.chat, "input", prompt->ids.size())) {
    return error_response(*error, "context_length_exceeded");
  }

  // Nobody but the server chooses these ids: whoever knows one can read the response.
  const ResponseHeader header = response_header(*service, fields, new_request_id("resp_"));
  const auto store = [service, id = header.id, items = request.input_items, messages = earlier, own = request.messages](const Json& response) {
    StoredResponse stored{response, Json::array(), messages};
    for (size_t i = 0; i < items.size(); ++i) {
      Json item = items[i];
      if (!item.contains("type")) item["type"] = "message";
      if (!item.contains("id")) item["id"] = fmt::format("item_{}{:02x}", id.substr(id.find('_') + 1), i);
      stored.input_items.push_back(std::move(item));
    }
    const Json output = output_messages(response["output"]);
    stored.messages.insert(stored.messages.end(), own.begin(), own.end());
    stored.messages.insert(stored.messages.end(), output.begin(), output.end());
    service->responses.put(id, std::move(stored));
  };
  auto format = std::make_unique<ResponsesFormat>(header, request, request.store ? std::function<void(const Json&)>(store) : [](const Json&) {});
  auto generation = submit_chat(*service, request.chat, header.id, std::move(*prompt));
  if (!generation) return error_response(generation.error());
  HttpAnswer answer = make_answer(service, std::move(*generation), std::move(format), fields.stream);
  add_header(answer, "X-Request-Id", base_request_id(http, fields));
  return answer;
}

HttpAnswer count_response_tokens(const ServicePtr& service, const HttpRequest& http) {
  auto read = read_request(*service, http);
  if (auto* refusal = std::get_if<HttpResponse>(&read)) return std::move(*refusal);
  const auto prompt = prepare_chat(*service, std::get<ReadRequest>(read).request.chat);
  if (!prompt) return bad_prompt(prompt.error());
  return HttpResponse{200, dump_json(Json{{"object", "response.input_tokens"}, {"input_tokens", prompt->ids.size()}})};
}

HttpAnswer get_response(const ServicePtr& service, const HttpRequest& http) {
  const std::string id = id_of(http);
  const auto stored = service->responses.find(id);
  if (stored == nullptr) return not_stored(id, {});
  if (query_value(http.query, "stream") == "true") return wrong_query("stream", "a stored response is told as a whole");
  return HttpResponse{200, dump_json(stored->response)};
}

HttpAnswer delete_response(const ServicePtr& service, const HttpRequest& http) {
  const std::string id = id_of(http);
  if (!service->responses.erase(id)) return not_stored(id, {});
  return HttpResponse{200, dump_json(Json{{"id", id}, {"object", "response"}, {"deleted", true}})};
}

HttpAnswer list_input_items(const ServicePtr& service, const HttpRequest& http) {
  const std::string id = id_of(http);
  const auto stored = service->responses.find(id);
  if (stored == nullptr) return not_stored(id, {});
  const std::string_view order = query_value(http.query, "order"), limit_text = query_value(http.query, "limit"), after = query_value(http.query, "after");
  if (!order.empty() && order != "asc" && order != "desc") return wrong_query("order", "expected asc or desc");
  size_t limit = 20;
  if (!limit_text.empty()) {
    const auto [end, fault] = std::from_chars(limit_text.data(), limit_text.data() + limit_text.size(), limit);
    if (fault != std::errc() || end != limit_text.data() + limit_text.size() || limit < 1 || limit > 100) {
      return wrong_query("limit", "expected a number from 1 to 100");
    }
  }
  std::vector<Json> items(stored->input_items.begin(), stored->input_items.end());
  if (order != "asc") std::ranges::reverse(items);
  auto begin = items.begin();
  if (!after.empty()) {
    begin = std::ranges::find_if(items, [&](const Json& item) { return item["id"] == after; });
    if (begin == items.end()) return wrong_query("after", "there is no such item");
    ++begin;
  }
  const auto end = begin + static_cast<std::ptrdiff_t>(std::min(limit, static_cast<size_t>(items.end() - begin)));
  Json list = {{"object", "list"}, {"data", Json(std::vector<Json>(begin, end))}};
  list["first_id"] = begin == end ? Json() : (*begin)["id"];
  list["last_id"] = begin == end ? Json() : (*(end - 1))["id"];
  list["has_more"] = end != items.end();
  return HttpResponse{200, dump_json(list)};
}

}  // namespace quern::server
