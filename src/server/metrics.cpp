#include "server/metrics.h"

#include <fmt/format.h>
#include <prometheus/counter.h>
#include <prometheus/histogram.h>
#include <prometheus/metric_family.h>
#include <prometheus/registry.h>
#include <prometheus/text_serializer.h>

#include <algorithm>
#include <array>
#include <limits>
#include <mutex>
#include <sstream>
#include <utility>
#include <vector>

namespace quern::server {
namespace {

using Buckets = prometheus::Histogram::BucketBoundaries;
using Labels = prometheus::Labels;
using prometheus::ClientMetric;
using prometheus::MetricFamily;
using prometheus::MetricType;

Buckets first_token_buckets() {
  return {0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560};
}
Buckets token_latency_buckets() { return {0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80}; }
Buckets request_latency_buckets() { return {0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680}; }
/// 1, 2, 5, 10, 20, ... up to max.
Buckets token_count_buckets(int32_t max) {
  Buckets buckets;
  for (double power = 1; power <= max; power *= 10) {
    for (const double step : {1.0, 2.0, 5.0}) {
      if (step * power <= max) buckets.push_back(step * power);
    }
  }
  return buckets;
}

/// One value with the labels of all our metrics and, perhaps, another.
ClientMetric metric(const Labels& labels, double value, MetricType type) {
  ClientMetric result;
  for (const auto& [name, text] : labels) result.label.push_back({name, text});
  (type == MetricType::Counter ? result.counter.value : result.gauge.value) = value;
  return result;
}

}  // namespace

struct Metrics::Families {
  std::mutex mutex;
  uint64_t generation_tokens_shown = 0;  // under mutex
  Labels labels;
  prometheus::Registry registry;
  prometheus::Histogram *first_token, *inter_token, *per_output_token, *request_latency, *prompt_tokens, *generation_tokens;
  prometheus::Histogram *queue, *prefill, *decode, *inference, *params_n, *params_max_tokens, *max_generation_tokens;
  prometheus::Family<prometheus::Counter>* http_responses;

  prometheus::Histogram* histogram(const char* name, const char* help, const Buckets& buckets) {
    return &prometheus::BuildHistogram().Name(name).Help(help).Register(registry).Add(labels, buckets);
  }
};

Metrics::Metrics(const std::string& model_name, int32_t max_model_len) : families_(std::make_unique<Families>()) {
  Families& f = *families_;
  f.labels = {{"engine", "0"}, {"model_name", model_name}};
  f.first_token = f.histogram("vllm:time_to_first_token_seconds", "From submission to the first token.", first_token_buckets());
  f.inter_token = f.histogram("vllm:inter_token_latency_seconds", "Between consecutive tokens of a request.", token_latency_buckets());
  f.per_output_token = f.histogram("vllm:request_time_per_output_token_seconds", "Mean time per output token after the first, per request.",
                                   token_latency_buckets());
  f.request_latency = f.histogram("vllm:e2e_request_latency_seconds", "From submission to the last token.", request_latency_buckets());
  f.prompt_tokens = f.histogram("vllm:request_prompt_tokens", "Prompt tokens per request.", token_count_buckets(max_model_len));
  f.generation_tokens = f.histogram("vllm:request_generation_tokens", "Output tokens per request.", token_count_buckets(max_model_len));
  f.queue = f.histogram("vllm:request_queue_time_seconds", "From submission to a place among those that run.", request_latency_buckets());
  f.prefill = f.histogram("vllm:request_prefill_time_seconds", "From there to the first token.", request_latency_buckets());
  f.decode = f.histogram("vllm:request_decode_time_seconds", "From the first token to the last.", request_latency_buckets());
  f.inference = f.histogram("vllm:request_inference_time_seconds", "Both: all but the waiting.", request_latency_buckets());
  f.params_n = f.histogram("vllm:request_params_n", "Choices per prompt, as asked for.", {1, 2, 5, 10, 20});
  f.params_max_tokens = f.histogram("vllm:request_params_max_tokens", "Longest output, as asked for.", token_count_buckets(max_model_len));
  f.max_generation_tokens = f.histogram("vllm:request_max_num_generation_tokens", "Output tokens of the longest choice of a request.",
                                        token_count_buckets(max_model_len));
  f.http_responses = &prometheus::BuildCounter().Name("quern:http_responses_total").Help("HTTP responses by status.").Register(f.registry);
}

Metrics::~Metrics() = default;

void Metrics::observe_time_to_first_token(double seconds) { families_->first_token->Observe(seconds); }

void Metrics::observe_inter_token_latency(double seconds, int32_t num_tokens) {
  for (int32_t i = 0; i < num_tokens; ++i) families_->inter_token->Observe(seconds / num_tokens);
}

void Metrics::observe_submitted(int32_t n, int32_t max_tokens) {
  families_->params_n->Observe(n);
  families_->params_max_tokens->Observe(max_tokens);
}

void Metrics::observe_longest_output(int32_t num_tokens) { families_->max_generation_tokens->Observe(num_tokens); }

void Metrics::observe_finished(const OutputUsage& usage, const Times& times) {
  Families& f = *families_;
  f.request_latency->Observe(times.seconds);
  f.queue->Observe(times.queue_seconds);
  f.inference->Observe(std::max(0.0, times.seconds - times.queue_seconds));
  f.prefill->Observe(std::max(0.0, times.seconds - times.queue_seconds - times.decode_seconds));
  f.decode->Observe(times.decode_seconds);
  f.prompt_tokens->Observe(usage.prompt_tokens);
  f.generation_tokens->Observe(usage.completion_tokens);
  if (usage.completion_tokens > 1) f.per_output_token->Observe(times.decode_seconds / (usage.completion_tokens - 1));
}

void Metrics::count_http_response(int status) {
  Labels labels = families_->labels;
  labels.emplace("status", std::to_string(status));
  families_->http_responses->Add(labels).Increment();
}

std::string Metrics::expose(const engine::EngineStats& stats, const ConstraintStats& constraints, bool engine_failed) const {
  std::vector<MetricFamily> families = families_->registry.Collect();
  const auto add = [&](const char* name, const char* help, MetricType type, double value) {
    families.push_back({name, help, type, {metric(families_->labels, value, type)}});
  };
  // A running request's tokens count at once. Some may turn out to lie behind its end, and a counter must not fall.
  const uint64_t generation_tokens = [&] {
    const std::lock_guard lock(families_->mutex);
    return families_->generation_tokens_shown =
               std::max(families_->generation_tokens_shown, stats.generation_tokens + stats.unfinished_generation_tokens);
  }();
  const double used = stats.num_blocks == 0 ? 0 : 1 - static_cast<double>(stats.num_free_blocks) / stats.num_blocks;
  add("vllm:num_requests_running", "Requests that are computed now.", MetricType::Gauge, stats.num_running);
  add("vllm:num_requests_waiting", "Requests that wait for a place.", MetricType::Gauge, stats.num_waiting);
  add("vllm:kv_cache_usage_perc", "Share of the KV blocks in use; 1 is all.", MetricType::Gauge, used);
  add("vllm:num_preemptions_total", "Preempted requests.", MetricType::Counter, static_cast<double>(stats.num_preemptions));
  const auto count = [&](const char* name, const char* help, uint64_t value) { add(name, help, MetricType::Counter, static_cast<double>(value)); };
  count("vllm:prefix_cache_queries_total", "Prompt tokens looked up in the prefix cache.", stats.prefix_queried_tokens);
  count("vllm:prefix_cache_hits_total", "Prompt tokens found in the prefix cache.", stats.prefix_hit_tokens);
  count("vllm:spec_decode_num_drafts_total", "Drafts (of one or more tokens) that were verified.", stats.speculation.num_drafts);
  count("vllm:spec_decode_num_draft_tokens_total", "Tokens in them.", stats.speculation.num_draft_tokens);
  count("vllm:spec_decode_num_accepted_tokens_total", "Tokens in them that were accepted.", stats.speculation.num_accepted_tokens);
  MetricFamily positions{"vllm:spec_decode_num_accepted_tokens_per_pos_total", "The same by position in the draft.", MetricType::Counter, {}};
  for (int32_t i = 0; i < stats.max_draft_tokens; ++i) {
    Labels labels = families_->labels;
    labels.emplace("position", std::to_string(i));
    positions.metric.push_back(metric(labels, static_cast<double>(stats.speculation.accepted_at[static_cast<size_t>(i)]), MetricType::Counter));
  }
  if (!positions.metric.empty()) families.push_back(std::move(positions));
  add("vllm:prompt_tokens_total", "Prompt tokens processed.", MetricType::Counter, static_cast<double>(stats.prompt_tokens));
  add("vllm:generation_tokens_total", "Output tokens.", MetricType::Counter, static_cast<double>(generation_tokens));
  MetricFamily success{"vllm:request_success_total", "Finished requests by reason.", MetricType::Counter, {}};
  const std::array<std::pair<const char*, uint64_t>, 4> reasons{{{"stop", stats.requests_stop},
                                                                 {"length", stats.requests_length},
                                                                 {"abort", stats.requests_cancelled},
                                                                 {"error", stats.requests_error}}};
  for (const auto& [reason, requests] : reasons) {
    Labels labels = families_->labels;
    labels.emplace("finished_reason", reason);
    success.metric.push_back(metric(labels, static_cast<double>(requests), MetricType::Counter));
  }
  families.push_back(std::move(success));
  MetricFamily iterations{"vllm:iteration_tokens_total", "Rows (tokens) per forward step.", MetricType::Histogram, {metric(families_->labels, 0, MetricType::Gauge)}};
  prometheus::ClientMetric::Histogram& histogram = iterations.metric[0].histogram;
  for (size_t i = 0; i < stats.steps_by_rows.size(); ++i) {
    histogram.sample_count += stats.steps_by_rows[i];
    const bool bounded = i < engine::kStepRowBounds.size();
    histogram.bucket.push_back({histogram.sample_count, bounded ? static_cast<double>(engine::kStepRowBounds[i]) : std::numeric_limits<double>::infinity()});
  }
  histogram.sample_sum = static_cast<double>(stats.computed_rows);
  families.push_back(std::move(iterations));
  Labels cache = families_->labels;
  cache.insert({{"block_size", "64"}, {"num_gpu_blocks", std::to_string(stats.num_blocks)}, {"num_cpu_blocks", std::to_string(stats.num_host_blocks)}});
  families.push_back({"vllm:cache_config_info", "The KV cache, in labels.", MetricType::Gauge, {metric(cache, 1, MetricType::Gauge)}});
  add("quern:engine_failed", "1 once the engine has failed; the process then ends.", MetricType::Gauge, engine_failed ? 1 : 0);
  add("quern:steps_total", "Forward steps.", MetricType::Counter, static_cast<double>(stats.num_steps));
  add("quern:computed_rows_total", "Rows (tokens) computed in steps.", MetricType::Counter, static_cast<double>(stats.computed_rows));
  add("quern:discarded_rows_total", "Rows computed after their request had ended.", MetricType::Counter,
      static_cast<double>(stats.discarded_rows));
  add("quern:gathered_rows_total", "Rows sampled from logits that the ranks exchanged whole.", MetricType::Counter, static_cast<double>(stats.gathered_rows));
  add("quern:device_seconds_total", "Time spent in steps.", MetricType::Counter, stats.device_seconds);
  add("quern:host_seconds_total", "Time of the engine thread between steps.", MetricType::Counter, stats.host_seconds);
  add("quern:state_slots", "State slots of sequences.", MetricType::Gauge, stats.num_slots);
  add("quern:state_slots_free", "Free state slots.", MetricType::Gauge, stats.num_free_slots);
  count("quern:prefix_cache_evictions_total", "Cached prefixes that were given up for others.", stats.prefix_evictions);
  count("quern:prefix_cache_host_tokens_total", "Prompt tokens found in the prefix cache whose KV came from host memory.", stats.prefix_host_tokens);
  count("quern:swapped_total", "Preempted requests that went on from host memory.", stats.num_swapped);
  count("quern:recomputed_total", "Preempted requests that were computed again.", stats.num_recomputed);
  add("quern:host_blocks", "Places for KV blocks in host memory.", MetricType::Gauge, stats.num_host_blocks);
  add("quern:host_blocks_used", "Those in use.", MetricType::Gauge, stats.num_host_blocks_used);
  add("quern:prefix_cache_blocks", "KV blocks of cached prefixes.", MetricType::Gauge, stats.num_cached_blocks);
  add("quern:snapshots", "Places for recurrent states of cached prefixes.", MetricType::Gauge, stats.num_snapshots);
  add("quern:snapshots_used", "Recurrent states of cached prefixes.", MetricType::Gauge, stats.num_snapshots_used);
  add("quern:kv_blocks", "KV blocks of 64 tokens.", MetricType::Gauge, stats.num_blocks);
  add("quern:kv_blocks_free", "Free KV blocks, those of cached prefixes that nobody uses included.", MetricType::Gauge, stats.num_free_blocks);
  count("quern:grammars_compiled_total", "Grammars that were compiled for constrained output.", constraints.num_compiled);
  count("quern:grammars_failed_total", "Schemas, expressions and grammars that could not be compiled.", constraints.num_failed);
  count("quern:grammar_cache_hits_total", "Requests whose grammar had been compiled before.", constraints.num_hits);
  add("quern:grammar_compile_seconds_total", "Time spent compiling grammars.", MetricType::Counter, constraints.compile_seconds);
  add("quern:grammar_cache_grammars", "Compiled grammars that are kept.", MetricType::Gauge, static_cast<double>(constraints.num_cached));
  add("quern:grammar_cache_bytes", "Memory that they took when the last one was compiled.", MetricType::Gauge, static_cast<double>(constraints.cached_bytes));
  std::ostringstream out;
  prometheus::TextSerializer().Serialize(out, families);
  return std::move(out).str();
}

}  // namespace quern::server
