#include "base/check.h"

#include <cstdio>
#include <cstdlib>

namespace quern {

void check_failed(std::string_view condition, std::string_view detail, const char* file, int line) {
  std::fprintf(stderr, "quern: broken invariant at %s:%d: %.*s%s%.*s\n", file, line, static_cast<int>(condition.size()),
               condition.data(), detail.empty() ? "" : ": ", static_cast<int>(detail.size()), detail.data());
  std::fflush(stderr);
  std::abort();
}

}  // namespace quern
