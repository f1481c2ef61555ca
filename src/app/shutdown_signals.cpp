#include "app/shutdown_signals.h"

#include <pthread.h>
#include <signal.h>
#include <unistd.h>

#include "base/log.h"

namespace quern::app {
namespace {

sigset_t shutdown_set() {
  sigset_t set;
  sigemptyset(&set);
  sigaddset(&set, SIGTERM);
  sigaddset(&set, SIGINT);
  sigaddset(&set, SIGUSR1);
  return set;
}

}  // namespace

ShutdownSignals::ShutdownSignals() {
  const sigset_t set = shutdown_set();
  pthread_sigmask(SIG_BLOCK, &set, nullptr);
  thread_ = std::jthread([this](const std::stop_token& stop) { run(stop); });
  pthread_setname_np(thread_.native_handle(), "signals");
}

ShutdownSignals::~ShutdownSignals() {
  thread_.request_stop();
  thread_.join();
}

void ShutdownSignals::run(const std::stop_token& stop) {
  const sigset_t set = shutdown_set();
  while (!stop.stop_requested()) {
    constexpr timespec kPoll{.tv_sec = 0, .tv_nsec = 100'000'000};  // how long the destructor may have to wait
    const int signal = sigtimedwait(&set, nullptr, &kPoll);
    if (signal < 0) continue;
    std::unique_lock lock(mutex_);
    if (signal == SIGUSR1) {
      if (on_user_signal_) on_user_signal_();
      continue;
    }
    if (!listening_ || asked_) {
      log_warning("stopped at once by {}", signal == SIGINT ? "SIGINT" : "SIGTERM");
      _exit(128 + signal);
    }
    asked_ = true;
    arrived_.notify_all();
  }
}

std::shared_ptr<const void> ShutdownSignals::on_user_signal(std::function<void()> act) {
  const std::lock_guard lock(mutex_);
  on_user_signal_ = std::move(act);
  return {this, [](ShutdownSignals* signals) {
            const std::lock_guard guard(signals->mutex_);
            signals->on_user_signal_ = nullptr;
          }};
}

bool ShutdownSignals::wait_for(std::chrono::milliseconds timeout) {
  std::unique_lock lock(mutex_);
  return arrived_.wait_for(lock, timeout, [this] { return asked_; });
}

}  // namespace quern::app
