#include "app/served_model.h"

#include "app/json_members.h"

namespace quern::app {

Result<std::string> served_model(const HttpAddress& address, const std::vector<std::string>& headers, std::string_view option) {
  Result<HttpReply> reply = http_call(address, {.path = "/v1/models", .headers = headers});
  if (!reply) return reply.error().with_context(address.host());
  if (reply->status == 401)
    return make_error(ErrorCode::kUnauthenticated, "{} wants an API key; the environment variable OPENAI_API_KEY gives it", address.host());
  const Result<Json> models = parse_json(reply->body, "/v1/models");
  const Json* list = models ? array_of(*models, "data") : nullptr;
  const std::string_view name = list != nullptr && !list->empty() ? text_of(list->front(), "id") : std::string_view();
  if (reply->status != 200 || name.empty())
    return make_error(ErrorCode::kUnavailable, "{}: /v1/models answered {} and names no model; is the server ready? {} gives the name",
                      address.host(), reply->status, option);
  return std::string(name);
}

}  // namespace quern::app
