#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <string_view>

#include "base/result.h"

namespace quern::app {

/// Reads one HTTP/1.1 response as its bytes arrive: status line, headers, and a body that is chunked, has a length, or ends with the
/// connection.
class HttpResponseReader {
 public:
  using OnBody = std::function<void(std::string_view bytes)>;
  /// `on_body` gets the body's bytes, without chunk framing, in the pieces in which they come.
  explicit HttpResponseReader(OnBody on_body) : on_body_(std::move(on_body)) {}

  /// Errors: bytes that are no HTTP/1.1 response.
  Result<void> feed(std::string_view bytes);
  /// The connection ended. An error if the response is not complete.
  Result<void> finish();

  [[nodiscard]] bool complete() const { return state_ == State::kComplete; }
  [[nodiscard]] int status() const { return status_; }
  /// By lower-case name; empty when it is absent.
  [[nodiscard]] std::string_view header(std::string_view name) const;

 private:
  enum class State : uint8_t { kStatusLine, kHeaders, kBodyOfLength, kBodyToEnd, kChunkSize, kChunkData, kChunkEnd, kTrailers, kComplete };
  Result<void> take_line(std::string_view line);
  Result<void> end_of_headers();

  OnBody on_body_;
  State state_ = State::kStatusLine;
  int status_ = 0;
  std::map<std::string, std::string, std::less<>> headers_;
  std::string line_;        // of a line that has begun
  uint64_t remaining_ = 0;  // bytes of the body or chunk still to come
};

}  // namespace quern::app
