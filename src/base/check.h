#pragma once

#include <string_view>

namespace quern {

/// Prints the broken invariant with file and line, then aborts. For faults that only we can make; user input never gets here.
[[noreturn]] void check_failed(std::string_view condition, std::string_view detail, const char* file, int line);

}  // namespace quern

#define CHECK(condition)                                                            \
  do {                                                                              \
    if (!(condition)) [[unlikely]] ::quern::check_failed(#condition, "", __FILE__, __LINE__); \
  } while (false)

/// CHECK_MSG(condition, message): `message` is a string that is only built on failure.
#define CHECK_MSG(condition, message)                                                      \
  do {                                                                                     \
    if (!(condition)) [[unlikely]] ::quern::check_failed(#condition, (message), __FILE__, __LINE__); \
  } while (false)

#define CHECK_UNREACHABLE() ::quern::check_failed("unreachable", "", __FILE__, __LINE__)
