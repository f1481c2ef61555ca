#include "weights/safetensors.h"

#include <cstring>
#include <string>

#include "base/hash.h"
#include "support/test_support.h"

namespace quern::weights {
namespace {

using ::testing::HasSubstr;

/// A file of the format: length, `header`, `data_bytes` zeros.
std::string file_of(std::string_view header, size_t data_bytes, std::optional<uint64_t> length = {}) {
  const uint64_t size = length.value_or(header.size());
  std::string file(sizeof size, '\0');
  std::memcpy(file.data(), &size, sizeof size);
  file += header;
  return file + std::string(data_bytes, '\0');
}

Result<TensorMap> parse(const std::string& file) {
  return parse_safetensors_header(std::as_bytes(std::span(file)), file.size(), "x.safetensors");
}

std::string error_of(const std::string& file) {
  const auto parsed = parse(file);
  return parsed ? "no error" : parsed.error().message;
}

constexpr std::string_view kTwo =
    R"({"__metadata__":{"format":"pt","note":"[]"},"b":{"dtype":"BF16","shape":[2,3],"data_offsets":[0,12]},"a":{"data_offsets":[12,16],"shape":[],"dtype":"F32"}}   )";

TEST(Safetensors, ReadsNamesTypesShapesAndPlaces) {
  const auto tensors = parse(file_of(kTwo, 16));
  ASSERT_OK(tensors);
  ASSERT_EQ(tensors->size(), 2u);
  const StoredTensor& b = tensors->at("b");
  EXPECT_EQ(b.dtype, DType::kBF16);
  EXPECT_EQ(b.shape, (Shape{2, 3}));
  EXPECT_EQ(b.offset, 8 + kTwo.size());
  EXPECT_EQ(b.size, 12u);
  EXPECT_EQ(tensors->at("a").shape, Shape{});
  EXPECT_EQ(tensors->at("a").offset, 8 + kTwo.size() + 12);
}

TEST(Safetensors, KeepsTypesThatWeHaveNoUseFor) {
  const auto tensors =
      parse(file_of(R"({"q":{"dtype":"I8","shape":[4],"data_offsets":[0,4]},"f":{"dtype":"F4","shape":[4],"data_offsets":[4,6]}})", 6));
  ASSERT_OK(tensors);
  EXPECT_FALSE(tensors->at("q").dtype.has_value());
  EXPECT_EQ(tensors->at("q").dtype_text, "I8");
  EXPECT_EQ(tensors->at("f").dtype_text, "F4");
}

TEST(Safetensors, ToleratesHolesAndEmptyTensors) {
  EXPECT_OK(parse(
      file_of(R"({"a":{"dtype":"U8","shape":[4],"data_offsets":[8,12]},"e":{"dtype":"F32","shape":[0,7],"data_offsets":[9,9]}})", 16)));
}

TEST(Safetensors, RefusesHeadersThatLie) {
  struct Case {
    std::string file;
    const char* message;
  };
  const auto one = [](std::string_view fields) { return file_of(fmt::format(R"({{"t":{{{}}}}})", fields), 16); };
  const Case cases[] = {
      {"", "0 bytes are too few"},
      {"1234567", "7 bytes are too few"},
      {"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n", "Git LFS pointer"},
      {file_of("{}", 0, 3), "the header has 3 bytes but the file only 10"},
      {file_of("{}", 0, 100'000'001), "over the limit"},
      {file_of("{}", 0, ~uint64_t{0}), "over the limit"},
      {file_of("", 0), "not a JSON object"},
      {file_of("[1]", 0), "not a JSON object"},
      {file_of("{\"t\":", 0), "not valid JSON"},
      {file_of("{} {}", 0), "not valid JSON"},
      {file_of(R"({"t":5})", 0), "t: unexpected value"},
      {file_of(R"({"t":[1]})", 0), "t: unexpected list"},
      {file_of(R"({"__metadata__":{"a":[1]}})", 0), "nested"},
      {one(R"("shape":[4],"data_offsets":[0,4])"), "t: has no dtype"},
      {one(R"("dtype":"U8","data_offsets":[0,4])"), "U8 [] needs 1 bytes, the header gives it 4"},
      {one(R"("dtype":"U8","shape":[4])"), "t: data_offsets are not [begin, end]"},
      {one(R"("dtype":"U8","shape":[4],"data_offsets":[4,0])"), "t: data_offsets are not [begin, end]"},
      {one(R"("dtype":"U8","shape":[4],"data_offsets":[0,4,8])"), "t: data_offsets are not [begin, end]"},
      {one(R"("dtype":"U8","shape":[-4],"data_offsets":[0,4])"), "negative or fractional"},
      {one(R"("dtype":"U8","shape":[4.0],"data_offsets":[0,4])"), "negative or fractional"},
      {one(R"("dtype":"U8","shape":[[4]],"data_offsets":[0,4])"), "unexpected list"},
      {one(R"("dtype":"U8","shape":4,"data_offsets":[0,4])"), "unexpected value"},
      {one(R"("dtype":["U8"],"shape":[4],"data_offsets":[0,4])"), "unexpected list"},
      {one(R"("dtype":"U8","shape":[1,1,1,1,1,4],"data_offsets":[0,4])"), "more than five extents"},
      {one(R"("dtype":"F32","shape":[4],"data_offsets":[0,4])"), "F32 [4] needs 16 bytes, the header gives it 4"},
      {one(R"("dtype":"U8","shape":[17],"data_offsets":[0,17])"), "is it truncated?"},
      {one(R"("dtype":"U8","shape":[4],"data_offsets":[0,18446744073709551615])"), "is it truncated?"},
      {one(R"("dtype":"F32","shape":[1099511627776,1099511627776],"data_offsets":[0,0])"), "shape is too large"},
      {one(R"("dtype":"F32","shape":[18446744073709551615],"data_offsets":[0,4])"), "not a sane one"},
      {file_of(R"({"t":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},"t":{"dtype":"U8","shape":[4],"data_offsets":[4,8]}})", 8),
       "t: occurs twice"},
      {file_of(R"({"t":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},"u":{"dtype":"U8","shape":[4],"data_offsets":[3,7]}})", 8),
       "t and u share bytes"},
  };
  for (const Case& c : cases) EXPECT_THAT(error_of(c.file), HasSubstr(c.message)) << c.file;
}

TEST(Safetensors, SurvivesEveryMutationOfAHeader) {
  const std::string whole = file_of(kTwo, 16);
  SplitMix64 random(7);
  constexpr std::string_view kBytes = "{}[]\",:0159-e.\\\0\x80\xff";
  size_t accepted = 0;
  for (int i = 0; i < 20000; ++i) {
    std::string file = whole;
    for (uint64_t n = random.next() % 3 + 1; n > 0; --n) {
      const size_t at = random.next() % file.size();
      switch (random.next() % 4) {
        case 0: file[at] = static_cast<char>(random.next()); break;
        case 1: file[at] = kBytes[random.next() % kBytes.size()]; break;
        case 2: file.erase(at, random.next() % 9); break;
        case 3: file.insert(at, 1, kBytes[random.next() % kBytes.size()]); break;
      }
      if (file.empty()) break;
    }
    const auto tensors = parse(file);
    if (!tensors) continue;
    ++accepted;
    for (const auto& [name, tensor] : *tensors) ASSERT_LE(tensor.offset + tensor.size, file.size()) << name;
  }
  EXPECT_GT(accepted, 0u);
}

}  // namespace
}  // namespace quern::weights
