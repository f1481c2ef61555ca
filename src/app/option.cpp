#include "app/option.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdlib>

namespace quern::app {
namespace {

struct Unit {
  std::string_view suffix;
  double bytes;
};
constexpr double kKi = 1024.0, kKilo = 1000.0;
constexpr std::array kUnits = {
    Unit{"", 1},
    Unit{"B", 1},
    Unit{"K", kKi},
    Unit{"KiB", kKi},
    Unit{"Ki", kKi},
    Unit{"k", kKilo},
    Unit{"kB", kKilo},
    Unit{"KB", kKilo},
    Unit{"M", kKi* kKi},
    Unit{"MiB", kKi* kKi},
    Unit{"Mi", kKi* kKi},
    Unit{"m", kKilo* kKilo},
    Unit{"MB", kKilo* kKilo},
    Unit{"G", kKi* kKi* kKi},
    Unit{"GiB", kKi* kKi* kKi},
    Unit{"Gi", kKi* kKi* kKi},
    Unit{"g", 1e9},
    Unit{"GB", 1e9},
    Unit{"T", kKi* kKi* kKi* kKi},
    Unit{"TiB", kKi* kKi* kKi* kKi},
    Unit{"Ti", kKi* kKi* kKi* kKi},
    Unit{"t", 1e12},
    Unit{"TB", 1e12},
};

/// The number at the start of `text`, which is cut off; empty when there is none.
std::optional<double> take_number(std::string_view& text) {
  const std::string copy(text);
  if (copy.empty() || copy.find_first_of("0123456789") == std::string::npos) return std::nullopt;
  char* end = nullptr;
  const double value = std::strtod(copy.c_str(), &end);
  if (end == copy.c_str()) return std::nullopt;
  text.remove_prefix(static_cast<size_t>(end - copy.c_str()));
  return value;
}

}  // namespace

Result<uint64_t> parse_size(std::string_view text) {
  std::string_view rest = text;
  const std::optional<double> number = take_number(rest);
  if (!number || !std::isfinite(*number) || *number < 0) return invalid_argument("'{}' is not a size such as 4096, 512MiB or 4G", text);
  while (!rest.empty() && rest.front() == ' ') rest.remove_prefix(1);
  for (const Unit& unit : kUnits) {
    if (unit.suffix != rest) continue;
    const double bytes = *number * unit.bytes;
    if (bytes >= 0x1p63) return invalid_argument("'{}' is too large for a size", text);
    return static_cast<uint64_t>(bytes);
  }
  return invalid_argument("'{}' has the unknown unit '{}'; sizes look like 4096, 512MiB or 4G", text, rest);
}

Result<int64_t> parse_integer(std::string_view text) {
  int64_t value = 0;
  const auto [end, status] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (text.empty() || status != std::errc{} || end != text.data() + text.size())
    return invalid_argument("'{}' is not a whole number", text);
  return value;
}

Result<double> parse_number(std::string_view text) {
  if (text == "inf") return HUGE_VAL;
  std::string_view rest = text;
  const std::optional<double> value = take_number(rest);
  if (!value || !rest.empty() || std::isnan(*value)) return invalid_argument("'{}' is not a number", text);
  return *value;
}

std::vector<std::string_view> split_at_commas(std::string_view text) {
  std::vector<std::string_view> parts;
  for (size_t begin = 0; begin <= text.size();) {
    const size_t end = std::min(text.find(',', begin), text.size());
    parts.push_back(text.substr(begin, end - begin));
    begin = end + 1;
  }
  return parts;
}

Result<std::vector<int64_t>> parse_integer_list(std::string_view text) {
  std::vector<int64_t> values;
  size_t begin = 0;
  while (begin <= text.size()) {
    const size_t end = std::min(text.find_first_of(", \t\r\n", begin), text.size());
    if (end > begin) {
      ASSIGN_OR_RETURN(const int64_t value, parse_integer(text.substr(begin, end - begin)));
      values.push_back(value);
    }
    begin = end + 1;
  }
  return values;
}

Setter to_text(std::string& target) {
  return [&target](std::string_view text) -> Result<void> {
    target = text;
    return {};
  };
}

Setter to_text(std::optional<std::string>& target) {
  return [&target](std::string_view text) -> Result<void> {
    target = std::string(text);
    return {};
  };
}

Setter to_path(std::filesystem::path& target) {
  Setter setter = [&target](std::string_view text) -> Result<void> {
    if (text.empty()) return invalid_argument("the path is empty");
    target = std::filesystem::path(text);
    return {};
  };
  setter.is_path = true;
  return setter;
}

Setter naming_a_path(Setter setter) {
  setter.is_path = true;
  return setter;
}

Setter to_flag(bool& target, bool value) {
  return [&target, value](std::string_view) -> Result<void> {
    target = value;
    return {};
  };
}

Setter to_size(std::optional<uint64_t>& target) {
  return [&target](std::string_view text) -> Result<void> {
    ASSIGN_OR_RETURN(target, parse_size(text));
    return {};
  };
}

Setter to_number(double& target, double lowest, double highest) {
  return [&target, lowest, highest](std::string_view text) -> Result<void> {
    ASSIGN_OR_RETURN(const double value, parse_number(text));
    if (value < lowest || value > highest) return invalid_argument("{} is not in the range {} to {}", text, lowest, highest);
    target = value;
    return {};
  };
}

Setter to_list(std::vector<int64_t>& target) {
  return [&target](std::string_view text) -> Result<void> {
    ASSIGN_OR_RETURN(target, parse_integer_list(text));
    return {};
  };
}

}  // namespace quern::app
