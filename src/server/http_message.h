#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

namespace quern::server {

/// One parsed request; header names compare without case.
struct HttpRequest {
  std::string method;  // "GET", "POST", ...
  std::string path;    // percent-decoded, without the query
  std::string query;   // as sent, without '?'
  std::vector<std::pair<std::string, std::string>> headers;
  std::string body;

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
  std::vector<std::pair<std::string, std::string>> headers;  // added to those of the response
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

/// "Bad Request" for 400.
std::string_view http_reason(int status);
/// Percent-decoding; a malformed escape stays as it is.
std::string percent_decode(std::string_view text);
/// Equal but for the case of ASCII letters.
bool equals_ignoring_case(std::string_view a, std::string_view b);

}  // namespace quern::server
