#pragma once

#include <cstdint>
#include <string>

namespace quern::app {

/// "26.93 GiB", "144.0 MiB", "512 B": three or four significant digits, powers of 1024.
std::string format_bytes(uint64_t bytes);
/// "262,144"
std::string format_count(int64_t count);

}  // namespace quern::app
