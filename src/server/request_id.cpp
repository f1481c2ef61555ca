#include "server/request_id.h"

#include <fmt/format.h>

#include <algorithm>
#include <random>

#include "base/hash.h"

namespace quern::server {

std::string new_request_id(std::string_view prefix) {
  thread_local SplitMix64 generator = [] {
    std::random_device device;
    return SplitMix64((uint64_t{device()} << 32) | device());
  }();
  const uint64_t high = generator.next(), low = generator.next();
  return fmt::format("{}{:016x}{:016x}", prefix, high, low);
}

bool is_request_id(std::string_view id) {
  return !id.empty() && id.size() <= 128 && std::ranges::all_of(id, [](char c) { return c > ' ' && c <= '~'; });
}

std::string_view client_request_id(const HttpRequest& request) {
  const std::string_view id = request.header("X-Request-Id");
  return is_request_id(id) ? id : std::string_view();
}

void add_header(HttpAnswer& answer, std::string_view name, std::string_view value) {
  auto& headers = headers_of(answer);
  const bool there = std::ranges::any_of(headers, [&](const auto& header) { return equals_ignoring_case(header.first, name); });
  if (!there) headers.emplace_back(name, value);
}

}  // namespace quern::server
