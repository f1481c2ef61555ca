#pragma once

#include <cstdint>

namespace quern::app {

/// Raises this process's limit of open files so far that `num_connections` fit beside everything else, and warns where the system allows
/// fewer.
void allow_connections(int32_t num_connections);

}  // namespace quern::app
