#include "base/bounded_queue.h"

#include <thread>
#include <vector>

#include "support/test_support.h"

namespace quern {
namespace {

TEST(BoundedQueue, AnswersFullInsteadOfGrowing) {
  BoundedQueue<std::unique_ptr<int>> queue(2);
  EXPECT_TRUE(queue.try_push(std::make_unique<int>(1)));
  EXPECT_TRUE(queue.try_push(std::make_unique<int>(2)));
  auto third = std::make_unique<int>(3);
  EXPECT_FALSE(queue.try_push(third));
  EXPECT_NE(third, nullptr) << "what was not taken stays with the caller";
  EXPECT_EQ(queue.size(), 2u);
  EXPECT_EQ(**queue.try_pop(), 1);
  EXPECT_TRUE(queue.try_push(third));
}

TEST(BoundedQueue, DrainsAfterCloseAndTakesNothingMore) {
  BoundedQueue<int> queue(4);
  EXPECT_TRUE(queue.push(1));
  queue.close();
  EXPECT_FALSE(queue.push(2));
  EXPECT_FALSE(queue.try_push(3));
  EXPECT_EQ(queue.pop(), 1);
  EXPECT_EQ(queue.pop(), std::nullopt);
}

TEST(BoundedQueue, WakesWaitersOnClose) {
  BoundedQueue<int> empty(1), full(1);
  ASSERT_TRUE(full.push(0));
  std::optional<int> popped = 5;
  bool pushed = true;
  std::jthread consumer([&] { popped = empty.pop(); });
  std::jthread producer([&] { pushed = full.push(1); });
  empty.close();
  full.close();
  consumer.join();
  producer.join();
  EXPECT_EQ(popped, std::nullopt);
  EXPECT_FALSE(pushed);
}

TEST(BoundedQueue, AWaitEndsWhenItIsWoken) {
  BoundedQueue<int> queue(2);
  queue.wake();
  EXPECT_EQ(queue.pop_or_wake(), std::nullopt) << "woken before it waited";
  EXPECT_TRUE(queue.push(1));
  queue.wake();
  EXPECT_EQ(queue.pop_or_wake(), 1) << "a value comes first";
  std::optional<int> popped = 5;
  std::jthread consumer([&] { popped = queue.pop_or_wake(); });
  queue.wake();
  consumer.join();
  EXPECT_EQ(popped, std::nullopt);
}

TEST(BoundedQueue, GivesUpAfterATimeout) {
  BoundedQueue<int> queue(1);
  EXPECT_EQ(queue.pop_for(std::chrono::milliseconds(1)), std::nullopt);
  EXPECT_TRUE(queue.push(8));
  EXPECT_EQ(queue.pop_for(std::chrono::hours(1)), 8);
}

TEST(BoundedQueue, LosesAndDoublesNothingBetweenManyThreads) {
  constexpr int kPerProducer = 2000, kProducers = 3;
  BoundedQueue<int> queue(5);
  std::vector<std::vector<int>> received(2);
  {
    std::vector<std::jthread> consumers;
    for (auto& list : received)
      consumers.emplace_back([&queue, &list] {
        while (const auto value = queue.pop()) list.push_back(*value);
      });
    {
      std::vector<std::jthread> producers;
      for (int p = 0; p < kProducers; ++p)
        producers.emplace_back([&queue, p] {
          for (int i = 0; i < kPerProducer; ++i) ASSERT_TRUE(queue.push(p * kPerProducer + i));
        });
    }
    queue.close();
  }
  std::vector<int> seen(kProducers * kPerProducer);
  for (const auto& list : received) {
    std::vector<int> last(kProducers, -1);
    for (const int value : list) {
      ++seen[static_cast<size_t>(value)];
      int& previous = last[static_cast<size_t>(value / kPerProducer)];
      EXPECT_LT(previous, value) << "one producer's values arrive in order";
      previous = value;
    }
  }
  for (const int count : seen) ASSERT_EQ(count, 1);
}

}  // namespace
}  // namespace quern
