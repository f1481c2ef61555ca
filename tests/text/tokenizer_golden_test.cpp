// Against Hugging Face `tokenizers`: tools/reference/tokenizer_golden.py writes the expectations and describes their layout.
#include <cstring>

#include "base/file.h"
#include "base/hash.h"
#include "support/test_support.h"
#include "text/detokenizer.h"
#include "text/tokenizer_support.h"

namespace quern::text {
namespace {

using testing::standin;

struct Goldens {
  std::vector<std::string> strings;
  std::vector<uint32_t> qwen3, qwen3_5, decoded;
  struct Sequence {
    uint32_t decoded, without_special;
  };
  std::vector<Sequence> sequences;
};

Goldens read_goldens() {
  const std::string file = read_file(quern::testing::standin_tokenizer_dir() / "goldens.bin").value();
  std::string_view rest = file;
  const auto take = [&](size_t size) {
    CHECK(size <= rest.size());
    const std::string_view taken = rest.substr(0, size);
    rest.remove_prefix(size);
    return taken;
  };
  const auto take_u32 = [&] {
    uint32_t value;
    std::memcpy(&value, take(sizeof(value)).data(), sizeof(value));
    return value;
  };
  const auto take_column = [&](size_t n) {
    std::vector<uint32_t> column(n);
    for (uint32_t& value : column) value = take_u32();
    return column;
  };
  Goldens goldens;
  const uint32_t num_strings = take_u32();
  const auto lengths = take_column(num_strings);
  goldens.qwen3 = take_column(num_strings);
  goldens.qwen3_5 = take_column(num_strings);
  goldens.decoded = take_column(num_strings);
  for (const uint32_t length : lengths) goldens.strings.emplace_back(take(length));
  goldens.sequences.resize(take_u32());
  for (auto& sequence : goldens.sequences) {
    sequence.decoded = take_u32();
    sequence.without_special = take_u32();
  }
  CHECK(rest.empty());
  return goldens;
}

const Goldens& goldens() {
  static const Goldens read = read_goldens();
  return read;
}

uint32_t hash_text(std::string_view text) {
  const uint64_t hash = fnv1a(text);
  return static_cast<uint32_t>(hash >> 32 ^ hash);
}

uint32_t hash_ids(std::span<const int32_t> ids) { return hash_text({reinterpret_cast<const char*>(ids.data()), ids.size_bytes()}); }

std::string streamed(const Tokenizer& tokenizer, std::span<const int32_t> ids, bool skip_special_tokens) {
  StreamingDetokenizer stream(tokenizer, skip_special_tokens);
  std::string text;
  for (const int32_t id : ids) text += stream.push(id);
  return text + stream.finish();
}

/// As random_ids() of the script.
std::vector<int32_t> random_ids(uint64_t seed) {
  SplitMix64 rng(seed);
  std::vector<int32_t> ids(rng.next() % 24);
  for (int32_t& id : ids) {
    const uint64_t kind = rng.next() % 8, value = rng.next();
    id = static_cast<int32_t>(kind < 5 ? value % 256 : kind < 7 ? value % 151643 : 151643 + value % 60);
  }
  return ids;
}

void expect_tokens(SplitPattern pattern, const std::vector<uint32_t>& expected) {
  ASSERT_GE(goldens().strings.size(), 20000u);
  size_t wrong = 0;
  for (size_t i = 0; i < goldens().strings.size() && wrong < 10; ++i) {
    const auto ids = standin(pattern).encode(goldens().strings[i]);
    if (hash_ids(ids) == expected[i]) continue;
    ++wrong;
    ADD_FAILURE() << "string " << i << ", " << ids.size() << " tokens: " << ::testing::PrintToString(goldens().strings[i].substr(0, 200))
                  << "\ntokens " << ::testing::PrintToString(ids);
  }
}

TEST(TokenizerGolden, EncodesAsHuggingFaceWithThePatternOfQwen3) { expect_tokens(SplitPattern::kQwen2, goldens().qwen3); }

TEST(TokenizerGolden, EncodesAsHuggingFaceWithThePatternOfQwen3_5) { expect_tokens(SplitPattern::kQwen3_5, goldens().qwen3_5); }

TEST(TokenizerGolden, DecodesAsHuggingFaceAtOnceAndStreamed) {
  for (size_t i = 0; i < goldens().strings.size(); ++i) {
    const auto ids = standin().encode(goldens().strings[i]);
    const std::string text = standin().decode(ids, false);
    ASSERT_EQ(hash_text(text), goldens().decoded[i])
        << "string " << i << ": " << ::testing::PrintToString(goldens().strings[i].substr(0, 200));
    ASSERT_EQ(streamed(standin(), ids, false), text) << "string " << i;
  }
}

TEST(TokenizerGolden, DecodesBytesThatAreNoTextAsHuggingFaceAtOnceAndStreamed) {
  ASSERT_GE(goldens().sequences.size(), 3000u);
  for (size_t seed = 0; seed < goldens().sequences.size(); ++seed) {
    const auto ids = random_ids(seed);
    for (const bool skip : {false, true}) {
      const std::string text = standin().decode(ids, skip);
      ASSERT_EQ(hash_text(text), skip ? goldens().sequences[seed].without_special : goldens().sequences[seed].decoded)
          << ::testing::PrintToString(ids) << " decodes to " << ::testing::PrintToString(text);
      ASSERT_EQ(streamed(standin(), ids, skip), text) << ::testing::PrintToString(ids);
    }
  }
}

}  // namespace
}  // namespace quern::text
