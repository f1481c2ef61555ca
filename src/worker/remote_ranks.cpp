#include "worker/remote_ranks.h"

#include "base/log.h"
#include "base/overloaded.h"

namespace quern::worker {
namespace {

double seconds(std::chrono::steady_clock::duration time) { return std::chrono::duration<double>(time).count(); }

}  // namespace

ProcessChannel::Settings channel_settings(const ExecutionPlan& plan) {
  // Signs of life come from threads of their own, however long a step takes.
  ProcessChannel::Settings settings;
  if (plan.options.collective_timeout.count() > 0) settings.silence = plan.options.collective_timeout;
  // Silence says more than a rank that waits for rows, who may have begun a little before the last sign: it is told first.
  settings.silence = settings.silence * 5 / 6;
  return settings;
}

RemoteRanks::RemoteRanks(const ExecutionPlan& plan, Processes& processes, int32_t process, Loading loading)
    : processes_(processes),
      name_(plan.process_name(process)),
      limits_(plan.limits),
      patience_(plan.step_timeout()),
      loading_(std::move(loading)) {
  channel_.emplace(processes, process, channel_settings(plan),
                   ProcessChannel::Callbacks{.on_message = [this](Message message) { handle(std::move(message)); },
                                             .on_failure = [this, transport = processes.transport()](const Error& error) {
                                               std::string about;
                                               {
                                                 const std::lock_guard lock(mutex_);
                                                 about = what_it_had_to_do();
                                               }
                                               fail(make_error(ErrorCode::kInternal, "{} (transport {}{})", error.message, transport, about));
                                             }});
  channel_->open();
}

RemoteRanks::~RemoteRanks() {
  abort(make_error(ErrorCode::kUnavailable, "process 0 has ended"));
  channel_.reset();
}

std::string RemoteRanks::what_it_had_to_do() const {
  if (outstanding_.empty()) return loaded_ ? "; no step was under way" : "; it was loading";
  return fmt::format("; step {} was sent to it {:.1f} s ago", outstanding_.front().plan->step, seconds(Clock::now() - outstanding_.front().sent));
}

void RemoteRanks::handle(Message message) {
  std::visit(Overloaded{
                 [this](const Alive& alive) {
                   if (!loaded_ && loading_.progress && alive.loaded >= 0 && alive.loaded <= 1) loading_.progress(alive.loaded);
                 },
                 [this](const Started&) {
                   const std::lock_guard lock(mutex_);
                   loaded_ = true;
                   changed_.notify_all();
                 },
                 [this](StepResult& result) { take(std::move(result)); },
                 [this](const Abort& abort) { fail(abort.error); },
                 [this](const Ended&) {
                   const std::lock_guard lock(mutex_);
                   ended_ = true;
                   changed_.notify_all();
                 },
                 [this](const auto&) { fail(make_error(ErrorCode::kInternal, "it has sent what only process 0 sends")); },
             },
             message);
}

void RemoteRanks::take(StepResult result) {
  if (result.error) return fail(*result.error);
  std::function<void(StepResult)> on_result;
  Result<void> sound;
  {
    const std::lock_guard lock(mutex_);
    if (failure_) return;
    if (outstanding_.empty()) {
      sound = make_error(ErrorCode::kInternal, "it has sent a result of step {}, which it was not given", result.step);
    } else {
      sound = check_result(result, *outstanding_.front().plan, limits_);
      outstanding_.pop_front();
    }
    if (sound) {
      on_result = on_result_;
      ++num_reporting_;
    }
  }
  if (!sound) return fail(sound.error());
  report(on_result, std::move(result));
}

void RemoteRanks::report(const std::function<void(StepResult)>& on_result, StepResult result) {
  if (on_result) on_result(std::move(result));
  const std::lock_guard lock(mutex_);
  --num_reporting_;
  changed_.notify_all();
}

void RemoteRanks::fail(const Error& error) {
  std::function<void(StepResult)> on_result;
  bool was_loading = false;
  {
    const std::lock_guard lock(mutex_);
    if (failure_ || ended_) return;
    failure_ = error;
    on_result = on_result_;
    ++num_reporting_;
    was_loading = !loaded_;
    changed_.notify_all();
  }
  processes_.set_failure(error.with_context(name_));
  if (was_loading && loading_.failed) loading_.failed();
  report(on_result, {.error = error});
}

Result<void> RemoteRanks::wait_until_loaded(const std::atomic<bool>& stop) {
  constexpr std::chrono::milliseconds kLook{20};
  std::unique_lock lock(mutex_);
  while (!loaded_ && !failure_ && !stop) changed_.wait_for(lock, kLook);
  if (failure_) return failure_->with_context(name_);
  if (!loaded_) return make_error(ErrorCode::kCancelled, "{} was not waited for", name_);
  return {};
}

void RemoteRanks::report_to(std::function<void(StepResult)> on_result) {
  std::optional<Error> failure;
  {
    const std::lock_guard lock(mutex_);
    on_result_ = on_result;
    failure = failure_;
  }
  if (failure) on_result({.error = failure});
}

void RemoteRanks::submit(RankStep step) {
  SentStep sent{.plan = *step.plan, .slots = {}};
  if (step.slots) sent.slots = named_slots(*step.plan, *step.slots);
  {
    const std::lock_guard lock(mutex_);
    if (failure_) return;
    outstanding_.push_back({step.plan, Clock::now()});
  }
  channel_->send(std::move(sent));
}

void RemoteRanks::submit_masks(StepMasks masks) { channel_->send(std::move(masks)); }

void RemoteRanks::close() { channel_->send(EndOfSteps{}); }

void RemoteRanks::join() {
  std::unique_lock lock(mutex_);
  if (!changed_.wait_for(lock, patience_, [this] { return ended_ || failure_; })) log_error("{} has not ended", name_);
  ended_ = true;  // nothing is reported any more, to a group whose members go
  changed_.wait(lock, [this] { return num_reporting_ == 0; });
}

void RemoteRanks::abort(const Error& error) {
  {
    const std::lock_guard lock(mutex_);
    if (ended_ || told_) return;
    told_ = true;
    if (!failure_) failure_ = error;
    changed_.notify_all();
  }
  channel_->send(Abort{error});
}

}  // namespace quern::worker
