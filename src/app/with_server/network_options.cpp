#include "app/with_server/network_options.h"

#include <sys/stat.h>

#include <cstdlib>

#include "base/file.h"
#include "base/json.h"
#include "base/log.h"

namespace quern::app {
namespace {

constexpr double kMaxSeconds = 7 * 24 * 3600.0;

std::chrono::milliseconds milliseconds(double seconds) { return std::chrono::milliseconds(static_cast<int64_t>(seconds * 1000)); }

std::string_view trimmed(std::string_view text) {
  constexpr std::string_view kBlanks = " \t\r";
  const size_t begin = text.find_first_not_of(kBlanks);
  if (begin == std::string_view::npos) return {};
  return text.substr(begin, text.find_last_not_of(kBlanks) - begin + 1);
}

/// Words as vLLM takes them, '["a", "b"]', or as people write them, a,b. The first occurrence replaces the default, later ones add to it.
Setter to_words(std::vector<std::string>& target) {
  return [&target, first = true](std::string_view text) mutable -> Result<void> {
    std::vector<std::string> words;
    if (text.starts_with('[')) {
      ASSIGN_OR_RETURN(const Json list, parse_json(text, "the list"));
      for (const Json& entry : list) {
        if (!entry.is_string()) return invalid_argument("{} is not a list of strings", text);
        words.push_back(entry.get<std::string>());
      }
    } else {
      for (const std::string_view word : split_at_commas(text)) words.emplace_back(trimmed(word));
    }
    for (const std::string& word : words) {
      if (word.empty()) return invalid_argument("'{}' has an empty entry", text);
    }
    if (std::exchange(first, false)) target.clear();
    target.insert(target.end(), words.begin(), words.end());
    return {};
  };
}

template <class Value>
Setter to_more(std::vector<Value>& target) {
  return [&target](std::string_view text) -> Result<void> {
    target.emplace_back(text);
    return {};
  };
}

Result<void> add_keys_of_file(const std::filesystem::path& file, std::vector<std::string>& keys) {
  Result<std::string> text = read_file(file);
  if (!text) return std::move(text).error().with_context("--api-key-file");
  struct stat state {};
  if (::stat(file.c_str(), &state) == 0 && (state.st_mode & S_IROTH) != 0) {
    log_warning("--api-key-file {}: every user of this machine can read the keys; `chmod 600` it", file.string());
  }
  const size_t before = keys.size();
  for (std::string_view rest = *text; !rest.empty();) {
    const size_t end = std::min(rest.find('\n'), rest.size());
    const std::string_view line = trimmed(rest.substr(0, end));
    rest.remove_prefix(std::min(end + 1, rest.size()));
    if (!line.empty() && line[0] != '#') keys.emplace_back(line);
  }
  if (keys.size() == before) return invalid_argument("--api-key-file {}: has no key; one stands on each line, lines with # are comments", file.string());
  return {};
}

}  // namespace

std::vector<OptionGroup> network_groups(NetworkOptions& o) {
  using server::ClientCertificates;
  const auto seconds = [](double& target) { return to_number(target, 0, kMaxSeconds); };
  OptionGroup listening{
      "Network",
      {
          {"--host", "NAME", "Address to listen on (default 127.0.0.1: this machine alone)", to_text(o.host)},
          {"--port", "N", "Port (default 8000); 0 takes a free one, which the log names", to_integer(o.port, 0, 65535)},
          {"--uds", "PATH", "Listen on a Unix domain socket instead of host and port", naming_a_path(to_text(o.unix_socket))},
          {"--ssl-certfile", "FILE", "Serve HTTPS with this certificate (PEM, then its chain)", to_path(o.tls.certificate_file)},
          {"--ssl-keyfile", "FILE", "Its private key (default: in the same file)", to_path(o.tls.key_file)},
          {"--ssl-ca-certs", "FILE", "Who may have signed the certificates of clients", to_path(o.tls.ca_file)},
          {"--ssl-cert-reqs", "N", "Certificates of clients: 0 not asked for (default), 1 checked when sent, 2 required",
           to_choice(o.tls.client_certificates, {{"0", ClientCertificates::kNone},
                                                 {"1", ClientCertificates::kOptional},
                                                 {"2", ClientCertificates::kRequired}})},
      }};
  OptionGroup access{
      "Access",
      {
          {"--api-key", "KEY", "Clients must send this key, may be repeated (default: QUERN_API_KEY from the environment)", to_more(o.api_keys), true},
          {"--api-key-file", "FILE", "Keys, one a line; may be repeated", naming_a_path(to_more(o.api_key_files)), true},
          {"--max-requests-per-key", "N", "Requests of one key that are answered at once; more are 429 (default: no limit)",
           to_integer(o.max_requests_per_key, 1, 1 << 20)},
          {"--allowed-origins", "LIST", "Web pages that may ask, as origins; * for all (default: none)", to_words(o.cors.allowed_origins), true},
          {"--allowed-methods", "LIST", "Methods that they may use (default GET,POST,DELETE,OPTIONS)", to_words(o.cors.allowed_methods), true},
          {"--allowed-headers", "LIST", "Headers that they may send (default *)", to_words(o.cors.allowed_headers), true},
          {"--allow-credentials", "", "They may send what the browser knows of the visitor", to_flag(o.cors.allow_credentials)},
      }};
  OptionGroup limits{
      "Limits",
      {
          {"--request-timeout", "SECONDS", "Longest time for an answer; then it fails with 504 (default 0: any)", seconds(o.request_timeout)},
          {"--first-token-timeout", "SECONDS", "Longest time until its first token (default 0: any)", seconds(o.first_token_timeout)},
          {"--client-timeout", "SECONDS", "A client that sends or takes less than 64 KiB in this time is disconnected (default 30)",
           to_number(o.client_timeout, 0.1, kMaxSeconds)},
          {"--keep-alive-timeout", "SECONDS", "How long an idle connection stays open (default 75)", to_number(o.keep_alive_timeout, 0.1, kMaxSeconds)},
          {"--max-connections", "N", "Open connections; more are answered with 503 (default 4096)", to_integer(o.max_connections, 1, 1 << 20)},
          {"--max-header-size", "SIZE", "Of a request, all headers together; more is 431 (default 64K)", to_size(o.max_header_size)},
          {"--max-body-size", "SIZE", "Of a request; more is 413 (default 32M)", to_size(o.max_body_size)},
      }};
  OptionGroup logs{
      "Access log",
      {
          {"--access-log", "WHERE", "A JSON line per request: stdout (default), stderr or a file", naming_a_path(to_text(o.access_log))},
          {"--disable-access-log,--disable-uvicorn-access-log", "", "No such lines", to_flag(o.disable_access_log)},
          {"--disable-access-log-for-endpoints", "LIST", "None for these paths, such as /health,/metrics", to_words(o.paths_not_logged), true},
      }};
  return {std::move(listening), std::move(access), std::move(limits), std::move(logs)};
}

Result<std::vector<std::string>> collect_api_keys(const NetworkOptions& options) {
  std::vector<std::string> keys = options.api_keys;
  for (const std::filesystem::path& file : options.api_key_files) RETURN_IF_ERROR(add_keys_of_file(file, keys));
  if (!keys.empty()) return keys;
  if (const char* key = std::getenv("QUERN_API_KEY"); key != nullptr && *key != '\0') return std::vector<std::string>{key};
  for (const char* other : {"VLLM_API_KEY", "LLAMA_API_KEY"}) {
    if (std::getenv(other) != nullptr) log_warning("{} is set, and quern does NOT read it: no key is asked for. QUERN_API_KEY is read, or --api-key", other);
  }
  return keys;
}

Result<server::ServerOptions> server_options(const NetworkOptions& options) {
  server::ServerOptions result;
  if (options.tls.enabled() && !options.unix_socket.empty()) return invalid_argument("--uds and --ssl-certfile: a socket file needs no encryption");
  if (!options.tls.enabled() && (!options.tls.key_file.empty() || !options.tls.ca_file.empty() ||
                                 options.tls.client_certificates != server::ClientCertificates::kNone)) {
    return invalid_argument("--ssl-keyfile, --ssl-ca-certs and --ssl-cert-reqs need --ssl-certfile");
  }
  server::HttpOptions& http = result.http;
  http.host = options.host;
  http.port = static_cast<uint16_t>(options.port);
  http.unix_socket = options.unix_socket;
  http.tls = options.tls;
  http.max_connections = options.max_connections;
  http.progress_timeout = milliseconds(options.client_timeout);
  http.idle_timeout = milliseconds(options.keep_alive_timeout);
  constexpr uint64_t kMaxHeaderSize = uint64_t{64} << 20, kMaxBodySize = uint64_t{1} << 40;
  if (options.max_header_size) {
    if (*options.max_header_size < 1024 || *options.max_header_size > kMaxHeaderSize) return invalid_argument("--max-header-size: 1K to 64M");
    http.max_head_bytes = *options.max_header_size;
  }
  if (options.max_body_size) {
    if (*options.max_body_size < 1 || *options.max_body_size > kMaxBodySize) return invalid_argument("--max-body-size: 1 byte to 1T");
    http.max_body_bytes = *options.max_body_size;
  }
  ASSIGN_OR_RETURN(result.api.api_keys, collect_api_keys(options));
  result.api.max_requests_per_key = options.max_requests_per_key;
  result.api.cors = options.cors;
  if (!options.disable_access_log) result.access_log = {options.access_log, options.paths_not_logged};
  return result;
}

server::TimeLimits time_limits(const NetworkOptions& options) {
  return {.first_token = milliseconds(options.first_token_timeout), .total = milliseconds(options.request_timeout)};
}

std::string url_of(const NetworkOptions& options, uint16_t port) {
  if (!options.unix_socket.empty()) return "http+unix:" + options.unix_socket;
  const bool v6 = options.host.find(':') != std::string::npos;
  return fmt::format("{}://{}{}{}:{}", options.tls.enabled() ? "https" : "http", v6 ? "[" : "", options.host, v6 ? "]" : "", port);
}

}  // namespace quern::app
