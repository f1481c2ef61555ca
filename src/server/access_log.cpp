#include "server/access_log.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <iterator>
#include <utility>

#include "base/check.h"
#include "base/log.h"
#include "server/json_writer.h"

namespace quern::server {
namespace {

constexpr size_t kMaxPath = 1024;  // bytes of a path in the log

bool is_file(const std::string& target) { return target != "stdout" && target != "stderr"; }

int open_file(const std::string& path) { return ::open(path.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0640); }

void add_text(std::string& line, std::string_view name, std::string_view value) {
  if (value.empty()) return;
  fmt::format_to(std::back_inserter(line), ",\"{}\":", name);
  append_json_string(line, value);
}

}  // namespace

std::string_view outcome_name(const HttpExchange& exchange) {
  if (exchange.facts && exchange.facts->timed_out) return "timeout";
  switch (exchange.outcome) {
    case HttpOutcome::kComplete: return "complete";
    case HttpOutcome::kClientLeft: return "client_left";
    case HttpOutcome::kClientSlow: return "client_slow";
    case HttpOutcome::kCutOff: return "cut_off";
  }
  CHECK_UNREACHABLE();
}

std::string access_line(const HttpExchange& exchange, std::string_view time) {
  std::string line = fmt::format("{{\"time\":\"{}\"", time);
  add_text(line, "client", exchange.client);
  add_text(line, "method", std::string_view(exchange.method).substr(0, 32));
  add_text(line, "path", std::string_view(exchange.path).substr(0, kMaxPath));
  const auto out = std::back_inserter(line);
  fmt::format_to(out, ",\"status\":{},\"outcome\":\"{}\",\"ms\":{:.3f},\"bytes_in\":{},\"bytes\":{}", exchange.status, outcome_name(exchange),
                 exchange.seconds * 1e3, exchange.bytes_received, exchange.bytes_sent);
  if (exchange.facts) {
    const RequestFacts& facts = *exchange.facts;
    add_text(line, "request_id", facts.request_id);
    if (facts.key_idx >= 0) fmt::format_to(out, ",\"key\":{}", facts.key_idx);
    if (facts.generated) {
      fmt::format_to(out, ",\"prompt_tokens\":{},\"cached_tokens\":{},\"completion_tokens\":{}", facts.prompt_tokens, facts.cached_tokens,
                     facts.completion_tokens);
      if (facts.first_token_seconds >= 0) fmt::format_to(out, ",\"ttft_ms\":{:.3f}", facts.first_token_seconds * 1e3);
    }
    add_text(line, "trace_id", facts.trace_id);
    add_text(line, "span_id", facts.span_id);
  }
  line += '}';
  return line;
}

Result<std::unique_ptr<AccessLog>> AccessLog::open(const AccessLogOptions& options) {
  int file = options.target == "stderr" ? STDERR_FILENO : STDOUT_FILENO;
  if (is_file(options.target)) {
    file = open_file(options.target);
    if (file < 0) return invalid_argument("--access-log {}: cannot be opened: {}", options.target, std::generic_category().message(errno));
  }
  return std::unique_ptr<AccessLog>(new AccessLog(options, file));
}

AccessLog::AccessLog(AccessLogOptions options, int file) : options_(std::move(options)), file_(file), thread_([this] { run(); }) {
  pthread_setname_np(thread_.native_handle(), "access-log");
}

AccessLog::~AccessLog() {
  ending_ = true;
  lines_.close();
  thread_.join();
  if (is_file(options_.target)) ::close(file_);
}

void AccessLog::write(const HttpExchange& exchange) {
  if (exchange.status < 500 && std::ranges::find(options_.left_out, exchange.path) != options_.left_out.end()) return;
  if (!lines_.try_push(access_line(exchange, timestamp_now()) + "\n")) ++num_dropped_;
}

void AccessLog::run() {
  sigset_t pipe;  // whoever read the log may have ended, and the server goes on
  sigemptyset(&pipe);
  sigaddset(&pipe, SIGPIPE);
  pthread_sigmask(SIG_BLOCK, &pipe, nullptr);
  constexpr size_t kBatch = size_t{64} << 10;
  while (std::optional<std::string> lines = lines_.pop()) {
    while (lines->size() < kBatch) {
      std::optional<std::string> more = lines_.try_pop();
      if (!more) break;
      *lines += *more;
    }
    if (reopen_.exchange(false) && is_file(options_.target)) {
      if (const int file = open_file(options_.target); file >= 0) {
        ::close(std::exchange(file_, file));
      } else {
        log_warning("--access-log {}: cannot be opened again: {}", options_.target, std::generic_category().message(errno));
      }
    }
    if (!write_out(*lines)) return;
  }
}

/// Waits for whoever reads; false when the log is to end and nobody does.
bool AccessLog::write_out(std::string_view lines) {
  while (!lines.empty()) {
    pollfd state{file_, POLLOUT, 0};
    const int ready = ::poll(&state, 1, 1000);
    if (ready == 0 && ending_) return false;
    if (ready <= 0) continue;
    const ssize_t written = ::write(file_, lines.data(), std::min<size_t>(lines.size(), 4096));  // PIPE_BUF: does not block after POLLOUT
    if (written < 0 && errno != EINTR && errno != EAGAIN) {
      ++num_dropped_;  // a full disk, a closed pipe: the server goes on
      return true;
    }
    if (written > 0) lines.remove_prefix(static_cast<size_t>(written));
  }
  return true;
}

}  // namespace quern::server
