#include <fmt/format.h>

#include <algorithm>
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
#include "base/file.h"

// `quern bench throughput`: all requests at once, from the first submission to the last token. Options, lines and JSON keys as vLLM's
// `bench throughput`.

namespace quern::app {
namespace {

struct ThroughputOptions {
  ModelOptions model;
  int32_t input_len = 1024, output_len = 128, num_prompts = 1000, n = 1;
  double range_ratio = 0;
  int64_t seed = 0;
  std::string output_json, dataset_name = "random";
  std::filesystem::path plot;
};

struct ThroughputResult {
  double elapsed_seconds = 0;
  int64_t num_requests = 0, prompt_tokens = 0, output_tokens = 0;
  std::vector<BenchTimes> times;
};

std::vector<BenchRequest> make_requests(const ThroughputOptions& options, int32_t vocab_size) {
  std::vector<BenchRequest> requests;
  for (int32_t i = 0; i < options.num_prompts; ++i) {
    const uint64_t seed = static_cast<uint64_t>(options.seed) * 1'000'003 + static_cast<uint64_t>(i);
    const std::vector<int32_t> prompt = random_prompt(seed, random_length(seed * 2, options.input_len, options.range_ratio), vocab_size);
    const int32_t output_len = random_length(seed * 2 + 1, options.output_len, options.range_ratio);
    for (int32_t copy = 0; copy < options.n; ++copy) requests.push_back({prompt, output_len, seed + static_cast<uint64_t>(copy)});
  }
  return requests;
}

Result<ThroughputResult> measure(engine::Engine& engine, const std::vector<BenchRequest>& requests) {
  ThroughputResult result{.num_requests = static_cast<int64_t>(requests.size())};
  const auto start = std::chrono::steady_clock::now();
  ASSIGN_OR_RETURN(const BenchRun run, run_requests(engine, requests));
  result.elapsed_seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  for (const BenchRequest& request : requests) result.prompt_tokens += static_cast<int64_t>(request.prompt.size());
  for (const BenchTimes& request : run.times) result.output_tokens += request.num_tokens;
  result.times = run.times;
  return result;
}

void print(const ThroughputResult& result) {
  const auto per_second = [&](int64_t count) { return static_cast<double>(count) / result.elapsed_seconds; };
  fmt::print("Throughput: {:.2f} requests/s, {:.2f} total tokens/s, {:.2f} output tokens/s\n", per_second(result.num_requests),
             per_second(result.prompt_tokens + result.output_tokens), per_second(result.output_tokens));
  fmt::print("Total num prompt tokens:  {}\n", result.prompt_tokens);
  fmt::print("Total num output tokens:  {}\n", result.output_tokens);
}

/// Requests begun and ended over time, and how long they took.
std::vector<Chart> charts_of(const ThroughputResult& result) {
  std::vector<double> first, last;
  for (const BenchTimes& request : result.times) {
    first.push_back(request.first_token);
    last.push_back(request.last_token);
  }
  const auto counted = [](std::string name, std::vector<double> times) {
    std::ranges::sort(times);
    ChartSeries series{std::move(name), {{0, 0}}};
    for (size_t i = 0; i < times.size(); ++i) series.points.emplace_back(times[i], static_cast<double>(i + 1));
    return series;
  };
  return {{.title = "Requests over time", .x = {"time", "s"}, .y = {"requests", ""}, .series = {counted("with a first token", first), counted("ended", last)}},
          {.title = "Time since all were sent, by percentile",
           .x = {"share of the requests", "%"},
           .y = {"time", "s"},
           .series = {percentile_curve("to the first token", first), percentile_curve("to the last token", last)}}};
}

Json as_json(const ThroughputResult& result, const BenchEngine& bench) {
  const int64_t total = result.prompt_tokens + result.output_tokens;
  return {{"elapsed_time", result.elapsed_seconds},
          {"num_requests", result.num_requests},
          {"total_num_tokens", total},
          {"requests_per_second", static_cast<double>(result.num_requests) / result.elapsed_seconds},
          {"tokens_per_second", static_cast<double>(total) / result.elapsed_seconds},
          {"output_tokens_per_second", static_cast<double>(result.output_tokens) / result.elapsed_seconds},
          {"charts", charts_json(charts_of(result))},
          {"counters", bench_counters(bench.engine->stats())},
          {"environment", bench_environment(bench.plan)}};
}

Result<void> bench_throughput(const ThroughputOptions& options) {
  // The longest that a draw can give; the prompts themselves need the vocabulary, which is known once the model is.
  const auto longest = [&](int32_t base) { return static_cast<int32_t>(base * (1 + options.range_ratio)) + 1; };
  const int32_t model_len =
      options.range_ratio > 0 ? longest(options.input_len) + longest(options.output_len) : options.input_len + options.output_len;
  ASSIGN_OR_RETURN(const BenchEngine bench, start_bench_engine(options.model, options.num_prompts * options.n, model_len, false));
  const std::vector<BenchRequest> requests = make_requests(options, bench.engine->limits().vocab_size);
  ASSIGN_OR_RETURN(const ThroughputResult result, measure(*bench.engine, requests));
  print(result);
  fmt::print("{}", bench_counters_text(bench.engine->stats()));
  if (!options.plot.empty()) {
    const std::string about = fmt::format("{} requests of {} tokens, {} tokens of output; {:.1f} output tokens/s; {}", result.num_requests, options.input_len, options.output_len,
                                          static_cast<double>(result.output_tokens) / result.elapsed_seconds, version_with_commit());
    RETURN_IF_ERROR(write_file(options.plot, charts_svg(charts_of(result), fmt::format("quern bench throughput: {}", bench.plan.config.name), about)));
  }
  return save_result(options.output_json, as_json(result, bench));
}

}  // namespace

Command bench_throughput_command() {
  constexpr int64_t kMax = 1 << 24;
  auto options = std::make_shared<ThroughputOptions>();
  Command command{.name = "bench throughput", .summary = "Requests and tokens per second when all requests come at once"};
  command.groups.push_back(
      {"Benchmark",
       {
           {"--dataset-name", "NAME", "random: the only one of this benchmark",
            to_choice<std::string>(options->dataset_name, {{"random", "random"}})},
           {"--input-len,--random-input-len", "N", "Tokens of a prompt (default 1024)", to_integer(options->input_len, 1, kMax)},
           {"--output-len,--random-output-len", "N", "Tokens of an output (default 128)", to_integer(options->output_len, 1, kMax)},
           {"--random-range-ratio", "R", "Lengths are drawn from length x (1 - R) to length x (1 + R) (default 0)",
            to_number(options->range_ratio, 0, 0.999)},
           {"--num-prompts", "N", "Number of prompts (default 1000)", to_integer(options->num_prompts, 1, 1 << 20)},
           {"--n", "N", "Sequences of every prompt (default 1)", to_integer(options->n, 1, 1 << 10)},
           {"--output-json", "FILE", "Write the result to this file", naming_a_path(to_text(options->output_json))},
           {"--plot", "FILE", "Draw requests over time and their latencies as an SVG", to_path(options->plot)},
           {"--seed", "N", "Seed of prompts, lengths and sampling (default 0)",
            to_integer(options->seed, 0, std::numeric_limits<int64_t>::max())},
           without_effect(options->model, "--disable-detokenize", "", "this benchmark never detokenizes"),
       }});
  options->model.prefix_cache.enabled = false;  // copies of a prompt shall cost what they cost
  add_model_options(command, options->model);
  command.run = [options]() -> int {
    if (Result<void> done = bench_throughput(*options); !done) {
      print_error(done.error());
      return kFailure;
    }
    return kSuccess;
  };
  return command;
}

}  // namespace quern::app
