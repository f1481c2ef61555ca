#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

namespace quern::server {

/// What the API knows of a request and the connection does not: for the access log and the metrics.
struct RequestFacts {
  std::string_view route;                // the pattern that the path matched, of static duration; empty: none
  std::string request_id;                // as in the answer
  std::string trace_id, span_id;         // W3C trace context, hexadecimal; empty: the client sent none
  int32_t key_idx = -1;                  // which of the server's keys was sent; never the key
  bool generated = false;                // the numbers below are known
  int32_t prompt_tokens = 0, cached_tokens = 0, completion_tokens = 0;
  double first_token_seconds = -1;       // since the engine has the request; below 0: no token yet
  bool timed_out = false;                // a time limit of the server ended it
};

/// One parsed request; header names compare without case.
struct HttpRequest {
  std::string method;  // "GET", "POST", ...
  std::string path;    // percent-decoded, without the query
  std::string query;   // as sent, without '?'
  std::vector<std::pair<std::string, std::string>> headers;
  std::string body;
  std::shared_ptr<RequestFacts> facts = std::make_shared<RequestFacts>();  // the handler fills it in

  /// The first header of this name, or empty.
  [[nodiscard]] std::string_view header(std::string_view name) const;
};

struct HttpResponse {
  int status = 200;
  std::string body;
  std::string content_type = "application/json";
  std::vector<std::pair<std::string, std::string>> headers;  // values without line breaks
};

/// The part of an answer that arrives later. The connection owns it, asks it from one thread at a time, and destroys it early when
/// the client has left: that is how a request is cancelled.
class Awaited {
 public:
  virtual ~Awaited() = default;
  /// `wake` may be called on any thread, often, and also after this object is gone; it is called whenever asking again is worth it.
  virtual void on_ready(std::function<void()> wake) = 0;
  /// It has to be asked again by then, also without a wake.
  [[nodiscard]] virtual std::chrono::steady_clock::time_point deadline() const { return std::chrono::steady_clock::time_point::max(); }
  /// Fills in what is known so far.
  virtual void describe(RequestFacts&) const {}
  std::vector<std::pair<std::string, std::string>> headers;  // added to those of the response
  std::shared_ptr<const void> held;                          // let go with this object: a place among those of its key
};

class DeferredResponse : public Awaited {
 public:
  /// The response once it is complete. Does not block.
  virtual std::optional<HttpResponse> poll() = 0;
};

/// A text/event-stream with status 200.
class EventStream : public Awaited {
 public:
  /// Appends the events that are ready to `out`; false when they were the last. Does not block, and is not called again before `out`
  /// has been handed to the client's socket: a slow client slows down only itself.
  virtual bool read(std::string& out) = 0;
};

using HttpAnswer = std::variant<HttpResponse, std::unique_ptr<DeferredResponse>, std::unique_ptr<EventStream>>;

enum class HttpOutcome : uint8_t {
  kComplete,    // the whole answer was sent
  kClientLeft,  // the client closed the connection before
  kClientSlow,  // it took or sent too little for the progress timeout
  kCutOff,      // the server stopped before
};

/// One request and what became of it.
struct HttpExchange {
  std::string method, path;  // empty when the request was not readable
  std::string client;        // "127.0.0.1:50000", "[::1]:50000" or "unix"
  int status = 0;            // 499 when the client left before an answer began
  HttpOutcome outcome = HttpOutcome::kComplete;
  double seconds = 0;           // since its head was complete
  uint64_t bytes_received = 0;  // the body
  uint64_t bytes_sent = 0;      // head and body
  std::shared_ptr<const RequestFacts> facts;
};

/// The headers that the answer will have, of whatever kind it is.
std::vector<std::pair<std::string, std::string>>& headers_of(HttpAnswer& answer);

/// "Bad Request" for 400.
std::string_view http_reason(int status);
/// Percent-decoding; a malformed escape stays as it is.
std::string percent_decode(std::string_view text);
/// Equal but for the case of ASCII letters.
bool equals_ignoring_case(std::string_view a, std::string_view b);

}  // namespace quern::server
