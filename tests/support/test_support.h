#pragma once

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <string>
#include <string_view>

#include "base/result.h"

namespace quern::testing {

/// tests/data/`name` in the source tree.
inline std::filesystem::path data_path(std::string_view name) { return std::filesystem::path(QUERN_TEST_DATA) / name; }

/// A folder of its own for one test, removed with everything in it at the end.
class TemporaryFolder {
 public:
  TemporaryFolder() {
    std::string name = (std::filesystem::temp_directory_path() / "quern-test-XXXXXX").string();
    path_ = ::mkdtemp(name.data());
  }
  ~TemporaryFolder() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  TemporaryFolder(const TemporaryFolder&) = delete;
  TemporaryFolder& operator=(const TemporaryFolder&) = delete;
  [[nodiscard]] const std::filesystem::path& path() const { return path_; }

 private:
  std::filesystem::path path_;
};

}  // namespace quern::testing

/// The value of a Result, or a failed test with its message.
#define ASSERT_OK(result) ASSERT_TRUE((result).has_value()) << (result).error().message
#define EXPECT_OK(result) EXPECT_TRUE((result).has_value()) << (result).error().message
