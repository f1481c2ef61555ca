#include "server/token_logprobs.h"

#include <cmath>
#include <limits>

#include "support/standin_tokenizer.h"
#include "support/test_support.h"

namespace quern::server {
namespace {

const text::Tokenizer& tokenizer() {
  static const text::Tokenizer instance = text::Tokenizer::load(testing::standin_tokenizer_dir()).value();
  return instance;
}

TEST(ChatLogprobs, AreValidJsonWhateverTheNumbers) {
  constexpr float kInf = std::numeric_limits<float>::infinity();
  const std::vector<int32_t> ids = tokenizer().encode("abc");
  ASSERT_EQ(ids.size(), 1U);
  for (const float logprob : {-kInf, std::numeric_limits<float>::quiet_NaN(), -1e30F, 1e-7F, -0.25F}) {
    const engine::TokenLogprobs entry{logprob, 1, {{ids[0], logprob}, {5, -kInf}}};
    const Json json = Json::parse(dump_json(chat_logprobs(TokenNames(&tokenizer(), false), ids, {&entry, 1}, 2)));
    const double written = json["content"][0]["logprob"].get<double>();
    EXPECT_TRUE(std::isfinite(written) && written >= kLogprobFloor && written <= 0) << logprob;
    EXPECT_EQ(json["content"][0]["top_logprobs"][1]["logprob"], kLogprobFloor);
  }
}

TEST(ChatLogprobs, HaveTheBytesOfIncompleteCharacters) {
  const std::vector<int32_t> ids = tokenizer().encode("🫠");
  ASSERT_GE(ids.size(), 2U);
  const std::vector<engine::TokenLogprobs> logprobs(ids.size());
  const Json json = chat_logprobs(TokenNames(&tokenizer(), false), ids, logprobs, 0);
  std::string bytes;
  for (const Json& entry : json["content"]) {
    for (const Json& byte : entry["bytes"]) bytes.push_back(static_cast<char>(byte.get<int>()));
    EXPECT_TRUE(entry["top_logprobs"].empty());
  }
  EXPECT_EQ(bytes, "🫠");
  EXPECT_EQ(json["content"][0]["token"], "\uFFFD");
}

TEST(ChatLogprobs, CanNameTokensByTheirIds) {
  const std::vector<int32_t> ids{7};
  const std::vector<engine::TokenLogprobs> logprobs(1);
  EXPECT_EQ(chat_logprobs(TokenNames(&tokenizer(), true), ids, logprobs, 0)["content"][0]["token"], "token_id:7");
  EXPECT_EQ(chat_logprobs(TokenNames(nullptr, false), ids, logprobs, 0)["content"][0]["token"], "token_id:7");
}

TEST(CompletionLogprobs, CountOffsetsInCharacters) {
  CompletionLogprobs logprobs(TokenNames(&tokenizer(), false), 1);
  const std::vector<int32_t> ids = tokenizer().encode("né🫠 x");
  const engine::TokenLogprobs entry{-1, 1, {}};
  std::string text;
  std::vector<int64_t> expected;
  for (const int32_t id : ids) {
    const std::string bytes(tokenizer().token_bytes(id));
    int64_t characters = 0;
    for (const char c : text) characters += (static_cast<unsigned char>(c) & 0xC0) == 0x80 ? 0 : 1;
    expected.push_back((static_cast<unsigned char>(bytes[0]) & 0xC0) == 0x80 ? characters - 1 : characters);
    text += bytes;
    logprobs.add(id, &entry);
  }
  EXPECT_EQ(logprobs.take()["text_offset"], Json(expected));
}

TEST(CompletionLogprobs, AlwaysShowTheChosenTokenAndNullForTheFirstOfAPrompt) {
  const int32_t a = tokenizer().encode("a")[0], b = tokenizer().encode("b")[0], c = tokenizer().encode("c")[0];
  CompletionLogprobs logprobs(TokenNames(&tokenizer(), false), 1);
  logprobs.add(a, nullptr);
  const engine::TokenLogprobs unlikely{-5, 9, {{b, -0.1F}, {c, -2.0F}}};
  logprobs.add(a, &unlikely);
  const Json json = logprobs.take();
  EXPECT_TRUE(json["token_logprobs"][0].is_null());
  EXPECT_TRUE(json["top_logprobs"][0].is_null());
  EXPECT_EQ(json["token_logprobs"][1], -5.0);
  EXPECT_EQ(json["top_logprobs"][1].size(), 2U) << "one alternative, and the chosen one";
  EXPECT_EQ(json["top_logprobs"][1]["a"], -5.0);
  EXPECT_TRUE(logprobs.take()["tokens"].empty());
}

}  // namespace
}  // namespace quern::server
