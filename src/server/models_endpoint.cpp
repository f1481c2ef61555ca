#include "server/endpoints.h"
#include "server/error_body.h"

namespace quern::server {
namespace {

Json model_json(const Service& service, const std::string& name) {
  Json model;
  model["id"] = name;
  model["object"] = "model";
  model["created"] = service.created;
  model["owned_by"] = "quern";
  model["root"] = service.context.model_names.front();
  model["parent"] = nullptr;
  model["max_model_len"] = service.context.max_model_len;
  return model;
}

}  // namespace

HttpAnswer list_models(const ServicePtr& service, const HttpRequest&) {
  Json body;
  body["object"] = "list";
  body["data"] = Json::array();
  for (const std::string& name : service->context.model_names) body["data"].push_back(model_json(*service, name));
  return HttpResponse{200, dump_json(body)};
}

HttpAnswer get_model(const ServicePtr& service, const HttpRequest& request) {
  constexpr std::string_view kPrefix = "/v1/models/";
  const std::string name = request.path.substr(kPrefix.size());  // may itself contain slashes
  if (name.empty() || !service->knows_model(name)) return unknown_model(*service, name);
  return HttpResponse{200, dump_json(model_json(*service, name))};
}

}  // namespace quern::server
