#include <fmt/format.h>

#include <array>
#include <chrono>
#include <cstdio>
#include <limits>
#include <memory>

#include "app/app.h"
#include "app/bench_engine.h"
#include "app/build_info.h"
#include "app/chart.h"
#include "app/commands.h"
#include "app/exit_code.h"
#include "app/random_prompts.h"
#include "app/statistics.h"
#include "base/file.h"

// `quern bench latency`: one batch at a time, from submission to the last token. Options, lines and JSON keys as vLLM's `bench latency`.

namespace quern::app {
namespace {

constexpr std::array kPercentiles = {10, 25, 50, 75, 90, 99};

struct LatencyOptions {
  ModelOptions model;
  int32_t input_len = 32, output_len = 128, batch_size = 8, n = 1;
  int32_t prefix_len = 0;
  int32_t num_iters_warmup = 10, num_iters = 30;
  int64_t seed = 0;
  std::string output_json;
  std::filesystem::path plot;
};

struct LatencySamples {
  std::vector<double> latencies, first_tokens, decode_rates;  // seconds, seconds, tokens per second of one sequence
  std::vector<double> decode_phase_rates;                     // tokens per second of the whole batch while all of it decodes
};

/// With a common prefix, what follows it is new in every iteration, as in the turns of a chat.
std::vector<BenchRequest> make_batch(const LatencyOptions& options, int32_t iteration, int32_t vocab_size) {
  std::vector<BenchRequest> batch;
  const auto seed = static_cast<uint64_t>(options.seed);
  const uint64_t base = seed * 1'000'003 + (options.prefix_len > 0 ? static_cast<uint64_t>(iteration) * 7919 : 0);
  for (int32_t prompt = 0; prompt < options.batch_size; ++prompt) {
    std::vector<int32_t> tokens;
    if (options.prefix_len > 0) tokens = random_prompt(seed * 1'000'003 + 500'009 + static_cast<uint64_t>(prompt), options.prefix_len, vocab_size);
    const std::vector<int32_t> fresh = random_prompt(base + static_cast<uint64_t>(prompt), options.input_len, vocab_size);
    tokens.insert(tokens.end(), fresh.begin(), fresh.end());
    for (int32_t copy = 0; copy < options.n; ++copy) batch.push_back({tokens, options.output_len, seed + batch.size()});
  }
  return batch;
}

Result<LatencySamples> measure(engine::Engine& engine, const LatencyOptions& options) {
  LatencySamples samples;
  for (int32_t i = 0; i < options.num_iters_warmup + options.num_iters; ++i) {
    const std::vector<BenchRequest> batch = make_batch(options, i, engine.limits().vocab_size);
    const auto start = std::chrono::steady_clock::now();
    ASSIGN_OR_RETURN(const BenchRun run, run_requests(engine, batch));
    if (i < options.num_iters_warmup) continue;
    samples.latencies.push_back(std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
    if (run.decode_phase_seconds > 0) samples.decode_phase_rates.push_back(static_cast<double>(run.decode_phase_tokens) / run.decode_phase_seconds);
    for (const BenchTimes& request : run.times) {
      samples.first_tokens.push_back(request.first_token);
      if (const std::optional<double> rate = request.decode_rate()) samples.decode_rates.push_back(*rate);
    }
  }
  return samples;
}

/// Times by percentile, and the batches one after the other.
std::vector<Chart> charts_of(const LatencySamples& samples) {
  const auto in_ms = [](std::vector<double> seconds) {
    for (double& sample : seconds) sample *= 1e3;
    return seconds;
  };
  Chart batches{.title = "Batch after batch", .x = {"batch", ""}, .y = {"latency", "ms"}, .series = {{"whole batch", {}}}};
  for (size_t i = 0; i < samples.latencies.size(); ++i) batches.series[0].points.emplace_back(static_cast<double>(i + 1), samples.latencies[i] * 1e3);
  return {{.title = "Latency by percentile",
           .x = {"share of the samples", "%"},
           .y = {"latency", "ms", true},
           .series = {percentile_curve("whole batch", in_ms(samples.latencies)), percentile_curve("time to first token", in_ms(samples.first_tokens))}},
          batches};
}

Json as_json(const LatencySamples& samples, const BenchEngine& bench) {
  Json percentiles = Json::object();
  for (const int percent : kPercentiles) percentiles[fmt::format("{}", percent)] = percentile(samples.latencies, percent);
  return {{"avg_latency", mean(samples.latencies)},
          {"std_latency", standard_deviation(samples.latencies)},
          {"latencies", samples.latencies},
          {"percentiles", percentiles},
          {"mean_ttft_ms", mean(samples.first_tokens) * 1e3},
          {"median_ttft_ms", percentile(samples.first_tokens, 50) * 1e3},
          {"decode_tokens_per_second", percentile(samples.decode_rates, 50)},
          {"decode_phase_tokens_per_second", samples.decode_phase_rates.empty() ? Json() : Json(percentile(samples.decode_phase_rates, 50))},
          {"charts", charts_json(charts_of(samples))},
          {"counters", bench_counters(bench.engine->stats())},
          {"environment", bench_environment(bench.plan)}};
}

void print(const LatencySamples& samples, const LatencyOptions& options) {
  const double average = mean(samples.latencies);
  fmt::print("Avg latency: {} seconds\n", average);
  fmt::print("Std latency: {} seconds\n", standard_deviation(samples.latencies));
  for (const int percent : kPercentiles)
    fmt::print("{}% percentile latency: {} seconds\n", percent, percentile(samples.latencies, percent));
  // Prefill and decode apart: the throughput above mixes both.
  const double sequences = options.batch_size * options.n;
  fmt::print("Mean time to first token: {:.1f} ms, median {:.1f} ms\n", mean(samples.first_tokens) * 1e3, percentile(samples.first_tokens, 50) * 1e3);
  if (!samples.decode_rates.empty())
    fmt::print("Median decode speed after it: {:.2f} tokens/s per sequence\n", percentile(samples.decode_rates, 50));
  if (!samples.decode_phase_rates.empty())
    fmt::print("Median decode speed of the batch while all of it decodes: {:.2f} tokens/s\n", percentile(samples.decode_phase_rates, 50));
  fmt::print("Output tokens per second of the whole batch: {:.2f}, with input {:.2f}\n", sequences * options.output_len / average,
             sequences * (options.input_len + options.output_len) / average);
}

Result<void> bench_latency(const LatencyOptions& options) {
  ASSIGN_OR_RETURN(const BenchEngine bench,
                   start_bench_engine(options.model, options.batch_size * options.n, options.prefix_len + options.input_len + options.output_len, true));
  ASSIGN_OR_RETURN(const LatencySamples samples, measure(*bench.engine, options));
  print(samples, options);
  fmt::print("{}", bench_counters_text(bench.engine->stats()));
  if (!options.plot.empty()) {
    const std::string about = fmt::format("batches of {} prompts of {} tokens, {} tokens of output; {}", options.batch_size, options.prefix_len + options.input_len,
                                          options.output_len, version_with_commit());
    RETURN_IF_ERROR(write_file(options.plot, charts_svg(charts_of(samples), fmt::format("quern bench latency: {}", bench.plan.config.name), about)));
  }
  return save_result(options.output_json, as_json(samples, bench));
}

}  // namespace

Command bench_latency_command() {
  constexpr int64_t kMax = std::numeric_limits<int32_t>::max();
  auto options = std::make_shared<LatencyOptions>();
  Command command{.name = "bench latency", .summary = "Time of one batch from submission to the last token"};
  command.groups.push_back(
      {"Benchmark",
       {
           {"--input-len", "N", "Tokens of every prompt (default 32)", to_integer(options->input_len, 1, kMax)},
           {"--prefix-len", "N", "Tokens before the input, the same in every iteration (default 0); to be used with --enable-prefix-caching",
            to_integer(options->prefix_len, 0, kMax)},
           {"--output-len", "N", "Tokens of every output (default 128)", to_integer(options->output_len, 1, kMax)},
           {"--batch-size", "N", "Prompts of a batch (default 8)", to_integer(options->batch_size, 1, 1 << 16)},
           {"--n", "N", "Sequences of every prompt (default 1)", to_integer(options->n, 1, 1 << 10)},
           {"--num-iters-warmup", "N", "Batches before the clock runs (default 10)", to_integer(options->num_iters_warmup, 0, kMax)},
           {"--num-iters", "N", "Batches that are timed (default 30)", to_integer(options->num_iters, 1, kMax)},
           {"--output-json", "FILE", "Write the result to this file", naming_a_path(to_text(options->output_json))},
           {"--plot", "FILE", "Draw the latencies as an SVG", to_path(options->plot)},
           {"--seed", "N", "Seed of prompts and sampling (default 0)", to_integer(options->seed, 0, std::numeric_limits<int64_t>::max())},
           without_effect(options->model, "--disable-detokenize", "", "this benchmark never detokenizes"),
       }});
  options->model.prefix_cache.enabled = false;  // the same prompts come again and again
  add_model_options(command, options->model);
  command.run = [options]() -> int {
    if (Result<void> done = bench_latency(*options); !done) {
      print_error(done.error());
      return kFailure;
    }
    return kSuccess;
  };
  return command;
}

}  // namespace quern::app
