#pragma once

#include <openssl/types.h>

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/json.h"

namespace quern::server {

struct ClientResponse {
  int status = 0;
  std::string head;  // status line and headers
  std::string body;  // without chunk framing

  [[nodiscard]] std::string header(std::string_view name) const;
  /// The body as JSON; null when it is not.
  [[nodiscard]] Json json() const;
  /// The data of all server-sent events in the body.
  [[nodiscard]] std::vector<std::string> events() const;
  /// The names of those that have one.
  [[nodiscard]] std::vector<std::string> event_names() const;
  /// Those but [DONE], as JSON.
  [[nodiscard]] std::vector<Json> chunks() const;
};

/// How a test's client speaks TLS. It believes whatever certificate it gets.
struct ClientTls {
  std::filesystem::path certificate_file, key_file;  // its own; empty: none
  int max_version = 0;                               // TLS1_1_VERSION, ...; 0: the newest
};

/// A plain blocking HTTP/1.1 client over one socket, which also lets tests send what is not HTTP. Reads give up after five minutes
/// without a byte, so that a hanging server fails a test instead of stopping it.
class HttpClient {
 public:
  explicit HttpClient(uint16_t port);
  /// Over TLS; connected() when the handshake has succeeded.
  HttpClient(uint16_t port, const ClientTls& tls);
  /// Over a socket file.
  explicit HttpClient(const std::filesystem::path& unix_socket);
  ~HttpClient();
  HttpClient(const HttpClient&) = delete;
  HttpClient& operator=(const HttpClient&) = delete;

  [[nodiscard]] bool connected() const { return socket_ >= 0; }
  bool send(std::string_view bytes);
  /// Sends a whole request.
  bool send_request(std::string_view method, std::string_view target, std::string_view body, std::string_view extra_headers = "");
  /// The next response; empty when the connection ended before it was whole. head_only: of a HEAD request.
  std::optional<ClientResponse> read_response(bool head_only = false);
  /// Reads until what has arrived holds `text`; false when the connection ended before.
  bool read_until(std::string_view text);
  /// The server has closed the connection and nothing is left to read.
  bool at_end();
  /// The same, and over TLS with the message that nothing follows: not cut off.
  bool at_clean_end();
  /// The name (CN) in the server's certificate.
  [[nodiscard]] std::string peer_name() const;
  void finish_sending();  // a half-close
  void close();

  /// One request on a connection of its own.
  static std::optional<ClientResponse> fetch(uint16_t port, std::string_view method, std::string_view target, std::string_view body = "",
                                             std::string_view extra_headers = "");
  static std::optional<ClientResponse> post(uint16_t port, std::string_view target, const Json& body) {
    return fetch(port, "POST", target, dump_json(body), "Content-Type: application/json\r\n");
  }

 private:
  void wait_at_most_five_minutes();
  bool fill();  // reads more; false at the end
  std::optional<std::string> line();
  std::optional<std::string> bytes(size_t count);

  int socket_ = -1;
  SSL_CTX* tls_context_ = nullptr;
  SSL* tls_ = nullptr;  // null: plain
  bool clean_end_ = false;
  std::string buffer_;  // read and not yet used
};

}  // namespace quern::server
