#pragma once

#include <chrono>
#include <condition_variable>
#include <mutex>
#include <string>
#include <string_view>
#include <thread>

namespace quern::app {

/// Ends the process with kFailure if this object is still there after `timeout`: threads that wait for a lost device may wait for ever, and
/// whoever would start the program anew waits for its end.
class ExitDeadline {
 public:
  /// `what` goes on then, in the log.
  explicit ExitDeadline(std::chrono::seconds timeout, std::string_view what = "something still waits for the devices");

 private:
  std::mutex mutex_;
  std::condition_variable_any never_;
  std::jthread thread_;
};

}  // namespace quern::app
