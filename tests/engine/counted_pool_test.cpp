#include "engine/counted_pool.h"

#include <utility>
#include <vector>

#include "support/test_support.h"

namespace quern::engine {
namespace {

TEST(CountedPool, TakesAnIndexBackWithItsLastHandle) {
  BlockPool pool(2);
  std::optional<BlockRef> first = pool.acquire();
  std::optional<BlockRef> second = first;
  EXPECT_FALSE(first->unique());
  EXPECT_EQ(pool.num_free(), 1);
  first.reset();
  EXPECT_TRUE(second->unique());
  EXPECT_EQ(pool.num_free(), 1);
  BlockRef moved = *std::move(second);
  second.reset();
  EXPECT_EQ(pool.num_free(), 1);
  moved = *pool.acquire();
  EXPECT_EQ(pool.num_free(), 1);
}

TEST(CountedPool, CountsWhatOnlyTheCacheHolds) {
  BlockPool pool(3);
  std::vector<BlockRef> user = {*pool.acquire()}, cache = user;
  pool.mark_cached(cache[0], true);
  EXPECT_EQ(pool.num_idle(), 0);
  user.clear();
  EXPECT_EQ(pool.num_idle(), 1);
  user = cache;
  EXPECT_EQ(pool.num_idle(), 0);
  pool.mark_cached(cache[0], false);
  cache.clear();
  EXPECT_EQ(pool.num_idle(), 0);
  EXPECT_EQ(pool.num_free(), 2);
}

}  // namespace
}  // namespace quern::engine
