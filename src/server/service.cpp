#include <algorithm>
#include <ctime>
#include <random>

#include "base/hash.h"
#include "server/endpoints.h"
#include "server/error_body.h"

namespace quern::server {
namespace {

uint64_t random_seed() {
  std::random_device device;
  return (uint64_t{device()} << 32) | device();
}

}  // namespace

Service::Service(ServerContext c)
    : context(std::move(c)),
      created(std::time(nullptr)),
      metrics(context.model_names.front(), context.max_model_len),
      constraints(context.tokenizer, context.engine->limits().vocab_size),
      seed_state_(context.seed ? *context.seed : random_seed()) {}

int32_t Service::window() const {
  constexpr int64_t kBlockSize = 64;
  return static_cast<int32_t>(std::min<int64_t>(context.max_model_len, context.engine->limits().num_blocks * kBlockSize));
}

RequestLimits Service::limits() const { return {context.engine->limits().vocab_size, context.max_model_len}; }

bool Service::knows_model(const std::string& name) const {
  return name.empty() || std::ranges::find(context.model_names, name) != context.model_names.end();
}

uint64_t Service::seed_for(const std::optional<uint64_t>& given) {
  return given ? *given : mix64(seed_state_.fetch_add(0x9e3779b97f4a7c15ull, std::memory_order_relaxed));
}

Error unknown_model_error(const Service& service, std::string_view name) {
  Error error = make_error(ErrorCode::kNotFound, "the model \"{}\" does not exist; this server has \"{}\"", name.substr(0, 256),
                           service.context.model_names.front());
  error.field = "model";
  return error;
}

HttpResponse unknown_model(const Service& service, std::string_view name) {
  return error_response(unknown_model_error(service, name), "model_not_found");
}

}  // namespace quern::server
