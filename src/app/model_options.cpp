#include "app/model_options.h"

#include <algorithm>
#include <chrono>
#include <limits>
#include <memory>

#include "app/speculative_config.h"
#include "base/log.h"

namespace quern::app {
namespace {

using weights::LoadFormat;
using worker::KvCacheDType;
using worker::ModelDType;
using worker::RingDType;

constexpr int64_t kMaxInt = std::numeric_limits<int32_t>::max();

/// auto and -1 mean: the model's own length, or as much as fits.
Setter to_model_len(int32_t& target) {
  return [&target, as_number = to_integer(target, 1, kMaxInt)](std::string_view text) -> Result<void> {
    if (text != "auto" && text != "-1") return as_number(text);
    target = 0;
    return {};
  };
}

Setter to_dtype(ModelDType& target) {
  const Setter as_word =
      to_choice<ModelDType>(target, {{"auto", ModelDType::kAuto}, {"bfloat16", ModelDType::kBFloat16}, {"float32", ModelDType::kFloat32}});
  Setter setter = [as_word](std::string_view text) -> Result<void> {
    if (text == "float16" || text == "half") {
      return Error{ErrorCode::kUnsupported,
                   "float16 is refused: activations of these models exceed its range (65504) and would turn into infinities; use bfloat16 "
                   "or float32",
                   {}};
    }
    return as_word(text == "float" ? "float32" : text);
  };
  setter.words = as_word.words;
  return setter;
}

Setter to_kv_dtype(KvCacheDType& target) {
  const Setter as_word =
      to_choice<KvCacheDType>(target, {{"auto", KvCacheDType::kAuto}, {"bfloat16", KvCacheDType::kBFloat16}, {"fp8", KvCacheDType::kFp8}});
  Setter setter = [as_word](std::string_view text) -> Result<void> { return as_word(text == "fp8_e4m3" ? "fp8" : text); };
  setter.words = as_word.words;
  return setter;
}

Setter to_ring_dtype(RingDType& target) {
  const Setter as_word =
      to_choice<RingDType>(target, {{"auto", RingDType::kAuto}, {"bfloat16", RingDType::kBFloat16}, {"float32", RingDType::kFloat32}});
  Setter setter = [as_word](std::string_view text) -> Result<void> { return as_word(text == "float" ? "float32" : text); };
  setter.words = as_word.words;
  return setter;
}

Setter to_quantization(ModelOptions& options) {
  return [&options](std::string_view text) -> Result<void> {
    if (text == "fp8") {
      options.worker.load.quantize_fp8 = true;
      return {};
    }
    if (text == "compressed-tensors" || text == "modelopt") {
      options.notices.push_back(fmt::format("--quantization {} has no effect: how each tensor is stored decides its scheme", text));
      return {};
    }
    return invalid_argument(
        "'{}' is not known; fp8 quantizes a BF16 checkpoint while loading, and other schemes are recognised by themselves", text);
  };
}

Setter to_seconds(std::chrono::milliseconds& target) {
  const auto seconds = std::make_shared<double>();
  return [&target, seconds, as_number = to_number(*seconds, 0.1, 86400)](std::string_view text) -> Result<void> {
    RETURN_IF_ERROR(as_number(text));
    target = std::chrono::milliseconds(static_cast<int64_t>(*seconds * 1000));
    return {};
  };
}

Setter to_kernel(std::map<std::string, std::string, std::less<>>& kernels) {
  return [&kernels](std::string_view text) -> Result<void> {
    const size_t equals = text.find('=');
    if (equals == std::string_view::npos || equals == 0 || equals + 1 == text.size())
      return invalid_argument("'{}' is not of the form OP=CANDIDATE, as in attention=cpu.plain; `quern kernels` lists both", text);
    kernels.insert_or_assign(std::string(text.substr(0, equals)), std::string(text.substr(equals + 1)));
    return {};
  };
}

Setter to_log_level() {
  const auto level = std::make_shared<LogLevel>(LogLevel::kInfo);
  const Setter as_word = to_choice<LogLevel>(
      *level, {{"debug", LogLevel::kDebug}, {"info", LogLevel::kInfo}, {"warning", LogLevel::kWarning}, {"error", LogLevel::kError}});
  Setter setter = [level, as_word](std::string_view text) -> Result<void> {
    RETURN_IF_ERROR(as_word(text));
    set_log_level(*level);
    return {};
  };
  setter.words = as_word.words;
  return setter;
}

OptionGroup model_group(ModelOptions& o) {
  return {
      "Model",
      {
          {"--load-format", "FORMAT", "auto, safetensors, or dummy: random weights from config.json alone",
           to_choice<LoadFormat>(o.worker.load.format,
                                 {{"auto", LoadFormat::kAuto}, {"safetensors", LoadFormat::kSafetensors}, {"dummy", LoadFormat::kDummy}})},
          {"--dtype", "TYPE", "Activations: auto (bfloat16), bfloat16 or float32", to_dtype(o.worker.dtype)},
          {"-q,--quantization", "SCHEME", "fp8: quantize a BF16 checkpoint while loading", to_quantization(o)},
          {"--kv-cache-dtype", "TYPE", "auto, bfloat16 or fp8 (fp8_e4m3)", to_kv_dtype(o.worker.kv_cache_dtype)},
          {"--gdn-ring-dtype", "TYPE", "Rows that Gated DeltaNet keeps beside its state: auto (the type of activations), bfloat16 or float32", to_ring_dtype(o.worker.ring_dtype)},
          {"--activation-scheme", "SCHEME", "Activations that meet FP8 weights: auto (FP8 where the device multiplies it), or none: they stay as they are",
           to_choice<bool>(o.worker.quantize_activations, {{"auto", true}, {"none", false}})},
          {"--strict", "", "Unknown tensors in the checkpoint are errors", to_flag(o.worker.load.strict)},
          without_effect(o, "--language-model-only", "", "only the language model is ever loaded"),
      }};
}

OptionGroup memory_group(ModelOptions& o) {
  return {"Memory and limits",
          {
              {"--max-model-len", "N", "Tokens of prompt and output; auto (default): the model's, or as many as fit",
               to_model_len(o.worker.max_model_len)},
              {"--max-num-seqs", "N", "Sequences that run together (default 64, or as many as fit)",
               to_integer(o.worker.max_num_seqs, 1, 1 << 16)},
              {"--max-num-batched-tokens", "N", "Rows of one step (default 2048; CPU 512)",
               to_integer(o.worker.max_num_batched_tokens, 64, 1 << 20)},
              {"--long-prefill-token-threshold", "N", "Rows of one prompt in a step, at most, so that others get their share (default: no limit)",
               to_integer(o.long_prefill_token_threshold, 1, kMaxInt)},
              {"--max-queue-len", "N", "Requests that may wait; one more is answered with 503 (default 1024)",
               to_integer(o.max_queue_len, 0, kMaxInt)},
              {"--gpu-memory-utilization", "SHARE", "Share of the device's memory that may be used (default 0.9)",
               to_number(o.worker.memory_utilization, 0.01, 1.0)},
              {"--kv-cache-memory-bytes", "SIZE", "Memory for KV blocks, e.g. 4G or 512MiB, instead of what is left",
               to_size(o.worker.kv_cache_memory_bytes)},
          }};
}

OptionGroup engine_group(ModelOptions& o) {
  return {"Prefix cache and speculation",
          {
              {"--enable-prefix-caching", "", "Prompts begin behind the longest prefix that was computed before (default, but for bench)",
               to_flag(o.prefix_cache.enabled)},
              {"--no-enable-prefix-caching", "", "Every prompt is computed as a whole", to_flag(o.prefix_cache.enabled, false)},
              {"--prefix-reuse", "WHAT", "all (default), or prompts: never rows that were computed one by one as output",
               to_choice<bool>(o.prefix_cache.reuse_outputs, {{"all", true}, {"prompts", false}})},
              {"--num-snapshots", "N", "Recurrent states kept for the prefix cache (default: from a tenth of what weights leave, at most 4 a sequence or 32)",
               to_integer(o.worker.num_snapshots, 0, 1 << 20)},
              {"--prefix-cache-host-memory", "SIZE", "Host memory for cached prefixes and preempted sequences that the device has no room for (default: none)",
               [&o](std::string_view text) -> Result<void> {
                 ASSIGN_OR_RETURN(o.worker.host_cache_bytes, parse_size(text));
                 return {};
               }},
              {"--snapshot-interval", "N", "Tokens between states that are kept in any case (default: from their number)",
               to_integer(o.prefix_cache.snapshot_interval, 64, kMaxInt)},
              {"--speculative-config", "JSON",
               R"(Guess tokens ahead: {"method": "mtp", "num_speculative_tokens": 3} where the model has the head (default), "ngram", or "none")",
               to_speculation(o.speculation, o.worker.draft_head)},
          }};
}

OptionGroup device_group(ModelOptions& o) {
  return {
      "Device",
      {
          {"--device", "NAME", "cpu (default), cuda:N, opencl (the first Intel GPU) or opencl:N (any); with -tp or -pp a list, or the first of them; `plan` and `kernels` also know cards by name: b60, b70, h200, ...",
           to_text(o.worker.device)},
          {"--threads", "N", "CPU threads (default: one per core); never changes results", to_integer(o.worker.num_threads, 1, 4096)},
          {"--kernel", "OP=CANDIDATE", "Use this kernel for an op or fail; may be repeated", to_kernel(o.worker.kernels), true},
          {"-tp,--tensor-parallel-size", "N", "Devices that share every layer (default 1)", to_integer(o.worker.tp_size, 1, 64)},
          {"-pp,--pipeline-parallel-size", "N", "Stages of layers, each on a device, or on as many as -tp says (default 1)", to_integer(o.worker.pp_size, 1, 64)},
          {"--collective", "NAME", "How ranks exchange messages: direct, staged or nccl; this one or none (default: what works best between the devices, see `quern devices`)",
           to_text(o.worker.collective.transport)},
          {"--collective-timeout", "SECONDS", "A rank that waits longer for another gives up, and the step ends with an error (default 10, on a CPU 60)", to_seconds(o.worker.collective_timeout)},
          {"--step-timeout", "SECONDS", "A device that takes longer for a step is taken for lost, and the server ends (default 120, on a CPU 1200)", to_seconds(o.worker.step_timeout)},
          {"--enforce-eager", "", "Launch every kernel of a step instead of replaying recorded launches (CPUs always do)", to_flag(o.worker.enforce_eager)},
          log_level_option(),
      }};
}

}  // namespace

Option log_level_option() { return {"--log-level", "LEVEL", "debug, info (default), warning or error", to_log_level()}; }

Option without_effect(ModelOptions& options, std::string name, std::string value, std::string why) {
  const std::string shown = name.substr(name.rfind(',') + 1);
  return {.names = name,
          .value = std::move(value),
          .help = fmt::format("No effect yet: {}", why),
          .set = [&options, shown, why](std::string_view) -> Result<void> {
            options.notices.push_back(fmt::format("{} has no effect: {}", shown, why));
            return {};
          }};
}

void add_model_options(Command& command, ModelOptions& options) {
  command.positionals.push_back({"MODEL", to_path(options.worker.model_dir)});
  command.groups.push_back(model_group(options));
  command.groups.push_back(memory_group(options));
  command.groups.push_back(engine_group(options));
  command.groups.push_back(device_group(options));
}

Result<void> settle_options(ModelOptions& options) {
  using engine::SpeculationMethod;
  const engine::SpeculationOptions& speculation = options.speculation;
  if (speculation.synthetic_acceptance_length && !options.allow_synthetic_acceptance)
    return invalid_argument(
        "--speculative-config: synthetic_acceptance_length makes nonsense of every text; it is for benchmarks, and "
        "--allow-synthetic-acceptance says that you know");
  if (options.worker.enforce_eager && options.worker.device.starts_with("cpu")) options.notices.emplace_back("--enforce-eager has no effect: a CPU records no launches");
  if (!options.worker.collective.transport.empty() && options.worker.tp_size * options.worker.pp_size == 1) options.notices.emplace_back("--collective has no effect: there is one rank");
  if (speculation.method == SpeculationMethod::kMtp) options.worker.load.with_mtp = true;
  // The head takes memory; who does not want it does not load it.
  if (speculation.method == SpeculationMethod::kNone || speculation.method == SpeculationMethod::kNgram) options.worker.load.with_mtp = false;
  if (speculation.method != SpeculationMethod::kNone) options.worker.k_max = std::max(options.worker.k_max, speculation.num_speculative_tokens);
  return {};
}

engine::EngineOptions engine_options(const ModelOptions& options) {
  engine::EngineOptions result;
  result.max_num_seqs = options.worker.max_num_seqs;
  result.max_num_batched_tokens = options.worker.max_num_batched_tokens;
  result.max_queue_len = options.max_queue_len;
  result.long_prefill_token_threshold = options.long_prefill_token_threshold;
  result.prefix_cache = options.prefix_cache;
  result.speculation = options.speculation;
  return result;
}

}  // namespace quern::app
