#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <limits>
#include <memory>
#include <thread>

#include "app/app.h"
#include "app/commands.h"
#include "app/eval_run.h"
#include "app/exit_code.h"
#include "app/format.h"
#include "app/progress.h"
#include "app/shutdown_signals.h"
#include "app/startup.h"
#include "app/text_tokens.h"
#include "base/file.h"
#include "base/log.h"
#include "weights/quantize.h"
#include "worker/activation_ranges.h"

// `quern quantize`: what can be refused is refused first; then the calibration text is read by the model, then the weights are written.

namespace quern::app {
namespace {

using weights::QuantizeScheme;

constexpr int32_t kCalibrationWindow = 2048;  // tokens that see each other, unless --calibration-window says otherwise
constexpr int32_t kLogitRows = 128;           // of a step: bounds the memory of logits

struct Options {
  std::filesystem::path source, destination, calibration_text;
  std::optional<QuantizeScheme> scheme;
  std::optional<uint64_t> shard_bytes;
  int64_t calibration_tokens = 0;  // 0: all
  int32_t calibration_window = kCalibrationWindow;
  ModelOptions model;              // of the calibration run
};

/// The largest inputs of each linear, keys and values, by the module names of checkpoints.
weights::Calibration by_module(const worker::ActivationRanges& ranges, const model::ModelConfig& config) {
  weights::Calibration result;
  for (size_t i = 0; i < ranges.layers().size(); ++i) {
    const worker::ActivationRanges::Layer& layer = ranges.layers()[i];
    const auto put = [&](std::string_view module, float largest) { result.inputs[fmt::format("layers.{}.{}", i, module)] = largest; };
    if (config.layers[i] == model::LayerType::kFullAttention) {
      for (const std::string_view name : {"q_proj", "k_proj", "v_proj"}) put(fmt::format("self_attn.{}", name), layer.mixer_in);
      put("self_attn.o_proj", layer.mixer_out);
      result.kv[static_cast<int64_t>(i)] = {layer.key, layer.value};
    } else {
      for (const std::string_view name : {"in_proj_qkv", "in_proj_z"}) put(fmt::format("linear_attn.{}", name), layer.mixer_in);
      put("linear_attn.out_proj", layer.mixer_out);
    }
    put("mlp.gate_proj", layer.mlp_in);
    put("mlp.up_proj", layer.mlp_in);
    put("mlp.down_proj", layer.mlp_mid);
  }
  return result;
}

Result<weights::Calibration> calibrate(Options& options) {
  ASSIGN_OR_RETURN(const std::string text, read_file(options.calibration_text));
  ASSIGN_OR_RETURN(std::vector<int32_t> tokens, tokens_of_text(options.source, text));
  if (options.calibration_tokens > 0 && tokens.size() > static_cast<size_t>(options.calibration_tokens))
    tokens.resize(static_cast<size_t>(options.calibration_tokens));
  if (tokens.size() < 2) return invalid_argument("{}: too short for a calibration", options.calibration_text.string());

  options.model.worker.model_dir = options.source;
  options.model.worker.load.with_mtp = false;
  options.model.worker.kv_cache_dtype = worker::KvCacheDType::kBFloat16;
  ASSIGN_OR_RETURN(const worker::ExecutionPlan first, plan_model(options.model));
  const int32_t window = std::min({options.calibration_window, first.limits.max_model_len, static_cast<int32_t>(std::min<size_t>(tokens.size(), INT32_MAX))});
  ASSIGN_OR_RETURN(const worker::ExecutionPlan plan, plan_for_eval(first, window, kLogitRows));
  worker::ActivationRanges ranges;
  ASSIGN_OR_RETURN(const std::unique_ptr<worker::WorkerGroup> workers, start_planned(plan, &ranges));
  log_info("calibrating on {} tokens of {}, windows of {}", format_count(static_cast<int64_t>(tokens.size())),
           options.calibration_text.string(), window);
  ASSIGN_OR_RETURN(const Likelihood likelihood, eval_likelihood(*workers, tokens, /*chunk=*/0));
  RETURN_IF_ERROR(ranges.status());
  log_info("calibrated; perplexity of the text before quantization: {:.4f}",
           std::exp(likelihood.nll / static_cast<double>(std::max<int64_t>(likelihood.num_tokens, 1))));
  return by_module(ranges, plan.config);
}

Result<void> quantize(Options& options, ShutdownSignals& signals) {
  RETURN_IF_ERROR(check_model_dir(options.source));
  weights::QuantizeOptions quantize_options;
  quantize_options.scheme = *options.scheme;
  if (options.shard_bytes) quantize_options.shard_bytes = *options.shard_bytes;
  const int32_t threads = options.model.worker.num_threads;
  quantize_options.num_threads = threads > 0 ? threads : static_cast<int>(std::max(1u, std::thread::hardware_concurrency()));
  ASSIGN_OR_RETURN(const uint64_t bytes, weights::check_quantizable(options.source, options.destination, quantize_options));
  if (!options.calibration_text.empty()) {
    ASSIGN_OR_RETURN(quantize_options.calibration, calibrate(options));
  }

  signals.listen();
  Progress progress("quantizing", bytes);
  quantize_options.progress = [&progress](double share) { progress.update(share); };
  quantize_options.cancelled = [&signals] { return signals.wait_for(std::chrono::milliseconds(0)); };
  const auto report = weights::quantize_checkpoint(options.source, options.destination, quantize_options);
  progress.finish(report.has_value());
  if (!report) return report.error();
  fmt::print("{}: {} weights quantized, {} tensors kept, {} instead of {} in {} file{}\n", options.destination.string(),
             report->num_quantized, report->num_copied, format_bytes(report->written_bytes), format_bytes(report->source_bytes),
             report->num_files, report->num_files == 1 ? "" : "s");
  return {};
}

int run(Options& options) {
  ShutdownSignals signals;  // before any other thread
  if (!options.scheme) {
    print_error(invalid_argument("--scheme is missing: block-fp8, static-fp8 or channel-fp8"));
    return kUsage;
  }
  if (*options.scheme == QuantizeScheme::kStaticFp8 && options.calibration_text.empty()) {
    print_error(invalid_argument("static-fp8 stores the range of every input and needs --calibration-text FILE, a text like those "
                                 "that the model will read"));
    return kUsage;
  }
  if (Result<void> done = quantize(options, signals); !done) {
    print_error(done.error());
    return kFailure;
  }
  return kSuccess;
}

}  // namespace

Command quantize_command() {
  auto options = std::make_shared<Options>();
  Command command{.name = "quantize", .summary = "Write an FP8 checkpoint of a BF16 one"};
  command.positionals = {{"SRC", to_path(options->source)}, {"DST", to_path(options->destination)}};
  const auto set_scheme = [options](std::string_view text) -> Result<void> {
    QuantizeScheme scheme{};
    RETURN_IF_ERROR(to_choice<QuantizeScheme>(scheme, {{"block-fp8", QuantizeScheme::kBlockFp8},
                                                       {"static-fp8", QuantizeScheme::kStaticFp8},
                                                       {"channel-fp8", QuantizeScheme::kChannelFp8}})(text));
    options->scheme = scheme;
    return {};
  };
  constexpr int64_t kMaxInt = std::numeric_limits<int32_t>::max();
  command.groups.push_back(
      {"Scheme",
       {{"--scheme", "SCHEME", "block-fp8, static-fp8 (needs --calibration-text) or channel-fp8", set_scheme},
        {"--shard-size", "SIZE", "Bytes of an output file (default 5 GB)", to_size(options->shard_bytes)}}});
  command.groups.push_back(
      {"Calibration",
       {{"--calibration-text", "FILE", "Text that the model reads to find the ranges of inputs, keys and values", to_path(options->calibration_text)},
        {"--calibration-tokens", "N", "Read at most so many tokens of it (default: all)", to_integer(options->calibration_tokens, 2, kMaxInt)},
        {"--calibration-window", "N", "Tokens that see each other (default 2048)", to_integer(options->calibration_window, 2, kMaxInt)}}});
  command.groups.push_back({"Device",
                            {{"--device", "NAME", "Where the calibration runs: cpu (default)", to_text(options->model.worker.device)},
                             {"--threads", "N", "CPU threads (default: one per core); never changes results",
                              to_integer(options->model.worker.num_threads, 1, 4096)},
                             log_level_option()}});
  command.run = [options] { return run(*options); };
  return command;
}

}  // namespace quern::app
