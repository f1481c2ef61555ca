#include "text/detokenizer.h"

#include "support/test_support.h"
#include "text/tokenizer_support.h"

namespace quern::text {
namespace {

using ::testing::ElementsAre;
using testing::standin;

int32_t byte_token(int byte) { return *standin().token_to_id(std::string(1, static_cast<char>(byte))); }

std::vector<std::string> deltas(std::span<const int32_t> ids, bool skip_special_tokens = true) {
  StreamingDetokenizer stream(standin(), skip_special_tokens);
  std::vector<std::string> result;
  for (const int32_t id : ids) result.push_back(stream.push(id));
  result.push_back(stream.finish());
  return result;
}

TEST(StreamingDetokenizer, HoldsBackAnEmojiUntilItsLastByte) {
  const std::vector<int32_t> ids{byte_token(0xF0), byte_token(0x9F), byte_token(0x98), byte_token(0x80)};
  EXPECT_THAT(deltas(ids), ElementsAre("", "", "", "😀", ""));
}

TEST(StreamingDetokenizer, ReplacesACharacterThatTheNextTokenDoesNotComplete) {
  const std::vector<int32_t> ids{byte_token(0xE4), byte_token(0xB8), 525};  // " are" begins with a space
  EXPECT_THAT(deltas(ids), ElementsAre("", "", "\uFFFD are", ""));
}

TEST(StreamingDetokenizer, FlushesAnIncompleteCharacterOnceAtTheEnd) {
  StreamingDetokenizer stream(standin(), true);
  EXPECT_EQ(stream.push(byte_token(0xF0)), "");
  EXPECT_EQ(stream.push(byte_token(0x9F)), "");
  EXPECT_EQ(stream.finish(), "\uFFFD");
  EXPECT_EQ(stream.finish(), "");
}

TEST(StreamingDetokenizer, ReplacesBytesThatBeginNothingAtOnce) {
  const std::vector<int32_t> ids{byte_token(0xFF), byte_token(0x80), byte_token(0xED), byte_token(0xA0)};
  EXPECT_THAT(deltas(ids), ElementsAre("\uFFFD", "\uFFFD", "", "\uFFFD\uFFFD", ""));
}

TEST(StreamingDetokenizer, JoinsCharactersOverSkippedAndUndefinedTokens) {
  const std::vector<int32_t> ids{byte_token(0xC3), 151645, 200000, byte_token(0xA9)};
  EXPECT_THAT(deltas(ids, true), ElementsAre("", "", "", "é", ""));
  EXPECT_THAT(deltas(ids, false), ElementsAre("", "\uFFFD<|im_end|>", "", "\uFFFD", ""));
}

TEST(StreamingDetokenizer, EqualsDecodeForEveryPrefixOfAText) {
  const auto ids = standin().encode(
      "👨‍👩‍👧 naïve — 𝔘𝔫𝔦𝔠𝔬𝔡𝔢 \U00050000 คำ <think>हिन्दी</think><|im_end|>");
  for (size_t length = 0; length <= ids.size(); ++length) {
    const std::span<const int32_t> prefix(ids.data(), length);
    std::string text;
    for (const std::string& delta : deltas(prefix)) text += delta;
    ASSERT_EQ(text, standin().decode(prefix, true)) << length;
  }
}

}  // namespace
}  // namespace quern::text
