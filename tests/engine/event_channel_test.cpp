#include "engine/event_channel.h"

#include <thread>
#include <utility>

#include "support/test_support.h"

namespace quern::engine {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

TokenEvent tokens(std::vector<int32_t> ids) { return TokenEvent{.tokens = std::move(ids)}; }
TokenEvent last(std::vector<int32_t> ids, FinishReason reason, int32_t completion_tokens) {
  TokenEvent event = tokens(std::move(ids));
  event.finish = Finish{.reason = reason, .usage = {.prompt_tokens = 5, .completion_tokens = completion_tokens}};
  return event;
}

TEST(EventChannel, JoinsNewsThatWasNotReadYet) {
  EventChannel channel;
  EXPECT_FALSE(channel.try_next().has_value());
  channel.push(tokens({1, 2}));
  channel.push(last({3}, FinishReason::kLength, 3));
  const TokenEvent event = channel.next();
  EXPECT_THAT(event.tokens, ElementsAre(1, 2, 3));
  EXPECT_EQ(event.finish->reason, FinishReason::kLength);
  EXPECT_FALSE(channel.try_next().has_value());
}

TEST(EventChannel, RepeatsTheFinishToAReaderWhoAsksOnceMore) {
  EventChannel channel;
  channel.push(last({1}, FinishReason::kStop, 1));
  channel.next();
  const TokenEvent again = channel.next();
  EXPECT_THAT(again.tokens, IsEmpty());
  EXPECT_EQ(again.finish->reason, FinishReason::kStop);
}

TEST(EventChannel, WakesAReaderThatWaits) {
  EventChannel channel;
  std::jthread engine([&] { channel.push(tokens({7})); });
  EXPECT_THAT(channel.next().tokens, ElementsAre(7));
}

TEST(EventChannel, CallsWakeForEachEventAndForOneThatIsWaiting) {
  EventChannel channel;
  channel.push(tokens({1}));
  int calls = 0;
  channel.on_event([&] { ++calls; });
  EXPECT_EQ(calls, 1);
  channel.push(tokens({2}));
  EXPECT_EQ(calls, 2);
  channel.detach();
  channel.push(tokens({3}));
  EXPECT_EQ(calls, 2);
}

TEST(EventChannel, MayBeReadFromWake) {
  EventChannel channel;
  std::vector<int32_t> read;
  channel.on_event([&] {
    while (auto event = channel.try_next()) read.insert(read.end(), event->tokens.begin(), event->tokens.end());
  });
  channel.push(tokens({1, 2}));
  channel.push(tokens({3}));
  EXPECT_THAT(read, ElementsAre(1, 2, 3));
}

TEST(EventChannel, DropsTokensOnTheirWayAfterCancel) {
  EventChannel channel;
  channel.push(tokens({1, 2}));
  EXPECT_TRUE(channel.cancel());
  EXPECT_FALSE(channel.cancel());
  channel.push(tokens({3}));
  EXPECT_FALSE(channel.try_next().has_value());
  channel.push(last({}, FinishReason::kCancelled, 3));
  const TokenEvent event = channel.next();
  EXPECT_THAT(event.tokens, IsEmpty());
  EXPECT_EQ(event.finish->reason, FinishReason::kCancelled);
}

TEST(EventChannel, CutsTokensBehindAStop) {
  EventChannel channel;
  channel.push(tokens({1, 2}));
  channel.next();
  channel.push(tokens({3, 4, 5}));
  EXPECT_TRUE(channel.stop_at(3));
  EXPECT_THAT(channel.next().tokens, ElementsAre(3));
  channel.push(tokens({6}));
  EXPECT_FALSE(channel.try_next().has_value());
  EXPECT_FALSE(channel.stop_at(3));
  EXPECT_FALSE(channel.stop_at(4));
}

TEST(EventChannel, ReportsAStopThatTheEngineHeardTooLate) {
  EventChannel channel;
  channel.push(tokens({1, 2}));
  channel.next();
  channel.push(last({3, 4}, FinishReason::kLength, 4));
  EXPECT_FALSE(channel.stop_at(2));
  const TokenEvent event = channel.next();
  EXPECT_THAT(event.tokens, IsEmpty());
  EXPECT_EQ(event.finish->reason, FinishReason::kStop);
  EXPECT_EQ(event.finish->usage.completion_tokens, 2);
  EXPECT_EQ(event.finish->usage.prompt_tokens, 5);
}

TEST(EventChannel, KeepsAnEndThatComesBeforeTheStop) {
  EventChannel channel;
  EXPECT_TRUE(channel.stop_at(10));
  channel.push(last({1, 2}, FinishReason::kLength, 2));
  EXPECT_EQ(channel.next().finish->reason, FinishReason::kLength);
}

}  // namespace
}  // namespace quern::engine
