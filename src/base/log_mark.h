#pragma once

#include <string>
#include <string_view>

namespace quern {

/// What stands in front of every message from now on, as in "[process 1] ", where several processes write to one terminal. Before other threads log.
void set_log_mark(std::string_view mark);
/// That, or nothing.
[[nodiscard]] const std::string& log_mark();

}  // namespace quern
