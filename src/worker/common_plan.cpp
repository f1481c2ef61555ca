#include "worker/common_plan.h"

#include <algorithm>

#include "base/hash.h"
#include "weights/checkpoint.h"
#include "worker/process_trial.h"
#include "worker/rank_devices.h"
#include "worker/wire.h"

namespace quern::worker {
namespace {

using Facts = std::vector<std::pair<std::string, std::string>>;

constexpr int32_t kTag = 2;
/// Until all have said what they have: a host may read its checkpoint's headers over a slow network.
constexpr std::chrono::minutes kMeet{2};
/// And what process 0 has besides to tell the others who is missing.
constexpr std::chrono::seconds kVerdict{30};

std::string text_of(bool value) { return value ? "yes" : "no"; }
template <class T>
std::string text_of(const std::optional<T>& value) { return value ? fmt::format("{}", *value) : "auto"; }

/// What has to be the same in all processes for their plans to be. Every member of the options stands in the binding: one that is added does not compile until it is here, too.
Facts facts_of(const WorkerOptions& options, std::string_view build, uint64_t checkpoint) {
  const auto& [model_dir, device, load, dtype, kv_cache_dtype, ring_dtype, max_model_len, max_num_seqs, max_num_batched_tokens, max_logit_rows, k_max, draft_head, num_snapshots, host_cache_bytes, memory_utilization,
               kv_cache_memory_bytes, tp_size, pp_size, collective, collective_timeout, step_timeout, wrap_stream, quantize_activations, enforce_eager, max_recorded_steps, num_threads, kernels] = options;
  const auto& [format, quantize_fp8, with_mtp, strict, dummy_seed] = load;
  static_cast<void>(model_dir), static_cast<void>(device), static_cast<void>(num_threads);  // each host's own
  static_cast<void>(strict), static_cast<void>(wrap_stream), static_cast<void>(max_recorded_steps);  // refuses, or changes nothing; for tests; of each device
  std::string chosen;
  for (const auto& [op, candidate] : kernels) chosen += fmt::format("{}{}={}", chosen.empty() ? "" : ",", op, candidate);
  return {{"quern", std::string(build)},
          {"the checkpoint", fmt::format("{:016x}", checkpoint)},
          {"--load-format", fmt::format("{}", static_cast<int>(format))},
          {"--quantization fp8", text_of(quantize_fp8)},
          {"the MTP head", text_of(with_mtp)},
          {"the seed of dummy weights", fmt::format("{}", dummy_seed)},
          {"--dtype", fmt::format("{}", static_cast<int>(dtype))},
          {"--kv-cache-dtype", fmt::format("{}", static_cast<int>(kv_cache_dtype))},
          {"--gdn-ring-dtype", fmt::format("{}", static_cast<int>(ring_dtype))},
          {"--max-model-len", fmt::format("{}", max_model_len)},
          {"--max-num-seqs", fmt::format("{}", max_num_seqs)},
          {"--max-num-batched-tokens", fmt::format("{}", max_num_batched_tokens)},
          {"the rows of logits", fmt::format("{}", max_logit_rows)},
          {"the drafts of a step", fmt::format("{}", k_max)},
          {"the drafts' head", fmt::format("{}", static_cast<int>(draft_head))},
          {"the snapshots", fmt::format("{}", num_snapshots)},
          {"the host memory of the prefix cache", fmt::format("{}", host_cache_bytes)},
          {"--gpu-memory-utilization", fmt::format("{}", memory_utilization)},
          {"--kv-cache-memory-bytes", text_of(kv_cache_memory_bytes)},
          {"-tp", fmt::format("{}", tp_size)},
          {"-pp", fmt::format("{}", pp_size)},
          {"--collective", collective.transport.empty() ? "auto" : collective.transport},
          {"--collective-timeout", fmt::format("{} ms", collective_timeout.count())},
          {"--step-timeout", fmt::format("{} ms", step_timeout.count())},
          {"FP8 activations", text_of(quantize_activations)},
          {"--enforce-eager", text_of(enforce_eager)},
          {"--kernel", chosen.empty() ? "none" : chosen}};
}

/// What must follow from them.
Facts facts_of(const ExecutionPlan& plan) {
  Facts facts;
  for (const RankPlan& rank : plan.ranks)
    facts.emplace_back(fmt::format("the plan of rank {}", rank.shard.rank()), fmt::format("layers {} to {}, {} bytes of weights", rank.shard.layers.begin, rank.shard.layers.end - 1, rank.memory.weights_bytes));
  const WorkerLimits& l = plan.limits;
  facts.emplace_back("the plan's limits", fmt::format("{} sequences, {} blocks, {} snapshots, {} and {} in host memory, {} tokens, {} rows", l.num_slots, l.num_blocks, l.num_snapshots, l.num_host_blocks,
                                                      l.num_host_snapshots, l.max_model_len, l.max_rows));
  facts.emplace_back("the plan's types", fmt::format("{}, {}, {}", dtype_name(plan.activation), dtype_name(plan.kv), dtype_name(plan.ring)));
  return facts;
}

/// Of the config and of the tensors' names, types and shapes, and of a few bytes of some of them: enough to tell models apart, and read at once.
Result<uint64_t> fingerprint(const WorkerOptions& options) {
  constexpr size_t kSampled = 64, kSampleBytes = 64;
  ASSIGN_OR_RETURN(const std::string config, read_file(options.model_dir / "config.json"));
  uint64_t hash = fnv1a(config);
  bool has_weights = false;
  for (const auto& entry : std::filesystem::directory_iterator(options.model_dir)) has_weights = has_weights || entry.path().extension() == ".safetensors";
  if (!has_weights || options.load.format == weights::LoadFormat::kDummy) return hash;
  Faults faults;
  ASSIGN_OR_RETURN(const weights::Checkpoint checkpoint, weights::Checkpoint::open(options.model_dir, faults));
  const size_t stride = std::max<size_t>(checkpoint.tensors().size() / kSampled, 1);
  size_t number = 0;
  for (const auto& [name, tensor] : checkpoint.tensors()) {
    hash = hash_combine(hash, fnv1a(name, fnv1a(tensor.tensor->dtype_text)));
    for (const int64_t extent : tensor.tensor->shape.extents()) hash = hash_combine(hash, static_cast<uint64_t>(extent));
    const std::span<const std::byte> bytes = tensor.bytes();
    if (number++ % stride != 0 || bytes.empty()) continue;
    const auto sample = bytes.subspan(bytes.size() / 2, std::min(kSampleBytes, bytes.size() - bytes.size() / 2));
    hash = fnv1a({reinterpret_cast<const char*>(sample.data()), sample.size()}, hash);
  }
  return hash;
}

/// What a process can say before anything is planned.
Statement introduce(const WorkerOptions& options, const Processes& processes, std::string_view build, const Result<void>& so_far) {
  Statement mine{.error = {}, .host = processes.host(), .facts = {}, .devices = {}, .traits = {}};
  const auto look = [&]() -> Result<void> {
    RETURN_IF_ERROR(so_far);
    if (options.pp_size != processes.size())
      return invalid_argument("-pp {} in {} processes: each process has one stage, so it has to be {}, or be left out", options.pp_size, processes.size(), processes.size());
    ASSIGN_OR_RETURN(mine.devices, rank_devices(options.device, options.tp_size, 1));
    ASSIGN_OR_RETURN(mine.traits, traits_of_ranks(mine.devices, options.tp_size, processes.num_on_host()));
    ASSIGN_OR_RETURN(const uint64_t checkpoint, fingerprint(options));
    mine.facts = facts_of(options, build, checkpoint);
    return {};
  };
  if (const Result<void> looked = look(); !looked) mine.error = looked.error();
  return mine;
}

std::string name_of(size_t process, const Statement& statement) { return fmt::format("process {} ({})", process, statement.host); }

/// What keeps them from working together.
std::optional<Error> what_differs(const std::vector<Statement>& all) {
  std::vector<std::string> faults;
  ErrorCode code = ErrorCode::kInvalidArgument;
  if (all[0].error && std::all_of(all.begin(), all.end(), [&](const Statement& each) { return each.error && each.error->message == all[0].error->message; })) return all[0].error;
  for (size_t p = 0; p < all.size(); ++p) {
    if (!all[p].error) continue;
    code = all[p].error->code;
    faults.push_back(fmt::format("{}: {}", name_of(p, all[p]), all[p].error->message));
  }
  for (size_t p = 1; p < all.size() && faults.empty(); ++p) {
    const Facts &here = all[0].facts, &there = all[p].facts;
    std::vector<std::string> differences;
    for (size_t i = 0; i < std::min(here.size(), there.size()); ++i)
      if (here[i] != there[i]) differences.push_back(fmt::format("{} {} there and {} here", here[i].first, there[i].second, here[i].second));
    if (here.size() != there.size()) differences.push_back("the number of what was compared");
    if (!all[0].traits.empty() && !all[p].traits.empty() && all[p].traits[0].platform != all[0].traits[0].platform)
      differences.push_back(fmt::format("the platform {} there and {} here, and one model cannot run on two", ops::platform_name(all[p].traits[0].platform), ops::platform_name(all[0].traits[0].platform)));
    if (!differences.empty()) faults.push_back(fmt::format("{} differs from {}: {}", name_of(p, all[p]), name_of(0, all[0]), fmt::join(differences, "; ")));
  }
  if (faults.empty()) return std::nullopt;
  return Error{code, fmt::format("{}", fmt::join(faults, "; ")), {}};
}

Result<void> say(Processes& processes, int32_t to, const Message& message) {
  const auto bytes = std::make_shared<const Bytes>(to_bytes(message));
  return processes.send(to, kTag, *bytes, bytes, {.deadline = kMeet});
}
template <class T>
Result<T> hear(Processes& processes, int32_t from, std::chrono::milliseconds deadline) {
  const auto listen = [&]() -> Result<T> {
    ASSIGN_OR_RETURN(const Bytes bytes, processes.receive(from, kTag, {.deadline = deadline}));
    ASSIGN_OR_RETURN(Message message, message_from_bytes(bytes));
    if (auto* wanted = std::get_if<T>(&message)) return std::move(*wanted);
    return make_error(ErrorCode::kInternal, "it has sent another message than was awaited");
  };
  Result<T> heard = listen();
  if (!heard) return heard.error().with_context(fmt::format("process {}", from));
  return heard;
}

/// All statements, in every process, or in every process why not.
Result<std::vector<Statement>> agree(Processes& processes, Statement mine) {
  if (processes.rank() != 0) {
    RETURN_IF_ERROR(say(processes, 0, std::move(mine)));
    ASSIGN_OR_RETURN(Verdict verdict, hear<Verdict>(processes, 0, kMeet + kVerdict));
    if (verdict.error) return verdict.error->with_context("process 0 says");
    if (std::ssize(verdict.all) != processes.size()) return make_error(ErrorCode::kInternal, "process 0 knows of {} processes of {}", verdict.all.size(), processes.size());
    return std::move(verdict.all);
  }
  Verdict verdict;
  verdict.all.push_back(std::move(mine));
  const auto end = std::chrono::steady_clock::now() + kMeet;  // for all of them
  for (int32_t process = 1; process < processes.size(); ++process) {
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(end - std::chrono::steady_clock::now());
    Result<Statement> heard = hear<Statement>(processes, process, std::max(left, std::chrono::milliseconds(1)));
    verdict.all.push_back(heard ? std::move(*heard) : Statement{.error = heard.error(), .host = "unknown host", .facts = {}, .devices = {}, .traits = {}});
  }
  verdict.error = what_differs(verdict.all);
  for (int32_t process = 1; process < processes.size(); ++process) {
    const Result<void> said = say(processes, process, verdict);
    if (!said && !verdict.error) verdict.error = said.error();
  }
  if (verdict.error) return *verdict.error;
  return std::move(verdict.all);
}

}  // namespace

Result<ExecutionPlan> make_common_plan(WorkerOptions options, Processes& processes, std::string_view build, const Result<void>& so_far) {
  if (options.pp_size == 1) options.pp_size = processes.size();
  ASSIGN_OR_RETURN(const std::vector<Statement> all, agree(processes, introduce(options, processes, build, so_far)));
  std::vector<std::string> devices;
  std::vector<ops::DeviceTraits> traits;
  for (const Statement& each : all) {
    devices.insert(devices.end(), each.devices.begin(), each.devices.end());
    traits.insert(traits.end(), each.traits.begin(), each.traits.end());
  }
  // Devices of one kind are one kind: what two processes have measured of theirs differs by chance.
  for (ops::DeviceTraits& device : traits)
    for (const ops::DeviceTraits& earlier : traits)
      if (earlier.name == device.name && earlier.num_cores == device.num_cores) {
        device.read_bandwidth = earlier.read_bandwidth;
        break;
      }
  Result<ExecutionPlan> plan = make_plan_on(options, devices, traits);
  Statement outcome{.error = {}, .host = processes.host(), .facts = {}, .devices = {}, .traits = {}};
  if (plan) {
    for (const Statement& each : all) plan->hosts.push_back(each.host);
    plan->process = processes.rank();
    outcome.facts = facts_of(*plan);
  } else {
    outcome.error = plan.error();
  }
  RETURN_IF_ERROR(agree(processes, std::move(outcome)));
  const ops::CollectiveOptions messages = plan->collective_options();
  const Result<void> tried = try_neighbours(processes, messages.row_bytes, messages.max_message_bytes);
  RETURN_IF_ERROR(agree(processes, {.error = tried ? std::nullopt : std::optional(tried.error()), .host = processes.host(), .facts = {}, .devices = {}, .traits = {}}));
  return plan;
}

}  // namespace quern::worker
