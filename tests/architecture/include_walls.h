#pragma once

#include <map>
#include <optional>
#include <set>
#include <string>
#include <string_view>

namespace quern::testing {

/// Which rooms a room may include besides base and itself: the table of docs/architecture.md.
const std::map<std::string, std::set<std::string>>& room_neighbours();

/// The first include of `text` that goes through a wall, as "src/engine/x.cpp:12 includes text/y.h; engine may see base, worker", or
/// nothing. `path` is relative to src/, as in "engine/x.cpp".
std::optional<std::string> first_breach(std::string_view path, std::string_view text);

}  // namespace quern::testing
