#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "app/option.h"
#include "server/server.h"

// Who may ask `quern serve`, over what, how much and for how long.

namespace quern::app {

struct NetworkOptions {
  std::string host = "127.0.0.1";
  int32_t port = 8000;
  std::string unix_socket;
  server::TlsOptions tls;
  std::vector<std::string> api_keys;
  std::vector<std::filesystem::path> api_key_files;
  int32_t max_requests_per_key = 0;
  server::CorsOptions cors;
  std::string access_log = "stdout";
  bool disable_access_log = false;
  std::vector<std::string> paths_not_logged;
  double request_timeout = 0, first_token_timeout = 0;       // seconds, 0: none
  double client_timeout = 30, keep_alive_timeout = 75;       // seconds
  int32_t max_connections = 4096;
  std::optional<uint64_t> max_header_size, max_body_size;    // bytes
};

/// The options that set them, under their headings.
std::vector<OptionGroup> network_groups(NetworkOptions& options);

/// Keys from --api-key, then from the files in their order; where neither was given, from the environment variable QUERN_API_KEY.
/// Errors: a file that cannot be read or has no key. Warns of a file that others can read.
Result<std::vector<std::string>> collect_api_keys(const NetworkOptions& options);

/// What the server needs to know of them.
Result<server::ServerOptions> server_options(const NetworkOptions& options);
server::TimeLimits time_limits(const NetworkOptions& options);

/// Where the server listens, for the log: "https://127.0.0.1:8000", "http+unix:/run/quern.sock".
std::string url_of(const NetworkOptions& options, uint16_t port);

}  // namespace quern::app
