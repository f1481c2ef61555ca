#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include "engine/budget.h"
#include "engine/engine.h"
#include "engine/event_channel.h"
#include "engine/inbox.h"
#include "engine/scheduler.h"

namespace quern::engine {

/// The engine: a scheduler, the steps in flight, and the thread that moves them. It sleeps while nothing is asked of it; while steps are in
/// flight it waits for the oldest, and looks into its inbox between steps, or as soon as something comes while another step might begin.
class EngineThread final : public Engine {
 public:
  EngineThread(std::unique_ptr<worker::WorkerGroup> workers, const EngineOptions& options, const Budget& budget);
  EngineThread(const EngineThread&) = delete;
  EngineThread& operator=(const EngineThread&) = delete;
  /// Requests that still run end as cancelled.
  ~EngineThread() override { inbox_->close(); }

  Result<std::unique_ptr<RequestStream>> submit(GenerationRequest request) override;
  [[nodiscard]] EngineStats stats() const override;
  [[nodiscard]] const worker::WorkerLimits& limits() const override { return workers_->limits(); }
  void drain(int64_t timeout_ms) override;
  [[nodiscard]] std::optional<Error> failure() const override;

 private:
  struct StepInFlight {
    uint64_t step = 0;
    std::vector<PlannedRun> runs;
    int32_t decode_depth = -1;
    bool masks_due = false;
  };

  // Everything below runs on thread_, and only there.
  void run();
  void apply(Command& command);
  void stop_at(Sequence& sequence, int32_t completion_tokens);
  bool submit_step();
  void send_masks();
  std::optional<worker::StepResult> wait(bool open);
  std::vector<uint32_t> make_masks(Sequence& sequence, const PlannedRun& run) const;
  void handle(worker::StepResult result);
  void advance(Sequence& sequence, const PlannedRun& run, worker::RunResult& result);
  std::optional<Finish> accept(Sequence& sequence, int32_t token);
  void finish(Sequence& sequence, Finish finish, TokenEvent event = {});
  void finish_all(const Finish& finish);
  void publish();

  const std::unique_ptr<worker::WorkerGroup> workers_;
  const size_t max_steps_in_flight_;  // more than one: the host plans ahead
  const std::shared_ptr<Inbox> inbox_;
  std::atomic<uint64_t> next_id_{0};

  mutable std::mutex published_mutex_;
  EngineStats published_stats_;
  std::optional<Error> published_failure_;

  // Of thread_ alone.
  Scheduler scheduler_;
  std::deque<StepInFlight> in_flight_;  // oldest first
  std::vector<std::pair<std::shared_ptr<EventChannel>, TokenEvent>>
      events_;  // to be sent once the statistics that include them are published
  EngineStats stats_;
  std::optional<Error> failure_;

  std::jthread thread_;  // last: joined before the rest goes
};

}  // namespace quern::engine
