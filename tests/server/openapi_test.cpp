#include <set>

#include "api_fixture.h"
#include "base/file.h"

namespace quern::server {
namespace {

using ::testing::HasSubstr;

/// The document against the handlers: what it says is what they do.
class OpenApi : public ApiTest {
 protected:
  struct Operation {
    std::string path, method;
    Json json;
    [[nodiscard]] bool has_body() const { return json.contains("requestBody"); }
    [[nodiscard]] const Json& schema() const { return json["requestBody"]["content"]["application/json"]["schema"]; }
    [[nodiscard]] Json example() const { return schema()["examples"][0]; }
  };
  std::vector<Operation> operations() {
    std::vector<Operation> all;
    const Json document = get("/openapi.json").json();
    for (const auto& [path, methods] : document["paths"].items())
      for (const auto& [method, operation] : methods.items()) all.push_back({path, method, operation});
    return all;
  }
  ClientResponse call(const Operation& operation, const Json& body) {
    if (operation.has_body()) return post(operation.path, body);
    std::string path = operation.path;
    if (const size_t open = path.find('{'); open != std::string::npos) path.replace(open, path.find('}') - open + 1, "qwen");
    std::string method = operation.method;
    for (char& c : method) c = static_cast<char>(c & ~0x20);
    return ask(method, path);
  }
  /// What an error says of its field, in either dialect.
  static bool names(const ClientResponse& response, const std::string& field) {
    const Json body = response.json();
    if (!body.contains("error")) return false;
    if (body.contains("type")) return body["error"]["message"].get<std::string>().find(field) != std::string::npos;
    return body["error"]["param"].is_string() && body["error"]["param"].get<std::string>().starts_with(field);
  }
};

/// A value that the schema allows, and where there is one, that it does not.
Json good_value(const std::string& name, const Json& schema) {
  if (schema.contains("type") && (schema["type"] == "null")) return nullptr;
  if (name == "model") return "qwen";
  if (name == "tools" || name == "functions") return Json::array();
  if (name == "tool_choice" && schema.contains("properties")) return {{"type", "auto"}};
  if (name == "tool_choice") return "auto";
  if (name == "thinking") return {{"type", "enabled"}};
  if (name == "response_format" || name == "output_format") return {{"type", "text"}};
  if (name == "structured_outputs") return {{"regex", "x"}};
  if (name == "guided_choice") return Json::array({"x"});
  if (name == "guided_grammar") return "root ::= \"x\"";
  if (name == "messages") return Json::parse(R"([{"role": "user", "content": "x"}])");
  if (name == "modalities") return Json::array({"text"});
  if (name == "prompt" || name == "input") return "x";
  if (schema.contains("enum")) return schema["enum"][0];
  const Json type = schema["type"].is_array() ? schema["type"][0] : schema["type"];
  if (type == "string") return "x";
  if (type == "boolean") return false;
  if (type == "array") return Json::array();
  if (type == "object") return Json::object();
  if (type == "null") return nullptr;
  const double low = schema.value("minimum", 0.0), high = schema.value("maximum", 1.0);
  if (type == "number") return std::min(std::max(0.5, low), high);
  return std::max<int64_t>(1, static_cast<int64_t>(low));
}

TEST_F(OpenApi, EveryRouteOfItAnswersAndEveryRouteThatAnswersIsInIt) {
  start();
  std::set<std::string> documented;
  for (const Operation& operation : operations()) {
    documented.insert(operation.method + " " + operation.path);
    const ClientResponse response = call(operation, operation.has_body() ? operation.example() : Json());
    const bool unknown_id = operation.path.find("{response_id}") != std::string::npos;
    EXPECT_EQ(response.status, unknown_id ? 404 : 200) << operation.method << " " << operation.path << " " << response.body;
    if (unknown_id) {
      EXPECT_EQ(response.json()["error"]["code"], "response_not_found");
    }
    EXPECT_FALSE(operation.json["summary"].get<std::string>().empty());
  }
  // The table of docs/http-api.md was written by hand.
  const auto page = read_file(std::filesystem::path(QUERN_SOURCE_DIR) / "docs/http-api.md");
  ASSERT_OK(page);
  for (const std::string& route : documented) {
    std::string path = route.substr(route.find(' ') + 1);
    if (const size_t open = path.find('{'); open != std::string::npos) path.replace(open, path.find('}') - open + 1, "{id}");
    EXPECT_THAT(*page, HasSubstr(path)) << route;
  }
  EXPECT_TRUE(documented.contains("post /v1/messages") && documented.contains("delete /v1/responses/{response_id}"));
}

TEST_F(OpenApi, AnswersBeforeTheModelIsThereAndWithoutAKey) {
  ServerOptions options;
  options.api.api_keys = {"key"};
  start(options, false);
  const Json document = get("/openapi.json").json();
  EXPECT_EQ(document["openapi"], "3.1.0");
  EXPECT_EQ(document["info"]["version"], "1.2.3");
}

TEST_F(OpenApi, EveryFieldHasWords) {
  start();
  for (const Operation& operation : operations()) {
    if (!operation.has_body()) continue;
    for (const auto& [name, property] : operation.schema()["properties"].items()) {
      EXPECT_TRUE(property.contains("description")) << operation.path << " " << name << ": say in openapi.cpp what it is";
      EXPECT_TRUE(property.contains("type") || property.contains("enum") || property.contains("anyOf")) << operation.path << " " << name;
    }
  }
}

TEST_F(OpenApi, EveryDocumentedFieldIsAcceptedAndItsTypeIsChecked) {
  start();
  int accepted = 0, checked = 0, refused = 0;
  for (const Operation& operation : operations()) {
    if (!operation.has_body()) continue;
    const bool conversation_or_prompt = operation.path == "/tokenize";
    for (const auto& [name, schema] : operation.schema()["properties"].items()) {
      SCOPED_TRACE(operation.path + " " + name);
      Json body = operation.example();
      if (name == "stream_options") body["stream"] = true;
      if (name == "top_logprobs") body["logprobs"] = true;
      if (conversation_or_prompt && name != "prompt" && !body.contains(name)) body = Json::parse(R"({"messages": [{"role": "user", "content": "x"}]})");
      if (name == "previous_response_id") {
        body[name] = post(operation.path, body).json()["id"];
      } else {
        body[name] = name == "tokens" ? Json::array({1}) : good_value(name, schema);
      }
      if (name == "truncation") body[name] = "auto";
      const ClientResponse good = call(operation, body);
      EXPECT_EQ(good.status, 200) << body << good.body;
      ++accepted;
      // null is the same as absent, but where a field is required.
      const Json& required = operation.schema()["required"];
      const bool is_required = std::find(required.begin(), required.end(), name) != required.end();
      body[name] = nullptr;
      if (!conversation_or_prompt) {
        EXPECT_EQ(call(operation, body).status, is_required ? 400 : 200) << body;
      }
      // A type that is none of the schema's.
      Json types = schema.contains("type") ? (schema["type"].is_array() ? schema["type"] : Json::array({schema["type"]})) : Json::array();
      if (types.empty()) continue;
      for (const auto& [type, value] : std::initializer_list<std::pair<std::string, Json>>{
               {"string", "no such thing"}, {"boolean", true}, {"object", {{"no such", "thing"}}}, {"array", Json::array({Json::object()})}, {"number", 0.25}}) {
        const bool allowed = std::any_of(types.begin(), types.end(), [&](const Json& t) { return t == type; });
        if (allowed) continue;
        body[name] = value;
        const ClientResponse wrong = call(operation, body);
        EXPECT_EQ(wrong.status, 400) << body;
        EXPECT_TRUE(names(wrong, name)) << body << wrong.body;
        ++checked;
        refused += types == Json::array({"null"}) ? 1 : 0;
      }
    }
  }
  EXPECT_GT(accepted, 150);
  EXPECT_GT(checked, 500);
  EXPECT_GT(refused, 50);
}

TEST_F(OpenApi, BoundsAreThoseThatAreChecked) {
  start();
  int checked = 0;
  for (const Operation& operation : operations()) {
    if (!operation.has_body()) continue;
    for (const auto& [name, schema] : operation.schema()["properties"].items()) {
      for (const auto& [bound, beyond] : std::initializer_list<std::pair<const char*, double>>{{"minimum", -1}, {"maximum", 1}}) {
        if (!schema.contains(bound)) continue;
        Json body = operation.example();
        if (name == "top_logprobs") body["logprobs"] = true;
        body[name] = schema[bound].get<double>() + beyond;
        const ClientResponse response = call(operation, body);
        EXPECT_EQ(response.status, 400) << body;
        EXPECT_TRUE(names(response, name)) << body << response.body;
        ++checked;
      }
    }
  }
  EXPECT_GT(checked, 60);
}

TEST_F(OpenApi, WhatIsNotDocumentedIsIgnored) {
  start();
  for (const Operation& operation : operations()) {
    if (!operation.has_body()) continue;
    Json body = operation.example();
    body["seed"] = 1;
    const Json without = without_ids(call(operation, body).json());
    for (const Json& value : {Json("x"), Json(5), Json::array(), Json::object()}) {
      body["unheard_of"] = value;
      EXPECT_EQ(without_ids(call(operation, body).json()), without) << operation.path;
    }
  }
}

}  // namespace
}  // namespace quern::server
