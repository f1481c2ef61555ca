#include "base/file.h"

#include "support/test_support.h"

namespace quern {
namespace {

TEST(File, WritesAndReadsBytesAndLeavesNoPartialFile) {
  testing::TemporaryFolder folder;
  const auto path = folder.path() / "bytes";
  const std::string bytes("a\0b\n\xff", 5);
  ASSERT_OK(write_file(path, "old and longer"));
  ASSERT_OK(write_file(path, bytes));
  EXPECT_EQ(read_file(path).value(), bytes);
  EXPECT_EQ(std::distance(std::filesystem::directory_iterator(folder.path()), {}), 1);
}

TEST(File, SaysWhichFileIsMissingOrIsNone) {
  testing::TemporaryFolder folder;
  for (const auto& result : {read_file(folder.path() / "nothing")}) {
    ASSERT_FALSE(result.has_value());
    EXPECT_EQ(result.error().code, ErrorCode::kNotFound);
    EXPECT_THAT(result.error().message, ::testing::HasSubstr("nothing"));
  }
  EXPECT_FALSE(read_file(folder.path()).has_value());
  EXPECT_FALSE(MappedFile::open(folder.path()).has_value());
  EXPECT_EQ(MappedFile::open(folder.path() / "nothing").error().code, ErrorCode::kNotFound);
  EXPECT_FALSE(write_file(folder.path() / "no" / "such" / "folder", "x").has_value());
}

TEST(MappedFile, ShowsTheBytesAndMovesItsMapping) {
  testing::TemporaryFolder folder;
  ASSERT_OK(write_file(folder.path() / "data", "0123456789"));
  ASSERT_OK(write_file(folder.path() / "empty", ""));
  MappedFile file = MappedFile::open(folder.path() / "data").value();
  const MappedFile moved = std::move(file);
  ASSERT_EQ(moved.bytes().size(), 10u);
  EXPECT_EQ(static_cast<char>(moved.bytes()[7]), '7');
  moved.will_need(2, 5);
  moved.done_with(0, 10);
  EXPECT_EQ(static_cast<char>(moved.bytes()[9]), '9') << "pages come back from the file";
  EXPECT_TRUE(MappedFile::open(folder.path() / "empty").value().bytes().empty());
}

}  // namespace
}  // namespace quern
