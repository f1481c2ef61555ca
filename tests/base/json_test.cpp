#include "base/json.h"

#include "base/file.h"
#include "support/test_support.h"

namespace quern {
namespace {

TEST(Json, KeepsTheOrderOfKeys) {
  EXPECT_EQ(dump_json(parse_json(R"({"z": 1, "a": [true, null], "m": {"y": 0, "b": 2}})", "body").value()),
            R"({"z":1,"a":[true,null],"m":{"y":0,"b":2}})");
}

TEST(Json, NamesTheDocumentInItsErrors) {
  for (const std::string_view text : {"", "{", "{\"a\":}", "[1,]", "nul", "{} x", "\"\xff\"", "[1e400"}) {
    const auto result = parse_json(text, "request body");
    ASSERT_FALSE(result.has_value()) << text;
    EXPECT_EQ(result.error().code, ErrorCode::kInvalidArgument);
    EXPECT_THAT(result.error().message, ::testing::HasSubstr("request body"));
  }
}

TEST(Json, RefusesDeepNestingAndSurvivesAMillionBrackets) {
  const auto nested = [](size_t n) { return std::string(n, '[') + std::string(n, ']'); };
  EXPECT_TRUE(parse_json(nested(200), "x").has_value());
  const auto deep = parse_json(nested(202), "x");
  ASSERT_FALSE(deep.has_value());
  EXPECT_THAT(deep.error().message, ::testing::HasSubstr("200 levels"));
  EXPECT_FALSE(parse_json(nested(1000000), "x").has_value());
  EXPECT_FALSE(parse_json(std::string(1000000, '['), "x").has_value());
}

TEST(Json, WritesInvalidUtf8AsReplacementCharacters) {
  EXPECT_EQ(dump_json(Json("a\xff\x62")), "\"a\xef\xbf\xbd\x62\"");
  EXPECT_EQ(dump_json(Json("\xe2\x82")), "\"\xef\xbf\xbd\"");
}

TEST(Json, ReadsFilesAndSaysWhichOneIsMissing) {
  testing::TemporaryFolder folder;
  const auto path = folder.path() / "config.json";
  const auto missing = read_json_file(path);
  ASSERT_FALSE(missing.has_value());
  EXPECT_EQ(missing.error().code, ErrorCode::kNotFound);
  EXPECT_THAT(missing.error().message, ::testing::HasSubstr("config.json"));
  ASSERT_OK(write_file(path, "{\"a\":1}"));
  EXPECT_EQ(read_json_file(path).value()["a"], 1);
}

}  // namespace
}  // namespace quern
