#include "app/bench_engine.h"

#include <algorithm>
#include <thread>

#include "app/build_info.h"
#include "app/startup.h"
#include "base/file.h"

namespace quern::app {
namespace {

using Clock = std::chrono::steady_clock;

engine::GenerationRequest make_request(const BenchRequest& request, size_t index) {
  engine::GenerationRequest result;
  result.id = fmt::format("bench-{}", index);
  result.prompt = request.prompt;
  result.max_tokens = request.output_len;
  result.sampling.temperature = 1.0f;
  result.sampling.seed = request.seed;
  return result;
}

}  // namespace

Result<BenchEngine> start_bench_engine(ModelOptions options, int32_t num_seqs, int32_t model_len, bool seqs_must_fit) {
  if (options.worker.max_num_seqs == 0 && seqs_must_fit) options.worker.max_num_seqs = num_seqs;
  if (options.worker.max_num_seqs > 0 && options.worker.max_num_seqs < num_seqs && seqs_must_fit)
    return invalid_argument("--max-num-seqs {} is below the {} sequences of a batch", options.worker.max_num_seqs, num_seqs);
  if (options.worker.max_model_len > 0 && options.worker.max_model_len < model_len)
    return invalid_argument("--max-model-len {} is below the {} tokens of input and output", options.worker.max_model_len, model_len);
  options.allow_synthetic_acceptance = true;
  options.max_queue_len = std::max(options.max_queue_len, num_seqs);
  BenchEngine result;
  ASSIGN_OR_RETURN(result.plan, plan_model(options));
  RETURN_IF_ERROR(check_runnable(result.plan));
  const worker::WorkerLimits& limits = result.plan.limits;
  if (limits.max_model_len < model_len)
    return make_error(ErrorCode::kResourceExhausted, "input and output are {} tokens, but only {} fit into one sequence", model_len,
                      limits.max_model_len);
  if (seqs_must_fit && limits.num_slots < num_seqs)
    return make_error(ErrorCode::kResourceExhausted, "a batch has {} sequences, but only {} fit into memory together", num_seqs,
                      limits.num_slots);
  ASSIGN_OR_RETURN(std::unique_ptr<worker::WorkerGroup> workers, start_planned(result.plan));
  result.engine = engine::Engine::start(std::move(workers), engine_options(options));
  return result;
}

Result<BenchRun> run_requests(engine::Engine& engine, const std::vector<BenchRequest>& requests) {
  const Clock::time_point start = Clock::now();
  std::vector<std::unique_ptr<engine::RequestStream>> streams;
  for (size_t i = 0; i < requests.size(); ++i) {
    ASSIGN_OR_RETURN(std::unique_ptr<engine::RequestStream> stream, engine.submit(make_request(requests[i], i)));
    streams.push_back(std::move(stream));
  }
  // One consumer reads the streams round robin, so that the times of all are taken as they arrive.
  BenchRun run;
  std::vector<BenchTimes>& times = run.times;
  times.resize(requests.size());
  size_t num_started = 0;
  int64_t num_tokens = 0, num_tokens_before = 0;
  double phase_begin = 0, phase_end = 0;
  std::vector<size_t> open(requests.size());
  for (size_t i = 0; i < open.size(); ++i) open[i] = i;
  while (!open.empty()) {
    bool idle = true;
    for (size_t at = 0; at < open.size();) {
      const size_t i = open[at];
      std::optional<engine::TokenEvent> event = streams[i]->try_next();
      if (!event) {
        ++at;
        continue;
      }
      idle = false;
      const double now = std::chrono::duration<double>(Clock::now() - start).count();
      if (!event->tokens.empty()) {
        num_tokens += std::ssize(event->tokens);
        if (times[i].num_tokens == 0) {
          times[i].first_token = now;
          times[i].num_first = static_cast<int32_t>(event->tokens.size());
          if (++num_started == requests.size()) {
            phase_begin = now;
            num_tokens_before = num_tokens;
          }
        }
        times[i].num_tokens += static_cast<int32_t>(event->tokens.size());
        times[i].last_token = now;
      }
      if (!event->finish) continue;
      if (event->finish->error) return *event->finish->error;
      if (times[i].num_tokens != requests[i].output_len)
        return make_error(ErrorCode::kInternal, "a request gave {} tokens instead of {}", times[i].num_tokens, requests[i].output_len);
      if (open.size() == requests.size()) {
        phase_end = now;
        if (num_started == requests.size()) run.decode_phase_tokens = num_tokens - num_tokens_before;
      }
      open.erase(open.begin() + static_cast<ptrdiff_t>(at));
    }
    if (idle && !open.empty()) std::this_thread::sleep_for(std::chrono::microseconds(200));
  }
  if (run.decode_phase_tokens > 0) run.decode_phase_seconds = phase_end - phase_begin;
  return run;
}

Json bench_environment(const worker::ExecutionPlan& plan) {
  const BuildInfo build = build_info();
  return {{"engine", "quern"},
          {"version", build.version},
          {"commit", build.commit},
          {"build_type", build.build_type},
          {"model", plan.config.name},
          {"device", plan.traits.name},
          {"activation_dtype", dtype_name(plan.activation)},
          {"kv_cache_dtype", dtype_name(plan.kv)},
          {"ring_dtype", dtype_name(plan.ring)},
          {"max_model_len", plan.limits.max_model_len},
          {"max_num_seqs", plan.limits.num_slots},
          {"max_num_batched_tokens", plan.limits.max_rows}};
}

namespace {

double per_step(const engine::EngineStats& stats, double seconds) { return stats.num_steps == 0 ? 0 : seconds / static_cast<double>(stats.num_steps); }
/// Tokens that came out of a step with drafts, on average.
double acceptance_length(const engine::SpeculationCounts& counts) {
  return counts.num_drafts == 0 ? 0 : 1 + static_cast<double>(counts.num_accepted_tokens) / static_cast<double>(counts.num_drafts);
}

}  // namespace

Json bench_counters(const engine::EngineStats& stats) {
  Json accepted = Json::array();
  for (int32_t i = 0; i < stats.max_draft_tokens; ++i) accepted.push_back(stats.speculation.accepted_at[static_cast<size_t>(i)]);
  return {{"num_steps", stats.num_steps},
          {"host_seconds_per_step", per_step(stats, stats.host_seconds)},
          {"device_seconds_per_step", per_step(stats, stats.device_seconds)},
          {"computed_rows", stats.computed_rows},
          {"gathered_rows", stats.gathered_rows},
          {"num_preemptions", stats.num_preemptions},
          {"num_drafts", stats.speculation.num_drafts},
          {"num_draft_tokens", stats.speculation.num_draft_tokens},
          {"num_accepted_tokens", stats.speculation.num_accepted_tokens},
          {"num_accepted_tokens_per_pos", accepted},
          {"acceptance_length", acceptance_length(stats.speculation)}};
}

std::string bench_counters_text(const engine::EngineStats& stats) {
  std::string text = fmt::format("{} steps, {:.1f} us of host time in each, {:.2f} ms in the device\n", stats.num_steps, per_step(stats, stats.host_seconds) * 1e6,
                                 per_step(stats, stats.device_seconds) * 1e3);
  if (stats.speculation.num_drafts > 0)
    text += fmt::format("{} verifies of {:.2f} drafts, acceptance length {:.2f}\n", stats.speculation.num_drafts,
                        static_cast<double>(stats.speculation.num_draft_tokens) / static_cast<double>(stats.speculation.num_drafts),
                        acceptance_length(stats.speculation));
  return text;
}

Result<void> save_result(const std::string& file, const Json& result) {
  if (file.empty()) return {};
  return write_file(file, result.dump(4) + "\n");
}

}  // namespace quern::app
