#include "app/http_response.h"

#include <algorithm>
#include <cctype>
#include <charconv>

namespace quern::app {
namespace {

constexpr size_t kMaxLine = 64 << 10;

std::string lower(std::string_view text) {
  std::string result(text);
  std::transform(result.begin(), result.end(), result.begin(), [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  return result;
}

template <class Integer>
bool read_integer(std::string_view text, Integer& value, int base) {
  const auto [end, status] = std::from_chars(text.data(), text.data() + text.size(), value, base);
  return status == std::errc{} && end == text.data() + text.size();
}

}  // namespace

std::string_view HttpResponseReader::header(std::string_view name) const {
  const auto found = headers_.find(name);
  return found == headers_.end() ? std::string_view() : found->second;
}

Result<void> HttpResponseReader::feed(std::string_view bytes) {
  while (!bytes.empty() && state_ != State::kComplete) {
    if (state_ == State::kBodyToEnd) {
      on_body_(bytes);
      return {};
    }
    if (state_ == State::kBodyOfLength || state_ == State::kChunkData) {
      const std::string_view body = bytes.substr(0, std::min<uint64_t>(remaining_, bytes.size()));
      on_body_(body);
      bytes.remove_prefix(body.size());
      remaining_ -= body.size();
      if (remaining_ == 0) state_ = state_ == State::kChunkData ? State::kChunkEnd : State::kComplete;
      continue;
    }
    const size_t newline = bytes.find('\n');
    line_ += bytes.substr(0, newline);
    if (line_.size() > kMaxLine)
      return make_error(ErrorCode::kUnavailable, "the server's answer has a line of more than {} bytes", kMaxLine);
    if (newline == std::string_view::npos) return {};
    bytes.remove_prefix(newline + 1);
    if (!line_.empty() && line_.back() == '\r') line_.pop_back();
    const std::string line = std::move(line_);
    line_.clear();
    RETURN_IF_ERROR(take_line(line));
  }
  return {};
}

Result<void> HttpResponseReader::take_line(std::string_view line) {
  switch (state_) {
    case State::kStatusLine:
      if (!line.starts_with("HTTP/1.") || line.size() < 12 || !read_integer(line.substr(9, 3), status_, 10))
        return make_error(ErrorCode::kUnavailable, "this is not an HTTP server: its answer begins with '{}'", line.substr(0, 40));
      state_ = State::kHeaders;
      return {};
    case State::kHeaders: {
      if (line.empty()) return end_of_headers();
      const size_t colon = line.find(':');
      if (colon == std::string_view::npos) return make_error(ErrorCode::kUnavailable, "the server's answer has a header without a colon");
      const size_t begin = std::min(line.find_first_not_of(' ', colon + 1), line.size());
      headers_.insert_or_assign(lower(line.substr(0, colon)), std::string(line.substr(begin)));
      return {};
    }
    case State::kChunkSize:
      if (!read_integer(line.substr(0, line.find_first_of("; ")), remaining_, 16))
        return make_error(ErrorCode::kUnavailable, "the server's answer has a broken chunk size '{}'", line.substr(0, 20));
      state_ = remaining_ == 0 ? State::kTrailers : State::kChunkData;
      return {};
    case State::kChunkEnd:
      if (!line.empty()) return make_error(ErrorCode::kUnavailable, "the server's answer has a chunk that is longer than it says");
      state_ = State::kChunkSize;
      return {};
    case State::kTrailers:
      if (line.empty()) state_ = State::kComplete;
      return {};
    case State::kBodyOfLength:
    case State::kBodyToEnd:
    case State::kChunkData:
    case State::kComplete: break;
  }
  CHECK_UNREACHABLE();
}

Result<void> HttpResponseReader::end_of_headers() {
  if (status_ / 100 == 1) {  // 100 Continue: the answer is still to come
    state_ = State::kStatusLine;
    headers_.clear();
    return {};
  }
  if (lower(header("transfer-encoding")).find("chunked") != std::string::npos) {
    state_ = State::kChunkSize;
  } else if (const std::string_view length = header("content-length"); !length.empty()) {
    if (!read_integer(length, remaining_, 10))
      return make_error(ErrorCode::kUnavailable, "the server's answer has a broken Content-Length");
    state_ = remaining_ == 0 ? State::kComplete : State::kBodyOfLength;
  } else {
    state_ = status_ == 204 || status_ == 304 ? State::kComplete : State::kBodyToEnd;
  }
  return {};
}

Result<void> HttpResponseReader::finish() {
  if (state_ == State::kBodyToEnd) state_ = State::kComplete;
  if (state_ != State::kComplete)
    return make_error(ErrorCode::kUnavailable, "the server closed the connection before its answer was complete");
  return {};
}

}  // namespace quern::app
