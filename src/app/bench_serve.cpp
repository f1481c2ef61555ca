#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <limits>
#include <memory>

#include "app/app.h"
#include "app/build_info.h"
#include "app/commands.h"
#include "app/exit_code.h"
#include "app/load_generator.h"
#include "app/random_prompts.h"
#include "app/served_model.h"
#include "app/serving_charts.h"
#include "base/file.h"
#include "base/json.h"
#include "base/log.h"

// `quern bench serve`: load on a running server, over HTTP. Options, block and JSON keys as vLLM's `bench serve`.

namespace quern::app {
namespace {

struct BenchServeOptions {
  ServeBackend backend = ServeBackend::kCompletions;
  std::string base_url, host = "127.0.0.1", endpoint, model, dataset_name = "random";
  int32_t port = 8000;
  int32_t input_len = 1024, output_len = 128, num_prompts = 1000, vocab_size = 10000;
  double range_ratio = 0, request_rate = HUGE_VAL;
  std::optional<int64_t> max_concurrency;
  int64_t seed = 0;
  bool ignore_eos = false, save_result = false, save_detailed = false;
  std::filesystem::path result_filename, plot;
  std::vector<double> sweep;  // values of what is swept; empty: one run
  SweptQuantity swept = SweptQuantity::kConcurrency;
  ReportOptions report;
};

/// Token ids for completions: lengths are exact and no tokenizer is needed on either side. Chat takes text: one short word for a token,
/// about.
PlannedRequest plan_request(const BenchServeOptions& options, const std::string& model, uint64_t index) {
  const uint64_t seed = static_cast<uint64_t>(options.seed) * 1'000'003 + index;
  const std::vector<int32_t> prompt =
      random_prompt(seed, random_length(seed * 2, options.input_len, options.range_ratio), options.vocab_size);
  const int32_t output_len = random_length(seed * 2 + 1, options.output_len, options.range_ratio);
  Json body{{"model", model}, {"stream", true}, {"stream_options", {{"include_usage", true}}}, {"temperature", 0.0}};
  body["return_token_ids"] = true;  // where it is known, every token is an event, also one without text of its own
  if (options.ignore_eos) body["ignore_eos"] = true;
  if (options.backend == ServeBackend::kCompletions) {
    body["prompt"] = prompt;
    body["max_tokens"] = output_len;
  } else {
    constexpr const char* kWords[] = {"river", "stone", "light", "paper", "seven", "green",
                                      "house", "table", "north", "music", "water", "train"};
    std::string text;
    for (const int32_t token : prompt)
      text += fmt::format("{}{}", text.empty() ? "" : " ", kWords[static_cast<size_t>(token) % std::size(kWords)]);
    body["messages"] = Json::array({Json{{"role", "user"}, {"content", text}}});
    body["max_completion_tokens"] = output_len;
  }
  return {dump_json(body), static_cast<int64_t>(prompt.size())};
}

Json result_head(const BenchServeOptions& options, const std::string& model) {
  const std::time_t now = std::time(nullptr);
  char date[32];
  std::strftime(date, sizeof date, "%Y%m%d-%H%M%S", std::localtime(&now));
  Json result{{"date", date},
              {"endpoint_type", options.backend == ServeBackend::kChat ? "openai-chat" : "openai"},
              {"model_id", model},
              {"num_prompts", options.num_prompts},
              {"client", fmt::format("quern {}", version_with_commit())}};
  return result;
}

/// What one run was told, and what it measured.
Json run_result(const ServingRun& run, const BenchServeOptions& options) {
  Json result{{"request_rate", std::isfinite(run.request_rate) ? Json(run.request_rate) : Json("inf")},
              {"max_concurrency", run.max_concurrency ? Json(*run.max_concurrency) : Json(nullptr)}};
  result.update(serving_report_json(run, options.report, options.save_detailed));
  return result;
}

/// One run with its report, on requests that no run before it has sent: a prefix cache would know those.
ServingRun measure(const HttpAddress& address, const BenchServeOptions& options, const std::string& model, const LoadOptions& load, int32_t run_idx) {
  std::vector<PlannedRequest> requests;
  for (int32_t i = 0; i < options.num_prompts; ++i)
    requests.push_back(plan_request(options, model, static_cast<uint64_t>(run_idx) * static_cast<uint64_t>(options.num_prompts) + static_cast<uint64_t>(i)));
  ServingRun run = generate_load(address, requests, load);
  for (const ServedRequest& request : run.requests) {
    if (request.succeeded) continue;
    log_warning("a request failed: {}", request.error);
    break;
  }
  fmt::print("{}\n", serving_report_text(run, options.report));
  return run;
}

std::string chart_subtitle(const BenchServeOptions& options) {
  return fmt::format("{} prompts of {} tokens, {} tokens of output; {}", options.num_prompts, options.input_len, options.output_len, version_with_commit());
}

Result<void> bench_serve(const BenchServeOptions& options) {
  ASSIGN_OR_RETURN(
      const HttpAddress address,
      HttpAddress::parse(options.base_url.empty() ? fmt::format("http://{}:{}", options.host, options.port) : options.base_url));
  LoadOptions load{.backend = options.backend,
                   .request_rate = options.request_rate,
                   .max_concurrency = options.max_concurrency,
                   .seed = static_cast<uint64_t>(options.seed)};
  load.endpoint = !options.endpoint.empty()                ? options.endpoint
                  : options.backend == ServeBackend::kChat ? "/v1/chat/completions"
                                                           : "/v1/completions";
  if (const char* key = std::getenv("OPENAI_API_KEY"); key != nullptr && *key != '\0')
    load.headers.push_back(fmt::format("Authorization: Bearer {}", key));
  std::string model = options.model;
  if (model.empty()) {
    ASSIGN_OR_RETURN(model, served_model(address, load.headers, "--model"));
  }

  // One request outside the measurement shows whether anything works at all.
  const ServingRun trial =
      generate_load(address, {plan_request(options, model, 0)},
                    {.backend = load.backend, .endpoint = load.endpoint, .headers = load.headers, .request_rate = HUGE_VAL});
  if (!trial.requests[0].succeeded)
    return make_error(ErrorCode::kUnavailable, "the first request failed, so nothing was measured: {}", trial.requests[0].error);

  Json result = result_head(options, model);
  std::vector<Chart> charts;
  if (options.sweep.empty()) {
    const ServingRun run = measure(address, options, model, load, 0);
    result.update(run_result(run, options));
    charts = charts_of_run(run);
  } else {
    std::vector<SweptRun> runs;
    result["runs"] = Json::array();
    for (const double value : options.sweep) {
      if (options.swept == SweptQuantity::kConcurrency) load.max_concurrency = static_cast<int64_t>(value);
      if (options.swept == SweptQuantity::kRequestRate) load.request_rate = value;
      runs.push_back({value, measure(address, options, model, load, static_cast<int32_t>(runs.size()))});
      result["runs"].push_back(run_result(runs.back().run, options));
    }
    charts = charts_of_sweep(runs, options.swept);
  }
  result["charts"] = charts_json(charts);
  if (!options.plot.empty()) {
    RETURN_IF_ERROR(write_file(options.plot, charts_svg(charts, fmt::format("quern bench serve: {}", model), chart_subtitle(options))));
    log_info("plot written to {}", options.plot.string());
  }
  if (!options.save_result && !options.save_detailed) return {};
  const std::filesystem::path file = options.result_filename.empty()
                                         ? std::filesystem::path(fmt::format("quern-serve-{}.json", result["date"].get<std::string>()))
                                         : options.result_filename;
  RETURN_IF_ERROR(write_file(file, dump_json(result) + "\n"));
  log_info("result written to {}", file.string());
  return {};
}

Setter to_backend(ServeBackend& target) {
  return to_choice<ServeBackend>(
      target, {{"openai", ServeBackend::kCompletions}, {"vllm", ServeBackend::kCompletions}, {"openai-chat", ServeBackend::kChat}});
}

Setter to_metrics(std::vector<std::string>& target) {
  return [&target](std::string_view text) -> Result<void> {
    target.clear();
    for (const std::string_view word : split_at_commas(text)) {
      std::string metric;
      RETURN_IF_ERROR(to_choice<std::string>(metric, {{"ttft", "ttft"}, {"tpot", "tpot"}, {"itl", "itl"}, {"e2el", "e2el"}})(word));
      target.push_back(metric);
    }
    return {};
  };
}

Setter to_percentiles(std::vector<double>& target) {
  return [&target](std::string_view text) -> Result<void> {
    target.clear();
    for (const std::string_view word : split_at_commas(text)) {
      double percent = 0;
      RETURN_IF_ERROR(to_number(percent, 0, 100)(word));
      target.push_back(percent);
    }
    return {};
  };
}

/// Rising numbers, each once. One quantity can be swept.
Setter to_sweep(BenchServeOptions& options, SweptQuantity swept) {
  return [&options, swept](std::string_view text) -> Result<void> {
    if (!options.sweep.empty() && options.swept != swept) return invalid_argument("only one quantity can be swept");
    std::vector<double> values;
    for (const std::string_view word : split_at_commas(text)) {
      double value = 0;
      if (swept == SweptQuantity::kConcurrency) {
        int64_t count = 0;
        RETURN_IF_ERROR(to_integer(count, 1, 1 << 20)(word));
        value = static_cast<double>(count);
      } else {
        RETURN_IF_ERROR(to_number(value, 1e-6, 1e6)(word));
      }
      if (!values.empty() && value <= values.back()) return invalid_argument("'{}': the values of a sweep rise", text);
      values.push_back(value);
    }
    options.sweep = std::move(values);
    options.swept = swept;
    return {};
  };
}

Setter to_concurrency(std::optional<int64_t>& target) {
  return [&target](std::string_view text) -> Result<void> {
    int64_t value = 0;
    RETURN_IF_ERROR(to_integer(value, 1, 1 << 20)(text));
    target = value;
    return {};
  };
}

OptionGroup server_group(BenchServeOptions& o) {
  return {"Server",
          {
              {"--backend", "NAME", "openai or vllm: /v1/completions; openai-chat: /v1/chat/completions", to_backend(o.backend)},
              {"--base-url", "URL", "Instead of --host and --port, e.g. http://127.0.0.1:8000", to_text(o.base_url)},
              {"--host", "NAME", "Default 127.0.0.1", to_text(o.host)},
              {"--port", "N", "Default 8000", to_integer(o.port, 1, 65535)},
              {"--endpoint", "PATH", "Default: the backend's", to_text(o.endpoint)},
              {"--model", "NAME", "Served name (default: the first of /v1/models); the key comes from OPENAI_API_KEY", to_text(o.model)},
          }};
}

OptionGroup load_group(BenchServeOptions& o) {
  constexpr int64_t kMax = 1 << 24;
  return {"Load",
          {
              {"--dataset-name", "NAME", "random: the only one", to_choice<std::string>(o.dataset_name, {{"random", "random"}})},
              {"--random-input-len,--input-len", "N", "Tokens of a prompt (default 1024)", to_integer(o.input_len, 1, kMax)},
              {"--random-output-len,--output-len", "N", "Tokens of an output (default 128)", to_integer(o.output_len, 1, kMax)},
              {"--random-range-ratio", "R", "Lengths are drawn from length x (1 - R) to length x (1 + R) (default 0)",
               to_number(o.range_ratio, 0, 0.999)},
              {"--random-vocab-size", "N", "Prompt ids are below N (default 10000)", to_integer(o.vocab_size, 1, kMax)},
              {"--num-prompts", "N", "Number of requests (default 1000)", to_integer(o.num_prompts, 1, 1 << 20)},
              {"--request-rate", "R", "Requests per second with exponential gaps; inf (default): all at once",
               to_number(o.request_rate, 1e-6, HUGE_VAL)},
              {"--max-concurrency", "N", "Most requests under way at a time", to_concurrency(o.max_concurrency)},
              {"--sweep-concurrency", "LIST", "One run for each of these, as --max-concurrency: 1,2,4,8", to_sweep(o, SweptQuantity::kConcurrency)},
              {"--sweep-request-rate", "LIST", "One run for each of these, as --request-rate: 0.5,1,2,4", to_sweep(o, SweptQuantity::kRequestRate)},
              {"--ignore-eos", "", "Outputs have their full length", to_flag(o.ignore_eos)},
              {"--seed", "N", "Seed of prompts, lengths and gaps (default 0)", to_integer(o.seed, 0, std::numeric_limits<int64_t>::max())},
          }};
}

OptionGroup result_group(BenchServeOptions& o) {
  return {"Result",
          {
              {"--percentile-metrics", "LIST", "Of ttft, tpot, itl and e2el (default ttft,tpot,itl)", to_metrics(o.report.metrics)},
              {"--metric-percentiles", "LIST", "Percentiles that are shown (default 99)", to_percentiles(o.report.percentiles)},
              {"--save-result", "", "Write the result as JSON", to_flag(o.save_result)},
              {"--save-detailed", "", "The same with the values of every request", to_flag(o.save_detailed)},
              {"--plot", "FILE", "Draw throughput and latency as an SVG", to_path(o.plot)},
              {"--result-filename", "FILE", "Where to (default quern-serve-DATE.json)", to_path(o.result_filename)},
          }};
}

}  // namespace

Command bench_serve_command() {
  auto options = std::make_shared<BenchServeOptions>();
  Command command{.name = "bench serve", .summary = "Latency and throughput of a running server, over HTTP"};
  command.description =
      "Sends random prompts to any OpenAI-compatible server and reports in the lines and JSON keys of vLLM's benchmark. The completions backends send token "
      "ids, so that lengths are exact.\n\n"
      "With a sweep there is one run for each value, with prompts of its own, and --plot draws throughput and latencies over it.";
  command.groups = {server_group(*options), load_group(*options), result_group(*options)};
  command.run = [options]() -> int {
    if (Result<void> done = bench_serve(*options); !done) {
      print_error(done.error());
      return kFailure;
    }
    return kSuccess;
  };
  return command;
}

}  // namespace quern::app
