#include "engine/engine_thread.h"

#include <pthread.h>

#include <algorithm>
#include <chrono>
#include <iterator>
#include <span>
#include <string>
#include <variant>

#include "base/check.h"
#include "base/log.h"
#include "base/overloaded.h"
#include "engine/check_request.h"
#include "engine/stream.h"

namespace quern::engine {
namespace {

using Clock = std::chrono::steady_clock;

}  // namespace

EngineThread::EngineThread(std::unique_ptr<worker::WorkerGroup> workers, const EngineOptions& options, const Budget& budget)
    : workers_(std::move(workers)),
      max_steps_in_flight_(static_cast<size_t>(budget.max_steps_in_flight)),
      inbox_(std::make_shared<Inbox>(budget.max_num_seqs, options.max_queue_len)),
      scheduler_(workers_->limits(), budget, options.prefix_cache, options.speculation) {
  publish();
  thread_ = std::jthread([this] { run(); });
}

Result<std::unique_ptr<RequestStream>> EngineThread::submit(GenerationRequest request) {
  RETURN_IF_ERROR(check_request(request, limits()));
  auto sequence = std::make_unique<Sequence>();
  sequence->id = next_id_.fetch_add(1);
  sequence->request = std::move(request);
  sequence->events = std::make_shared<EventChannel>();
  auto stream = std::make_unique<Stream>(sequence->id, sequence->events, inbox_);
  RETURN_IF_ERROR(inbox_->submit(std::move(sequence)));
  return std::unique_ptr<RequestStream>(std::move(stream));
}

EngineStats EngineThread::stats() const {
  std::lock_guard lock(published_mutex_);
  return published_stats_;
}

std::optional<Error> EngineThread::failure() const {
  std::lock_guard lock(published_mutex_);
  return published_failure_;
}

void EngineThread::drain(int64_t timeout_ms) {
  constexpr int64_t kLongest = int64_t{365} * 24 * 3600 * 1000;
  const auto timeout = std::chrono::milliseconds(std::clamp<int64_t>(timeout_ms, 0, kLongest));
  inbox_->refuse(make_error(ErrorCode::kUnavailable, "the server is shutting down and takes no new requests"));
  if (inbox_->wait_until_idle(Clock::now() + timeout)) return;
  inbox_->post(CancelAll{});
  inbox_->wait_until_idle(std::nullopt);
}

void EngineThread::run() {
  pthread_setname_np(pthread_self(), "quern-engine");
  std::vector<Command> commands;
  Clock::time_point awake_since = Clock::now();
  const auto asleep = [&](auto&& wait) {
    stats_.host_seconds += std::chrono::duration<double>(Clock::now() - awake_since).count();
    auto woken_by = wait();
    awake_since = Clock::now();
    return woken_by;
  };
  for (bool idle = true;;) {
    const bool open = idle ? asleep([&] { return inbox_->take(commands, true); }) : inbox_->take(commands, false);
    for (Command& command : commands) apply(command);
    commands.clear();
    if (failure_) finish_all({.reason = FinishReason::kError, .error = failure_});
    if (!open) finish_all({.reason = FinishReason::kCancelled});
    while (in_flight_.size() < max_steps_in_flight_ && submit_step()) {
    }
    send_masks();
    publish();
    idle = in_flight_.empty();
    if (idle) {
      CHECK(scheduler_.idle());  // the first sequence can always go on
      if (!open) return;
      continue;
    }
    if (std::optional<worker::StepResult> result = asleep([&] { return wait(open); })) {
      handle(*std::move(result));
      send_masks();
    }
  }
}

/// The result of the oldest step. Nothing if something has come to the inbox meanwhile that might run beside the steps in flight: of a pipeline's stages the first may have nothing
/// to do long before the last is done.
std::optional<worker::StepResult> EngineThread::wait(bool open) {
  if (!open || in_flight_.size() >= max_steps_in_flight_) return workers_->wait();
  if (!inbox_->listen([this] { workers_->wake(); })) return std::nullopt;
  return workers_->wait_or_wake();
}

void EngineThread::apply(Command& command) {
  std::visit(Overloaded{
                 [this](Submit& submit) { scheduler_.add(std::move(submit.sequence)); },
                 [this](const Cancel& cancel) {
                   if (Sequence* sequence = scheduler_.find(cancel.id)) finish(*sequence, {.reason = FinishReason::kCancelled});
                 },
                 [this](const StopAt& stop) {
                   if (Sequence* sequence = scheduler_.find(stop.id)) stop_at(*sequence, stop.completion_tokens);
                 },
                 [this](const CancelAll&) { finish_all({.reason = FinishReason::kCancelled}); },
             },
             command);
}

void EngineThread::stop_at(Sequence& sequence, int32_t completion_tokens) {
  if (completion_tokens > sequence.token_limit) return;
  sequence.token_limit = std::max(completion_tokens, 0);
  sequence.stopped = true;
  if (sequence.num_generated() >= sequence.token_limit) finish(sequence, {.reason = FinishReason::kStop});
}

/// Plans the next step and hands it to the workers. False when nothing can go on.
bool EngineThread::submit_step() {
  std::optional<PlannedStep> step = scheduler_.plan(static_cast<int32_t>(in_flight_.size()));
  if (!step) return false;
  const bool masks_due = std::any_of(step->runs.begin(), step->runs.end(), [](const PlannedRun& run) { return run.mask_pending; });
  in_flight_.push_back({step->plan.step, std::move(step->runs), step->decode_depth, masks_due});
  workers_->submit(std::move(step->plan));
  return true;
}

/// A grammar's mask is known once all earlier tokens are, that is, when no older step in flight names the sequence. Masks go in the order of
/// the steps that wait for them.
void EngineThread::send_masks() {
  for (StepInFlight& step : in_flight_) {
    if (!step.masks_due) continue;
    const auto known = [&](const PlannedRun& run) { return !run.mask_pending || run.sequence->in_flight.front().step == step.step; };
    if (!std::all_of(step.runs.begin(), step.runs.end(), known)) return;
    step.masks_due = false;
    worker::StepMasks masks{.step = step.step};
    for (const PlannedRun& run : step.runs)
      if (run.mask_pending) masks.rows.emplace_back(run.sequence->slot->index(), make_masks(*run.sequence, run));
    workers_->submit_masks(std::move(masks));
  }
}

/// One mask for every token that the run may draw: each as if the drafts before it had been accepted.
std::vector<uint32_t> EngineThread::make_masks(Sequence& sequence, const PlannedRun& run) const {
  const size_t num_words = (static_cast<size_t>(limits().vocab_size) + 31) / 32;
  const size_t num_masks = run.verify ? static_cast<size_t>(run.num_rows) : 1;
  std::vector<uint32_t> masks(num_masks * num_words, ~0u);
  if (sequence.state == SequenceState::kFinished) return masks;
  TokenConstraint& constraint = *sequence.request.constraint;
  const std::vector<int32_t>& drafts = run.drafts.empty() ? sequence.last_drafts : run.drafts;
  int32_t num_accepted = 0;
  for (size_t i = 0; i < num_masks; ++i) {
    const std::span<uint32_t> mask(masks.data() + i * num_words, num_words);
    std::fill(mask.begin(), mask.end(), 0);
    if (!constraint.fill_mask(mask)) std::fill(mask.begin(), mask.end(), ~0u);
    // Behind a draft that is not allowed nothing is drawn.
    if (i + 1 == num_masks || i >= drafts.size() || constraint.finished()) break;
    const auto draft = static_cast<size_t>(drafts[i]);
    if ((mask[draft / 32] >> (draft % 32) & 1u) == 0) break;
    if (!constraint.accept(drafts[i])) break;
    ++num_accepted;
  }
  constraint.rollback(num_accepted);
  return masks;
}

void EngineThread::handle(worker::StepResult result) {
  const StepInFlight step = std::move(in_flight_.front());
  in_flight_.pop_front();
  CHECK(result.step == step.step);
  ++stats_.num_steps;
  const auto bucket = std::lower_bound(kStepRowBounds.begin(), kStepRowBounds.end(), result.computed_rows);
  ++stats_.steps_by_rows[static_cast<size_t>(bucket - kStepRowBounds.begin())];
  stats_.computed_rows += static_cast<uint64_t>(result.computed_rows);
  stats_.gathered_rows += static_cast<uint64_t>(result.gathered_rows);
  stats_.device_seconds += result.device_seconds;
  if (result.error) {
    if (!failure_) {
      log_error("step {} failed: {}", result.step, result.error->message);
      failure_ = std::move(result.error);
      inbox_->refuse(make_error(ErrorCode::kUnavailable, "the engine has stopped after a device error: {}", failure_->message));
    }
    finish_all({.reason = FinishReason::kError, .error = failure_});
  } else {
    CHECK(result.runs.size() == step.runs.size());
  }
  if (step.decode_depth >= 0 && !result.error)
    scheduler_.speculator().observe_step(static_cast<int32_t>(step.runs.size()), step.decode_depth, result.device_seconds);
  for (size_t i = 0; i < step.runs.size(); ++i) {
    const PlannedRun& run = step.runs[i];
    const auto num_sampled = static_cast<int32_t>(result.error ? 0 : result.runs[i].tokens.size());
    if (run.sequence->state == SequenceState::kFinished) {
      stats_.discarded_rows += static_cast<uint64_t>(run.num_rows);
    } else {
      advance(*run.sequence, run, result.runs[i]);
    }
    scheduler_.retire(*run.sequence, num_sampled);
  }
}

/// What a run brought for a sequence that is not finished.
void EngineThread::advance(Sequence& sequence, const PlannedRun& run, worker::RunResult& result) {
  const GenerationRequest& request = sequence.request;
  TokenEvent event;
  if (result.non_finite) {
    const std::string where = run.samples ? fmt::format("at token {} of the output, after", sequence.num_generated() + 1) : "in";
    sequence.faulty = true;
    return finish(sequence, {.reason = FinishReason::kError,
                             .error = make_error(ErrorCode::kInternal, "the model produced non-finite logits {} a prompt of {} tokens",
                                                 where, sequence.num_prompt())});
  }
  sequence.last_drafts = std::move(result.drafts);
  std::move(result.prompt_logprobs.begin(), result.prompt_logprobs.end(), std::back_inserter(sequence.prompt_logprobs));
  if (run.ends_prompt) event.prompt_logprobs = std::move(sequence.prompt_logprobs);

  CHECK(request.sampling.num_logprobs < 0 || result.logprobs.size() == result.tokens.size());
  std::optional<Finish> end;
  for (size_t i = 0; i < result.tokens.size() && !end; ++i) {
    event.tokens.push_back(result.tokens[i]);
    if (request.sampling.num_logprobs >= 0) event.logprobs.push_back(std::move(result.logprobs[i]));
    end = accept(sequence, result.tokens[i]);
  }
  if (run.ends_prompt && request.max_tokens == 0) end = Finish{.reason = FinishReason::kLength};
  if (end) return finish(sequence, *std::move(end), std::move(event));
  if (!event.tokens.empty() || !event.prompt_logprobs.empty()) events_.emplace_back(sequence.events, std::move(event));
}

/// The sequence grows by `token`; how it ends if that was the last one.
std::optional<Finish> EngineThread::accept(Sequence& sequence, int32_t token) {
  const std::vector<int32_t>& stop_ids = sequence.request.sampling.stop_ids;
  sequence.generated.push_back(token);
  ++stats_.unfinished_generation_tokens;
  if (std::find(stop_ids.begin(), stop_ids.end(), token) != stop_ids.end())
    return Finish{.reason = FinishReason::kStop, .stop_token = token};
  if (TokenConstraint* constraint = sequence.request.constraint.get()) {
    if (!constraint->accept(token))
      return Finish{.reason = FinishReason::kError,
                    .error = make_error(ErrorCode::kInternal, "token {} of the output is {}, which the grammar does not allow",
                                        sequence.num_generated(), token)};
    if (constraint->finished()) return Finish{.reason = FinishReason::kStop};
  }
  if (sequence.num_generated() >= sequence.token_limit)
    return Finish{.reason = sequence.stopped ? FinishReason::kStop : FinishReason::kLength};
  return std::nullopt;
}

/// Tells the consumer, and takes the sequence out of the schedule.
void EngineThread::finish(Sequence& sequence, Finish finish, TokenEvent event) {
  finish.usage = {.prompt_tokens = sequence.num_prompt(),
                  .completion_tokens = std::min(sequence.num_generated(), sequence.token_limit),
                  .cached_tokens = sequence.cached_tokens.value_or(0)};
  const auto waited_until = sequence.first_admitted.value_or(std::chrono::steady_clock::now());
  finish.queue_seconds = std::chrono::duration<double>(waited_until - sequence.submitted).count();
  stats_.prompt_tokens += static_cast<uint64_t>(finish.usage.prompt_tokens);
  stats_.generation_tokens += static_cast<uint64_t>(finish.usage.completion_tokens);
  stats_.unfinished_generation_tokens -= sequence.generated.size();
  switch (finish.reason) {
    case FinishReason::kStop: ++stats_.requests_stop; break;
    case FinishReason::kLength: ++stats_.requests_length; break;
    case FinishReason::kCancelled: ++stats_.requests_cancelled; break;
    case FinishReason::kError: ++stats_.requests_error; break;
  }
  sequence.interrupted = finish.reason == FinishReason::kCancelled;
  event.finish = std::move(finish);
  events_.emplace_back(sequence.events, std::move(event));
  scheduler_.remove(sequence);
}

void EngineThread::finish_all(const Finish& finish_as) {
  if (scheduler_.num_running() + scheduler_.num_waiting() == 0) return;
  for (const uint64_t id : scheduler_.unfinished()) finish(*scheduler_.find(id), finish_as);
}

/// Lets others see where the engine stands, then sends the events: who has seen an event also finds it counted, and its place free.
void EngineThread::publish() {
  stats_.num_running = scheduler_.num_running();
  stats_.num_waiting = scheduler_.num_waiting();
  stats_.num_blocks = scheduler_.blocks().size();
  stats_.num_free_blocks = scheduler_.blocks().num_free() + scheduler_.blocks().num_idle();
  stats_.num_slots = scheduler_.slots().size();
  stats_.num_free_slots = scheduler_.slots().num_free();
  stats_.num_preemptions = scheduler_.num_preemptions();
  const PrefixCache& cache = scheduler_.prefix_cache();
  stats_.prefix_queried_tokens = cache.num_queried_tokens();
  stats_.prefix_hit_tokens = cache.num_hit_tokens();
  stats_.prefix_evictions = cache.num_evictions();
  stats_.prefix_host_tokens = cache.num_host_tokens();
  stats_.num_host_blocks = cache.num_host_blocks();
  stats_.num_host_blocks_used = cache.num_host_blocks_used();
  stats_.num_swapped = cache.num_swapped();
  stats_.num_recomputed = cache.num_recomputed();
  stats_.num_snapshots = limits().num_snapshots;
  stats_.num_snapshots_used = cache.num_snapshots_used();
  stats_.speculation = scheduler_.speculator().counts();
  stats_.max_draft_tokens = scheduler_.speculator().options().num_speculative_tokens;
  stats_.num_cached_blocks = cache.num_cached_blocks();
  {
    std::lock_guard lock(published_mutex_);
    published_stats_ = stats_;
    published_failure_ = failure_;
  }
  inbox_->publish(scheduler_.num_running(), scheduler_.num_waiting());
  for (auto& [channel, event] : events_) channel->push(std::move(event));
  events_.clear();
  inbox_->set_idle(scheduler_.idle());
}

}  // namespace quern::engine
