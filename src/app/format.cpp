#include "app/format.h"

#include <fmt/format.h>

namespace quern::app {

std::string format_bytes(uint64_t bytes) {
  const auto value = static_cast<double>(bytes);
  if (bytes < 1024) return fmt::format("{} B", bytes);
  if (bytes < (1ull << 20)) return fmt::format("{:.1f} KiB", value / 0x1p10);
  if (bytes < (1ull << 30)) return fmt::format("{:.1f} MiB", value / 0x1p20);
  return fmt::format("{:.2f} GiB", value / 0x1p30);
}

std::string format_count(int64_t count) {
  std::string digits = fmt::format("{}", count);
  for (auto at = static_cast<int64_t>(digits.size()) - 3; at > (count < 0 ? 1 : 0); at -= 3) digits.insert(static_cast<size_t>(at), ",");
  return digits;
}

}  // namespace quern::app
