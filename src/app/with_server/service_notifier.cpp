#include "app/with_server/service_notifier.h"

#include <fmt/format.h>
#include <pthread.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <condition_variable>
#include <mutex>

#include "app/option.h"
#include "base/log.h"

namespace quern::app {
namespace {

/// How long a step of loading may take before the service manager gives up.
constexpr std::chrono::microseconds kLoadingPatience = std::chrono::minutes(10);

std::string text_of_variable(const char* name) {
  const char* text = std::getenv(name);
  return text == nullptr ? "" : text;
}

std::string one_line(std::string_view text) {
  std::string line(text);
  std::replace(line.begin(), line.end(), '\n', ' ');
  return line;
}

}  // namespace

ServiceNotifier::ServiceNotifier(std::chrono::milliseconds trust) : trust_(trust), address_(text_of_variable("NOTIFY_SOCKET")) {
  if (address_.empty()) return;
  if (address_[0] != '/' && address_[0] != '@') {
    log_warning("NOTIFY_SOCKET is {}, which is neither a path nor an abstract socket; nobody is notified", address_);
    return;
  }
  socket_ = ::socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0);
  const std::string process = text_of_variable("WATCHDOG_PID");
  const Result<int64_t> microseconds = parse_integer(text_of_variable("WATCHDOG_USEC"));
  if (!microseconds || *microseconds <= 0 || (!process.empty() && process != std::to_string(::getpid()))) return;
  watchdog_ = std::chrono::microseconds(*microseconds);
  keeper_ = std::jthread([this](const std::stop_token& stop) { keep_alive(stop); });
  pthread_setname_np(keeper_.native_handle(), "watchdog");
}

ServiceNotifier::~ServiceNotifier() {
  keeper_ = {};
  if (socket_ >= 0) ::close(socket_);
}

void ServiceNotifier::status(std::string_view text) { send("STATUS=" + one_line(text)); }

void ServiceNotifier::loading(std::string_view text) {
  send(fmt::format("STATUS={}\nEXTEND_TIMEOUT_USEC={}", one_line(text), kLoadingPatience.count()));
}

void ServiceNotifier::ready(std::string_view text) { send("READY=1\nSTATUS=" + one_line(text)); }

void ServiceNotifier::stopping(std::string_view text, std::chrono::seconds patience) {
  stopping_ = true;
  send(fmt::format("STOPPING=1\nSTATUS={}\nEXTEND_TIMEOUT_USEC={}", one_line(text), std::chrono::microseconds(patience).count()));
}

void ServiceNotifier::send(std::string_view message) {
  if (socket_ < 0) return;
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  if (address_.size() >= sizeof address.sun_path) return;
  std::memcpy(address.sun_path, address_.data(), address_.size());
  if (address.sun_path[0] == '@') address.sun_path[0] = '\0';
  const auto size = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + address_.size());
  // A manager that does not read must not hold up the server.
  const auto sent = ::sendto(socket_, message.data(), message.size(), MSG_NOSIGNAL | MSG_DONTWAIT, reinterpret_cast<const sockaddr*>(&address), size);
  if (sent < 0) log_debug("the service manager at {} could not be notified: {}", address_, std::strerror(errno));
}

void ServiceNotifier::keep_alive(const std::stop_token& stop) {
  std::mutex mutex;
  std::condition_variable_any wake;
  std::unique_lock lock(mutex);
  while (!stop.stop_requested()) {
    const auto age = Clock::now() - Clock::time_point(Clock::duration(last_well_));
    if (age < trust_ || stopping_) send("WATCHDOG=1");
    wake.wait_for(lock, stop, *watchdog_ / 3, [] { return false; });
  }
}

}  // namespace quern::app
