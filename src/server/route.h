#pragma once

#include <span>
#include <string_view>

#include "base/json.h"
#include "server/endpoints.h"
#include "server/error_body.h"
#include "server/http_message.h"
#include "server/json_fields.h"

namespace quern::server {

/// One thing that can be asked. The table of them (api.cpp) dispatches requests, and /openapi.json is made from it.
struct Route {
  std::string_view method;
  std::string_view path;  // "/v1/models/{model}": the braces stand for anything; one that ends with '/' for everything below it
  HttpAnswer (*endpoint)(const ServicePtr&, const HttpRequest&);  // null: answered by Api itself, also before a model is loaded and without a key
  std::string_view summary = {};                                  // empty: not part of the documented API
  void (*describe)(FieldLog&) = nullptr;                          // the members of its JSON body; null: it has none
  std::string_view reader = {};                                   // whose fields these are in openapi.cpp
  Dialect dialect = Dialect::kOpenAi;
};

/// The path belongs to the pattern.
bool matches(std::string_view pattern, std::string_view path);

/// The OpenAPI 3.1 document of these routes.
Json openapi_document(std::span<const Route> routes, std::string_view version);

}  // namespace quern::server
