#include "base/parallel.h"

#include <gtest/gtest.h>

#include <atomic>
#include <numeric>

namespace quern {
namespace {

TEST(ParallelPieces, CoverEverythingOnceWhateverTheGrain) {
  for (const int64_t n : {0, 1, 7, 8, 1000, 1003})
    for (const int64_t grain : {0, 1, 3, 100, 5000}) {
      std::vector<std::atomic<int>> visits(static_cast<size_t>(n));
      std::atomic<int64_t> pieces = 0;
      parallel_pieces(n, grain, [&](int64_t begin, int64_t end, int64_t thread) {
        EXPECT_GE(thread, 0);
        EXPECT_LT(thread, num_loading_threads());
        EXPECT_LT(begin, end);
        for (int64_t i = begin; i < end; ++i) ++visits[static_cast<size_t>(i)];
        ++pieces;
      });
      for (const std::atomic<int>& count : visits) EXPECT_EQ(count, 1) << n << " by " << grain;
      if (grain > n && n > 0) {
        EXPECT_EQ(pieces, 1) << "a small piece is the caller's";
      }
    }
}

}  // namespace
}  // namespace quern
