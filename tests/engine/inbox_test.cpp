#include "engine/inbox.h"

#include <memory>
#include <utility>

#include "support/test_support.h"

namespace quern::engine {
namespace {

std::unique_ptr<Sequence> sequence() { return std::make_unique<Sequence>(); }

TEST(Inbox, TakesWhatCanRunAtOnceAndTheQueueBesides) {
  Inbox inbox(2, 1);
  EXPECT_OK(inbox.submit(sequence()));
  EXPECT_OK(inbox.submit(sequence()));
  EXPECT_OK(inbox.submit(sequence()));
  const auto refused = inbox.submit(sequence());
  ASSERT_FALSE(refused.has_value());
  EXPECT_EQ(refused.error().code, ErrorCode::kResourceExhausted);

  std::vector<Command> commands;
  EXPECT_TRUE(inbox.take(commands, false));
  EXPECT_EQ(commands.size(), 3u);
  EXPECT_FALSE(inbox.submit(sequence()).has_value()) << "taken, but not yet dealt with";
  inbox.publish(2, 1);
  EXPECT_FALSE(inbox.submit(sequence()).has_value());
  inbox.publish(2, 0);
  EXPECT_OK(inbox.submit(sequence()));
}

TEST(Inbox, CountsOnNoFreePlacesWhileOthersWait) {
  Inbox inbox(8, 2);
  inbox.publish(1, 2);  // memory for one
  EXPECT_EQ(inbox.submit(sequence()).error().code, ErrorCode::kResourceExhausted);
}

TEST(Inbox, KeepsTheFirstReasonForWhichItRefuses) {
  Inbox inbox(1, 1);
  inbox.refuse(make_error(ErrorCode::kUnavailable, "the first"));
  inbox.refuse(make_error(ErrorCode::kUnavailable, "the second"));
  EXPECT_EQ(inbox.submit(sequence()).error().message, "the first");
}

TEST(Inbox, IsIdleOnlyWhenNothingSubmittedIsLeft) {
  Inbox inbox(1, 1);
  const auto now = std::chrono::steady_clock::now();
  EXPECT_TRUE(inbox.wait_until_idle(now));
  ASSERT_OK(inbox.submit(sequence()));
  EXPECT_FALSE(inbox.wait_until_idle(now));
  inbox.set_idle(true);
  EXPECT_FALSE(inbox.wait_until_idle(now)) << "the engine thread has not seen it yet";
  std::vector<Command> commands;
  inbox.take(commands, true);
  inbox.publish(0, 0);
  inbox.set_idle(true);
  EXPECT_TRUE(inbox.wait_until_idle(now));
}

TEST(Inbox, CallsWhoListensForWhateverComesNext) {
  Inbox inbox(4, 4);
  int num_calls = 0;
  const auto listen = [&] { return inbox.listen([&] { ++num_calls; }); };
  std::vector<Command> commands;
  EXPECT_TRUE(listen());
  inbox.post(Cancel{1});
  EXPECT_EQ(num_calls, 1);
  EXPECT_FALSE(listen()) << "something is there";
  inbox.take(commands, false);
  inbox.post(Cancel{2});
  EXPECT_EQ(num_calls, 1) << "nobody listens since it was taken";
  commands.clear();
  inbox.take(commands, false);
  EXPECT_TRUE(listen());
  inbox.close();
  EXPECT_EQ(num_calls, 2);
  EXPECT_FALSE(listen());
}

TEST(Inbox, IgnoresMessagesOnceItIsClosed) {
  Inbox inbox(1, 1);
  inbox.post(Cancel{4});
  inbox.close();
  inbox.post(Cancel{5});
  std::vector<Command> commands;
  EXPECT_FALSE(inbox.take(commands, true));
  EXPECT_EQ(commands.size(), 1u);
  EXPECT_EQ(inbox.submit(sequence()).error().code, ErrorCode::kUnavailable);
}

}  // namespace
}  // namespace quern::engine
