#include "engine/index_pool.h"

#include <utility>
#include <vector>

#include "support/test_support.h"

namespace quern::engine {
namespace {

TEST(IndexPool, HandsOutEachIndexOnceAndTakesItBackWithTheHandle) {
  SlotPool pool(3);
  std::vector<StateSlot> held;
  while (auto slot = pool.acquire()) held.push_back(*std::move(slot));
  EXPECT_EQ(held.size(), 3u);
  EXPECT_EQ(held[0].index() + held[1].index() + held[2].index(), 3);
  EXPECT_EQ(pool.num_free(), 0);
  const int32_t returned = held.back().index();
  held.pop_back();
  EXPECT_EQ(pool.num_free(), 1);
  EXPECT_EQ(pool.acquire()->index(), returned);
  held.clear();
  EXPECT_EQ(pool.num_free(), 3);
}

TEST(IndexPool, ReturnsAMovedHandleOnce) {
  SlotPool pool(2);
  {
    StateSlot first = *pool.acquire();
    StateSlot moved = std::move(first);
    EXPECT_EQ(pool.num_free(), 1);
    StateSlot second = *pool.acquire();
    second = std::move(moved);
  }
  EXPECT_EQ(pool.num_free(), 2);
}

}  // namespace
}  // namespace quern::engine
