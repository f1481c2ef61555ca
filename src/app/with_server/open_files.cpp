#include "app/with_server/open_files.h"

#include <sys/resource.h>

#include <algorithm>

#include "base/log.h"

namespace quern::app {

void allow_connections(int32_t num_connections) {
  constexpr rlim_t kOthers = 256;  // checkpoint shards, devices, logs
  const rlim_t wanted = static_cast<rlim_t>(num_connections) + kOthers;
  rlimit limit{};
  if (::getrlimit(RLIMIT_NOFILE, &limit) != 0 || limit.rlim_cur >= wanted) return;
  limit.rlim_cur = std::min(wanted, limit.rlim_max);
  if (::setrlimit(RLIMIT_NOFILE, &limit) != 0 || limit.rlim_cur < wanted) {
    log_warning("this process may have {} files open, which is fewer than --max-connections {} needs; `ulimit -Hn` or LimitNOFILE= raises it",
                limit.rlim_cur, num_connections);
  }
}

}  // namespace quern::app
