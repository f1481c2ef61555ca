#include "support/reference_checkpoint.h"

#include <string>

#include "base/file.h"
#include "base/hash.h"
#include "support/test_support.h"

namespace quern::testing {
namespace {

using Writer = Result<std::filesystem::path> (*)(Scheme, const std::filesystem::path&);

struct Case {
  const char* folder;
  Writer write;
  Scheme scheme;
  uint64_t fnv1a_of_safetensors;  // of the file that tools/reference writes with --checkpoints
};

constexpr Case kCases[] = {
    {"tiny-reference/bf16", tiny_reference, Scheme::kBf16, 0xd5cd8dc0b78c6984},
    {"tiny-reference/fp8-block", tiny_reference, Scheme::kFp8Block, 0x515cec893eec82c7},
    {"second-reference/bf16", second_reference, Scheme::kBf16, 0x9ac460a21848081b},
    {"second-reference/fp8-block", second_reference, Scheme::kFp8Block, 0xbebc44f9adbb9eba},
};

TEST(ReferenceCheckpoint, HasTheBytesThatTheExpectedValuesWereComputedFrom) {
  for (const Case& c : kCases) {
    SCOPED_TRACE(c.folder);
    const TemporaryFolder temporary;
    const auto folder = c.write(c.scheme, temporary.path() / "not" / "there yet");
    ASSERT_OK(folder);
    const auto weights = read_file(*folder / "model.safetensors");
    ASSERT_OK(weights);
    EXPECT_EQ(fnv1a(*weights), c.fnv1a_of_safetensors) << fmt::format("{:#018x}", fnv1a(*weights));
    const auto config = read_file(*folder / "config.json"), original = read_file(data_path(c.folder) / "config.json");
    ASSERT_OK(config);
    ASSERT_OK(original);
    EXPECT_EQ(*config, *original);
  }
}

TEST(ReferenceCheckpoint, SaysWhyItCannotWrite) {
  const TemporaryFolder temporary;
  ASSERT_OK(write_file(temporary.path() / "file", "not a folder"));
  const auto result = tiny_reference(Scheme::kBf16, temporary.path() / "file");
  ASSERT_FALSE(result.has_value());
  EXPECT_THAT(result.error().message, ::testing::HasSubstr("file"));
}

}  // namespace
}  // namespace quern::testing
