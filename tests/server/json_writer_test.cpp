#include "server/json_writer.h"

#include <random>

#include "base/json.h"
#include "support/test_support.h"

namespace quern::server {
namespace {

std::string written(std::string_view text) {
  std::string out;
  append_json_string(out, text);
  return out;
}

TEST(JsonWriter, WritesWhatDumpJsonWrites) {
  std::string every_byte;
  for (int c = 0; c < 128; ++c) every_byte.push_back(static_cast<char>(c));
  for (const std::string& text :
       {std::string(), std::string("plain"), every_byte, std::string("\"\\/\b\f\n\r\t\x7f"), std::string("naïve 你好 🙂"),
        std::string("broken \xE4\xBD then fine"), std::string("\xFF"), std::string("end \xF0\x9F\x99")}) {
    EXPECT_EQ(Json::parse(written(text)), Json::parse(dump_json(Json(text)))) << text;
  }
}

TEST(JsonWriter, IsValidJsonForAnyBytes) {
  std::mt19937 random(1);
  for (int i = 0; i < 20'000; ++i) {
    std::string text;
    for (size_t n = random() % 12; n > 0; --n) text.push_back(static_cast<char>(random()));
    const Json parsed = Json::parse(written(text), nullptr, false);
    ASSERT_TRUE(parsed.is_string());
  }
}

TEST(JsonWriter, WritesIntegerLists) {
  std::string out;
  append_json_integers(out, {});
  const int32_t values[] = {1, -2, 3};
  append_json_integers(out, values);
  EXPECT_EQ(out, "[][1,-2,3]");
}

}  // namespace
}  // namespace quern::server
