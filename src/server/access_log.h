#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "base/bounded_queue.h"
#include "base/result.h"
#include "server/http_message.h"

namespace quern::server {

struct AccessLogOptions {
  std::string target = "stdout";        // "stdout", "stderr" or a file, to which lines are appended; empty: no log
  std::vector<std::string> left_out;    // paths whose requests are not logged unless they fail with 500 or above
};

/// One JSON object a line for every request (docs/operations.md lists the members). Lines are written by a thread of its own: a pipe that
/// nobody reads holds up no request; what does not fit the queue is dropped and counted. Thread-safe.
class AccessLog {
 public:
  /// Errors: a file that cannot be opened.
  static Result<std::unique_ptr<AccessLog>> open(const AccessLogOptions& options);
  /// Writes what is queued.
  ~AccessLog();
  AccessLog(const AccessLog&) = delete;
  AccessLog& operator=(const AccessLog&) = delete;

  void write(const HttpExchange& exchange);
  /// Opens the file again, for programs that rotate logs by renaming. Does nothing for stdout and stderr.
  void reopen() { reopen_ = true; }
  [[nodiscard]] uint64_t num_dropped() const { return num_dropped_; }

 private:
  AccessLog(AccessLogOptions options, int file);
  void run();
  bool write_out(std::string_view lines);

  AccessLogOptions options_;
  int file_;  // the writing thread's
  BoundedQueue<std::string> lines_{4096};
  std::atomic<uint64_t> num_dropped_{0};
  std::atomic<bool> reopen_{false}, ending_{false};
  std::jthread thread_;
};

/// The line of one request, without the line break. `time`: when it ended, as "2026-11-30T12:00:00.123Z".
std::string access_line(const HttpExchange& exchange, std::string_view time);

/// "complete", "client_left", "client_slow", "cut_off", or "timeout" where a time limit of the server ended it.
std::string_view outcome_name(const HttpExchange& exchange);

}  // namespace quern::server
