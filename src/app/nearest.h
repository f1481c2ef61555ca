#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace quern::app {

/// Number of insertions, deletions, substitutions and swaps of neighbours that turn `a` into `b`.
int edit_distance(std::string_view a, std::string_view b);

/// The name that a person most likely meant, or an empty string when nothing is close: at most a third of the letters differ,
/// or one of the two begins with the other.
std::string nearest_name(std::string_view given, const std::vector<std::string>& names);

}  // namespace quern::app
