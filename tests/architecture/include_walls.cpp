#include "architecture/include_walls.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>

namespace quern::testing {
namespace {

/// What stands between the quotes of an #include "..." line; empty for every other line.
std::string_view quoted_include(std::string_view line) {
  const auto skip_blanks = [&] { line.remove_prefix(std::min(line.find_first_not_of(" \t"), line.size())); };
  skip_blanks();
  if (!line.starts_with('#')) return {};
  line.remove_prefix(1);
  skip_blanks();
  if (!line.starts_with("include")) return {};
  line.remove_prefix(7);
  skip_blanks();
  if (!line.starts_with('"')) return {};
  line.remove_prefix(1);
  return line.substr(0, line.find('"'));
}

std::string_view first_part(std::string_view path) { return path.substr(0, path.find('/')); }

/// "cpu" of "backends/cpu/x.h"; empty for a file in backends/ itself.
std::string_view platform_of(std::string_view path) {
  path.remove_prefix(std::string_view("backends/").size());
  return path.find('/') == std::string_view::npos ? std::string_view() : first_part(path);
}

/// Why `path` may not include `target`, or nothing.
std::optional<std::string> why_not(std::string_view path, std::string_view target) {
  const std::string room(first_part(path)), wanted(first_part(target));
  const auto neighbours = room_neighbours().find(room);
  if (neighbours == room_neighbours().end()) return fmt::format("{} is no room of docs/architecture.md", room);
  if (target.find('/') == std::string_view::npos || !room_neighbours().contains(wanted)) return "an include names its room first";
  if (wanted == "base" || wanted == room) {
    if (room != "backends" || wanted == "base") return std::nullopt;
    const std::string_view from = platform_of(path), to = platform_of(target);
    if (from.empty() || from == to || to.empty()) return std::nullopt;
    return "the platforms do not know each other";
  }
  if (!neighbours->second.contains(wanted)) {
    std::set<std::string> seen = neighbours->second;
    seen.insert("base");
    return fmt::format("{} may see {}", room, fmt::join(seen, ", "));
  }
  if (wanted == "backends" && target != "backends/platforms.h") return "only backends/platforms.h looks out of that room";
  return std::nullopt;
}

}  // namespace

const std::map<std::string, std::set<std::string>>& room_neighbours() {
  static const std::map<std::string, std::set<std::string>> kNeighbours = {
      {"app", {"server", "engine", "worker", "weights", "text"}},
      {"server", {"engine", "text"}},
      {"engine", {"worker"}},
      {"worker", {"weights", "model", "backends", "ops"}},
      {"weights", {"model", "ops"}},
      {"model", {"ops"}},
      {"backends", {"ops"}},
      {"text", {}},
      {"ops", {}},
      {"base", {}},
  };
  return kNeighbours;
}

std::optional<std::string> first_breach(std::string_view path, std::string_view text) {
  for (int line_number = 1; !text.empty(); ++line_number) {
    const size_t end = std::min(text.find('\n'), text.size());
    const std::string_view target = quoted_include(text.substr(0, end));
    text.remove_prefix(std::min(end + 1, text.size()));
    if (target.empty()) continue;
    if (const std::optional<std::string> reason = why_not(path, target))
      return fmt::format("src/{}:{} includes {}; {}", path, line_number, target, *reason);
  }
  return std::nullopt;
}

}  // namespace quern::testing
