#include "base/result.h"

#include <memory>

#include "support/test_support.h"

namespace quern {
namespace {

Result<int> half(int x) {
  if (x % 2 != 0) return invalid_argument("{} is odd", x);
  return x / 2;
}
Result<int> quarter(int x) {
  ASSIGN_OR_RETURN(const int h, half(x));
  return half(h);
}
Result<void> check_even(int x) {
  RETURN_IF_ERROR(half(x));
  return {};
}

TEST(Result, HoldsAValueOrAnError) {
  const Result<int> good = half(4), bad = half(3);
  ASSERT_TRUE(good.has_value());
  EXPECT_EQ(*good, 2);
  ASSERT_FALSE(bad.has_value());
  EXPECT_EQ(bad.error().code, ErrorCode::kInvalidArgument);
  EXPECT_EQ(bad.error().message, "3 is odd");
}

TEST(Result, PassesErrorsUpAndKeepsThemWhole) {
  EXPECT_EQ(quarter(8).value(), 2);
  EXPECT_EQ(quarter(6).error().message, "3 is odd");
  EXPECT_TRUE(check_even(2).has_value());
  EXPECT_EQ(check_even(1).error().message, "1 is odd");
}

TEST(Result, MovesWhatCannotBeCopied) {
  const auto make = []() -> Result<std::unique_ptr<int>> { return std::make_unique<int>(7); };
  const std::unique_ptr<int> value = make().value();
  EXPECT_EQ(*value, 7);
}

TEST(Error, TellsItsContextFirstAndKeepsCodeAndField) {
  Error error = make_error(ErrorCode::kNotFound, "no file {}", "a.json");
  error.field = "model";
  const Error outer = error.with_context("loading");
  EXPECT_EQ(outer.message, "loading: no file a.json");
  EXPECT_EQ(outer.code, ErrorCode::kNotFound);
  EXPECT_EQ(outer.field, "model");
}

TEST(Result, StopsTheProcessWhenAMissingValueIsRead) { EXPECT_DEATH((void)half(3).value(), "3 is odd"); }

}  // namespace
}  // namespace quern
