#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "base/result.h"
#include "server/http_message.h"
#include "server/tls.h"

namespace quern::server {

struct HttpOptions {
  std::string host = "127.0.0.1";
  uint16_t port = 8000;                                // 0: any free port, see HttpServer::port()
  std::string unix_socket;                             // a path: listen there instead of on host and port
  TlsOptions tls;
  int32_t num_io_threads = 2;                          // sockets and streaming
  int32_t num_handler_threads = 2;                     // handlers: JSON, templates, tokenizing of large prompts
  int32_t max_connections = 4096;                      // one more is answered 503 and closed
  size_t max_head_bytes = size_t{64} << 10;            // request line and headers; more is 431
  size_t max_headers = 256;                            // their number; more is 431
  size_t max_body_bytes = size_t{32} << 20;            // more is 413
  size_t send_buffer_bytes = size_t{256} << 10;        // the kernel's, per connection: what a client that does not read costs
  std::chrono::milliseconds idle_timeout{75'000};      // for the next request to begin
  std::chrono::milliseconds progress_timeout{30'000};  // for a handshake, a head, or a piece (64 KiB) of a body or of a response
};

/// Counters since the start, and gauges.
struct HttpStats {
  int64_t connections = 0;  // open now
  uint64_t accepted = 0, refused = 0;  // connections; refused: there were too many
  uint64_t handshakes_failed = 0;      // plaintext on a TLS port included
};

/// HTTP/1.1 with keep-alive, pipelining, chunked responses and server-sent events, plain or over TLS. A handler gets whole requests and
/// gives answers; it never sees a socket. A client that closes its side while an answer is being made (also with a half-close) counts as
/// gone. Thread-safe.
class HttpServer {
 public:
  /// Called on a handler thread. Does not throw.
  using Handler = std::function<HttpAnswer(const HttpRequest&)>;
  /// Makes the body of errors that arise below the handler (malformed, too large, no more connections).
  using ErrorResponse = std::function<HttpResponse(int status, std::string_view message)>;
  /// Looks at a request whose body has not been read: a response here ends it, and the body is not worth memory. Quick, on an IO thread.
  using Gate = std::function<std::optional<HttpResponse>(const HttpRequest&)>;
  /// Told of every request when it is over. Quick, on an IO thread.
  using Observer = std::function<void(const HttpExchange&)>;

  /// Listens when it returns. Errors: a host that does not resolve, a port or socket that is in use or not permitted, TLS files.
  static Result<std::unique_ptr<HttpServer>> start(const HttpOptions& options, Handler handler, ErrorResponse error_response,
                                                   Gate gate = {}, Observer observer = {});
  /// Closes every connection at once.
  virtual ~HttpServer() = default;

  [[nodiscard]] virtual uint16_t port() const = 0;
  [[nodiscard]] virtual HttpStats stats() const = 0;
  /// Reads the TLS files again, for the connections to come. Errors: as at the start; the old certificate then stays.
  virtual Result<void> reload_tls() = 0;
  /// No new connections or requests; returns when the answers under way are sent or `timeout` has passed (then they are cut off).
  virtual void drain_and_stop(std::chrono::milliseconds timeout) = 0;
};

}  // namespace quern::server
