#include "app/exit_deadline.h"

#include <cstdlib>

#include "app/exit_code.h"
#include "base/log.h"

namespace quern::app {

ExitDeadline::ExitDeadline(std::chrono::seconds timeout)
    : thread_([this, timeout](const std::stop_token& stop) {
        std::unique_lock lock(mutex_);
        never_.wait_for(lock, stop, timeout, [] { return false; });
        if (stop.stop_requested()) return;
        log_error("something still waits for the devices after {} s; the process ends without them", timeout.count());
        std::_Exit(kFailure);
      }) {}

}  // namespace quern::app
