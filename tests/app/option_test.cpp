#include "app/option.h"

#include "support/test_support.h"

namespace quern::app {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

TEST(Sizes, UnderstandBinaryAndDecimalUnits) {
  const auto size = [](std::string_view text) { return parse_size(text).value(); };
  EXPECT_EQ(size("4096"), 4096u);
  EXPECT_EQ(size("4G"), 4ull << 30);
  EXPECT_EQ(size("4GiB"), 4ull << 30);
  EXPECT_EQ(size("512MiB"), 512ull << 20);
  EXPECT_EQ(size("1.5 G"), 3ull << 29);
  EXPECT_EQ(size("32k"), 32000u);
  EXPECT_EQ(size("32K"), 32768u);
  EXPECT_EQ(size("100MB"), 100'000'000u);
  EXPECT_EQ(size("2T"), 2ull << 40);
  EXPECT_EQ(size("0"), 0u);
}

TEST(Sizes, RefuseWhatIsNoSizeAndSayWhatOneLooksLike) {
  for (const char* text : {"", "G", "four", "-1", "-1G", "4X", "4GG", "1e400", "nan", "inf", "99999999T"})
    EXPECT_FALSE(parse_size(text)) << text;
  EXPECT_THAT(parse_size("4X").error().message, HasSubstr("512MiB"));
}

TEST(Integers, AreWholeNumbersInTheirRange) {
  int32_t value = 0;
  const Setter set = to_integer(value, 1, 100'000);
  ASSERT_OK(set("42"));
  EXPECT_EQ(value, 42);
  ASSERT_OK(set("32K"));
  EXPECT_EQ(value, 32768);
  for (const char* text : {"0", "-5", "100001", "1.5x", "", "seven"}) EXPECT_FALSE(set(text)) << text;
  EXPECT_THAT(set("0").error().message, HasSubstr("1 to 100000"));
  EXPECT_EQ(value, 32768) << "a refused value leaves the target alone";
}

TEST(Numbers, AreInTheirRange) {
  double value = 0;
  const Setter set = to_number(value, 0.01, 1);
  ASSERT_OK(set("0.9"));
  EXPECT_EQ(value, 0.9);
  for (const char* text : {"0", "1.01", "nan", "x", ""}) EXPECT_FALSE(set(text)) << text;
}

TEST(Lists, AreSeparatedByCommasOrBlanks) {
  EXPECT_THAT(*parse_integer_list("0,63,-1"), ElementsAre(0, 63, -1));
  EXPECT_THAT(*parse_integer_list(" 1 2\n3\t4\r\n"), ElementsAre(1, 2, 3, 4));
  EXPECT_THAT(*parse_integer_list(""), ElementsAre());
  EXPECT_FALSE(parse_integer_list("1,2,x"));
}

TEST(Choices, NameAllWordsWhenNoneFits) {
  int value = 0;
  const Setter set = to_choice<int>(value, {{"one", 1}, {"two", 2}});
  ASSERT_OK(set("two"));
  EXPECT_EQ(value, 2);
  EXPECT_THAT(set("three").error().message, HasSubstr("one, two"));
}

}  // namespace
}  // namespace quern::app
