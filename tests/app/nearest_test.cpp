#include "app/nearest.h"

#include "support/test_support.h"

namespace quern::app {
namespace {

TEST(EditDistance, CountsInsertionsDeletionsSubstitutionsAndSwaps) {
  EXPECT_EQ(edit_distance("", ""), 0);
  EXPECT_EQ(edit_distance("port", ""), 4);
  EXPECT_EQ(edit_distance("port", "ports"), 1);
  EXPECT_EQ(edit_distance("port", "prt"), 1);
  EXPECT_EQ(edit_distance("port", "part"), 1);
  EXPECT_EQ(edit_distance("port", "prot"), 1);
  EXPECT_EQ(edit_distance("kitten", "sitting"), 3);
}

TEST(NearestName, FindsTypingErrorsAndBeginnings) {
  const std::vector<std::string> names = {"--max-model-len", "--max-num-seqs", "--max-num-batched-tokens", "--host", "--port"};
  EXPECT_EQ(nearest_name("--max-model-length", names), "--max-model-len");
  EXPECT_EQ(nearest_name("--max-modle-len", names), "--max-model-len");
  EXPECT_EQ(nearest_name("--max-num-seq", names), "--max-num-seqs");
  EXPECT_EQ(nearest_name("--prot", names), "--port");
}

TEST(NearestName, IsEmptyWhenNothingIsClose) {
  EXPECT_EQ(nearest_name("--frobnicate", {"--host", "--port"}), "");
  EXPECT_EQ(nearest_name("--x", {}), "");
}

}  // namespace
}  // namespace quern::app
