#include "app/nearest.h"

#include <algorithm>

namespace quern::app {

int edit_distance(std::string_view a, std::string_view b) {
  // Three rows of the table: a swap of neighbours looks two rows back.
  std::vector<int> before(b.size() + 1), previous(b.size() + 1), current(b.size() + 1);
  for (size_t j = 0; j <= b.size(); ++j) previous[j] = static_cast<int>(j);
  for (size_t i = 1; i <= a.size(); ++i) {
    current[0] = static_cast<int>(i);
    for (size_t j = 1; j <= b.size(); ++j) {
      const int substitution = previous[j - 1] + (a[i - 1] == b[j - 1] ? 0 : 1);
      current[j] = std::min({previous[j] + 1, current[j - 1] + 1, substitution});
      if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1]) current[j] = std::min(current[j], before[j - 2] + 1);
    }
    before.swap(previous);
    previous.swap(current);
  }
  return previous[b.size()];
}

std::string nearest_name(std::string_view given, const std::vector<std::string>& names) {
  std::string best;
  int best_distance = 0;
  for (const std::string& name : names) {
    const bool is_start = given.size() > 4 && (name.starts_with(given) || given.starts_with(name));
    const int distance = edit_distance(given, name);
    const int allowed = std::max(1, static_cast<int>(std::max(given.size(), name.size())) / 3);
    if (!is_start && distance > allowed) continue;
    if (best.empty() || distance < best_distance) {
      best = name;
      best_distance = distance;
    }
  }
  return best;
}

}  // namespace quern::app
