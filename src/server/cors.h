#pragma once

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/result.h"
#include "server/http_message.h"

namespace quern::server {

/// Which pages in browsers may ask (the Fetch standard's CORS protocol). Defaults: none.
struct CorsOptions {
  std::vector<std::string> allowed_origins;  // "https://app.example"; "*": all
  std::vector<std::string> allowed_methods{"GET", "POST", "DELETE", "OPTIONS"};  // "*": all
  std::vector<std::string> allowed_headers{"*"};                       // "*": all
  bool allow_credentials = false;                                      // cookies and certificates of the browser
};

/// Thread-safe, since nothing changes.
class Cors {
 public:
  using Headers = std::vector<std::pair<std::string, std::string>>;
  Cors() = default;
  /// Errors: an origin that no browser sends, credentials for pages of everybody.
  static Result<Cors> make(CorsOptions options);

  /// The answer to a preflight request; empty when this is none. 403 when page, method or headers are not allowed.
  [[nodiscard]] std::optional<HttpResponse> preflight(const HttpRequest& request) const;
  /// What every other answer to this request has to say.
  [[nodiscard]] Headers headers(const HttpRequest& request) const;

 private:
  [[nodiscard]] bool allows_origin(std::string_view origin) const;
  CorsOptions options_;
};

}  // namespace quern::server
