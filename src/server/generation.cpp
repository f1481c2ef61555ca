#include "server/generation.h"

#include <algorithm>
#include <utility>

namespace quern::server {
namespace {

double seconds_between(std::chrono::steady_clock::time_point begin, std::chrono::steady_clock::time_point end) {
  return std::chrono::duration<double>(end - begin).count();
}

}  // namespace

Result<std::unique_ptr<Generation>> Generation::submit(engine::Engine& engine, Metrics& metrics, std::vector<ChoiceRequest> choices,
                                                       int32_t choices_per_prompt) {
  std::unique_ptr<Generation> generation(new Generation(metrics, choices_per_prompt));
  if (!choices.empty()) {
    generation->id_ = choices.front().request.id;
    metrics.observe_submitted(choices_per_prompt, choices.front().request.max_tokens);
  }
  for (ChoiceRequest& choice : choices) {
    const auto now = Clock::now();
    ASSIGN_OR_RETURN(auto stream, engine.submit(std::move(choice.request)));
    generation->choices_.push_back(Choice{std::move(stream), OutputAssembler(std::move(choice.output)), now, now, now});
  }
  return Result<std::unique_ptr<Generation>>(std::move(generation));
}

void Generation::on_ready(const std::function<void()>& wake) {
  for (Choice& choice : choices_) choice.stream->on_event(wake);
}

bool Generation::advance(const Visitor& visit) {
  bool running = false;
  for (int32_t i = 0; i < num_choices() && !error_; ++i) {
    Choice& choice = choices_[static_cast<size_t>(i)];
    while (choice.stream != nullptr && !error_) {
      std::optional<engine::TokenEvent> event = choice.stream->try_next();
      if (!event) break;
      take(i, std::move(*event), visit);
    }
    running = running || choice.stream != nullptr;
  }
  if (running && !error_) check_time();
  if (error_) {
    for (Choice& choice : choices_) choice.stream.reset();
  }
  return running && !error_;
}

Generation::Clock::time_point Generation::deadline() const {
  Clock::time_point result = Clock::time_point::max();
  if (limits_.total.count() > 0) result = submitted_ + limits_.total;
  if (limits_.first_token.count() > 0 && !first_token_) result = std::min(result, submitted_ + limits_.first_token);
  return result;
}

void Generation::check_time() {
  if (Clock::now() < deadline()) return;
  timed_out_ = true;
  const bool no_token = !first_token_ && limits_.first_token.count() > 0 && (limits_.total.count() == 0 || limits_.first_token <= limits_.total);
  error_ = no_token ? make_error(ErrorCode::kCancelled, "no token came within the server's limit of {:g} s", limits_.first_token.count() / 1e3)
                    : make_error(ErrorCode::kCancelled, "the answer took longer than the server's limit of {:g} s", limits_.total.count() / 1e3);
}

void Generation::describe(RequestFacts& facts) const {
  const OutputUsage sum = usage();
  facts.request_id = id_;
  facts.generated = true;
  facts.prompt_tokens = sum.prompt_tokens;
  facts.cached_tokens = sum.cached_tokens;
  facts.completion_tokens = sum.completion_tokens;
  if (first_token_) facts.first_token_seconds = seconds_between(submitted_, *first_token_);
  facts.timed_out = timed_out_;
}

void Generation::take(int32_t index, engine::TokenEvent event, const Visitor& visit) {
  Choice& choice = choices_[static_cast<size_t>(index)];
  if (event.finish && event.finish->reason == engine::FinishReason::kError) {
    error_ = event.finish->error.value_or(make_error(ErrorCode::kInternal, "the request failed"));
    return;
  }
  if (event.finish && event.finish->reason == engine::FinishReason::kCancelled && !choice.assembler.stopped()) {
    error_ = make_error(ErrorCode::kUnavailable, "the request was cancelled because the server shuts down");
    return;
  }
  const bool was_stopped = choice.assembler.stopped();
  if (event.finish) choice.queue_seconds = event.finish->queue_seconds;
  OutputDelta delta = choice.assembler.push(std::move(event));
  if (!was_stopped && choice.assembler.stopped() && !delta.end) choice.stream->stop_at(choice.assembler.usage().completion_tokens);
  observe(choice, static_cast<int32_t>(delta.token_ids.size()), delta.end.has_value());
  if (delta.end) choice.stream.reset();
  visit(index, std::move(delta), choice.assembler.usage());
}

void Generation::observe(Choice& choice, int32_t num_tokens, bool ended) {
  const auto now = Clock::now();
  const OutputUsage& usage = choice.assembler.usage();
  if ((num_tokens > 0 || ended) && !first_token_) first_token_ = now;
  if (num_tokens > 0) {
    if (usage.completion_tokens == num_tokens) {
      choice.first_token = now;
      metrics_.observe_time_to_first_token(seconds_between(choice.submitted, now));
    } else {
      metrics_.observe_inter_token_latency(seconds_between(choice.last_token, now), num_tokens);
    }
    choice.last_token = now;
  }
  if (ended)
    metrics_.observe_finished(usage, {.seconds = seconds_between(choice.submitted, now),
                                      .queue_seconds = choice.queue_seconds,
                                      .decode_seconds = seconds_between(choice.first_token, choice.last_token)});
  if (!ended) return;
  longest_output_ = std::max(longest_output_, usage.completion_tokens);
  if (++num_ended_ == num_choices()) metrics_.observe_longest_output(longest_output_);
}

OutputUsage Generation::usage() const {
  OutputUsage total;
  for (size_t i = 0; i < choices_.size(); ++i) {
    const OutputUsage& usage = choices_[i].assembler.usage();
    total.completion_tokens += usage.completion_tokens;
    total.reasoning_tokens += usage.reasoning_tokens;
    if (i % static_cast<size_t>(choices_per_prompt_) != 0) continue;
    total.prompt_tokens += usage.prompt_tokens;
    total.cached_tokens += usage.cached_tokens;
  }
  return total;
}

}  // namespace quern::server
