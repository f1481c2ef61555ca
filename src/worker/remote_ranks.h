#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>

#include "worker/group_member.h"
#include "worker/plan.h"
#include "worker/process_channel.h"

namespace quern::worker {

/// What the ends of a channel between process 0 and another grant each other.
ProcessChannel::Settings channel_settings(const ExecutionPlan& plan);

/// In process 0: the ranks of another process, as one member of the group. Steps go there as bytes, and one result comes back for each. It is lost when it says nothing for a while.
class RemoteRanks final : public GroupMember {
 public:
  struct Loading {
    std::function<void(double)> progress;  // the share of its weights that is packed; until it has loaded
    std::function<void()> failed;          // once, where it never will have
  };
  RemoteRanks(const ExecutionPlan& plan, Processes& processes, int32_t process, Loading loading);
  ~RemoteRanks() override;

  [[nodiscard]] const std::string& name() const { return name_; }
  /// Waits until its ranks have loaded. An error: why they never will have; kCancelled when `stop` was set.
  Result<void> wait_until_loaded(const std::atomic<bool>& stop);
  /// Results, or one of an error when it is lost, go there from now on.
  void report_to(std::function<void(StepResult)> on_result);

  void submit(RankStep step) override;
  void submit_masks(StepMasks masks) override;
  void close() override;
  void join() override;
  void abort(const Error& error) override;

 private:
  using Clock = std::chrono::steady_clock;
  struct Outstanding {
    std::shared_ptr<const StepPlan> plan;
    Clock::time_point sent;
  };
  void handle(Message message);
  void take(StepResult result);
  void fail(const Error& error);
  void report(const std::function<void(StepResult)>& on_result, StepResult result);
  [[nodiscard]] std::string what_it_had_to_do() const;  // under mutex_

  Processes& processes_;
  const std::string name_;
  const WorkerLimits limits_;
  const std::chrono::milliseconds patience_;  // with its end
  Loading loading_;
  std::mutex mutex_;
  std::condition_variable changed_;
  // Under mutex_.
  std::deque<Outstanding> outstanding_;
  std::function<void(StepResult)> on_result_;
  std::optional<Error> failure_;
  bool loaded_ = false, ended_ = false, told_ = false;  // told_: that nothing goes on
  int32_t num_reporting_ = 0;                           // threads inside on_result_
  std::optional<ProcessChannel> channel_;
};

}  // namespace quern::worker
