#pragma once

#include <atomic>
#include <chrono>
#include <optional>
#include <string>
#include <string_view>
#include <thread>

namespace quern::app {

/// Tells a service manager how the server is, by the protocol of sd_notify(3): datagrams to the socket in NOTIFY_SOCKET. Does nothing where
/// there is none. Thread-safe.
class ServiceNotifier {
 public:
  static constexpr std::chrono::seconds kTrust{10};
  /// Reads NOTIFY_SOCKET, WATCHDOG_USEC and WATCHDOG_PID. `trust`: how long the server counts as well after well().
  explicit ServiceNotifier(std::chrono::milliseconds trust = kTrust);
  ~ServiceNotifier();
  ServiceNotifier(const ServiceNotifier&) = delete;
  ServiceNotifier& operator=(const ServiceNotifier&) = delete;

  /// What a person sees in `systemctl status`, in words.
  void status(std::string_view text);
  /// Loading goes on: the time limit of the start begins again.
  void loading(std::string_view text);
  void ready(std::string_view text);
  /// The end may take this long; the watchdog hears no more doubts.
  void stopping(std::string_view text, std::chrono::seconds patience);
  /// The server is well, and the watchdog is told so for a while. Call it more often than `trust`.
  void well() { last_well_ = Clock::now().time_since_epoch().count(); }

 private:
  using Clock = std::chrono::steady_clock;
  void send(std::string_view message);
  void keep_alive(const std::stop_token& stop);

  std::chrono::milliseconds trust_;
  int socket_ = -1;
  std::string address_;  // as in NOTIFY_SOCKET; "@..." is an abstract one
  std::optional<std::chrono::microseconds> watchdog_;
  std::atomic<bool> stopping_{false};
  std::atomic<Clock::rep> last_well_{Clock::now().time_since_epoch().count()};
  std::jthread keeper_;
};

}  // namespace quern::app
