#include "app/exit_deadline.h"

#include <cstdlib>

#include "app/exit_code.h"
#include "base/log.h"

namespace quern::app {

ExitDeadline::ExitDeadline(std::chrono::seconds timeout, std::string_view what)
    : thread_([this, timeout, what = std::string(what)](const std::stop_token& stop) {
        std::unique_lock lock(mutex_);
        never_.wait_for(lock, stop, timeout, [] { return false; });
        if (stop.stop_requested()) return;
        log_error("{} after {} s; the process ends all the same", what, timeout.count());
        std::_Exit(kFailure);
      }) {}

}  // namespace quern::app
