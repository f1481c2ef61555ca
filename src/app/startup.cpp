#include "app/startup.h"

#include <map>

#include "app/build_info.h"
#include "app/format.h"
#include "app/plan_report.h"
#include "app/progress.h"
#include "base/log.h"
#include "worker/common_plan.h"

namespace quern::app {
namespace {

void log_rank(const worker::ExecutionPlan& plan, const worker::RankPlan& rank) {
  log_info("{}: layers {} to {}, weights {}, {} of {} in all", plan.rank_name(static_cast<size_t>(rank.shard.rank())), rank.shard.layers.begin, rank.shard.layers.end - 1,
           format_bytes(rank.memory.weights_bytes), format_bytes(rank.memory.total_bytes()), format_bytes(rank.memory.device_bytes));
}

void log_plan(const worker::ExecutionPlan& plan) {
  const worker::MemoryPlan& memory = plan.memory;
  log_info("{} on {} ({}), activations {}, KV {}, ring {}", plan.config.name, plan.options.device, plan.traits.name, dtype_name(plan.activation),
           dtype_name(plan.kv), dtype_name(plan.ring));
  for (const worker::RankPlan& rank : plan.ranks)
    if (plan.ranks.size() > 1) log_rank(plan, rank);
  log_info("memory: weights {}, workspace {}, state and rings {}, KV {}; {} of {} in all", format_bytes(memory.weights_bytes),
           format_bytes(memory.workspace_bytes),
           format_bytes(memory.state_bytes + memory.ring_bytes + memory.sampler_bytes + memory.snapshot_bytes),
           format_bytes(memory.kv_bytes), format_bytes(memory.total_bytes()), format_bytes(memory.device_bytes));
  log_info("limits: {} tokens per sequence, {} sequences, {} tokens of KV, {} snapshots, {} rows per step", format_count(plan.limits.max_model_len),
           plan.limits.num_slots, format_count(int64_t{plan.limits.num_blocks} * 64), plan.limits.num_snapshots, plan.limits.max_rows);
  if (plan.limits.num_host_blocks > 0)
    log_info("host memory for the prefix cache: {} tokens of KV, {} snapshots", format_count(int64_t{plan.limits.num_host_blocks} * 64), plan.limits.num_host_snapshots);
  std::map<std::string, std::string> chosen;  // op -> candidates
  for (const worker::OpChoice& choice : plan.choices) {
    std::string& candidates = chosen[choice.op];
    if (candidates.find(choice.candidate) == std::string::npos) candidates += (candidates.empty() ? "" : ", ") + choice.candidate;
  }
  for (const auto& [op, candidates] : chosen) log_info("kernel: {:<14} {}", op, candidates);
  log_info("decode: {}", expected_decode(plan));
  for (const std::string& note : plan.notes) log_info("{}", note);
  for (const std::string& name : plan.inventory.unknown) log_warning("unknown tensor {} is not used; --strict makes this an error", name);
}

}  // namespace

Result<void> check_model_dir(const std::filesystem::path& model_dir) {
  std::error_code error;
  const auto status = std::filesystem::status(model_dir, error);
  if (!std::filesystem::exists(status)) {
    return make_error(ErrorCode::kNotFound,
                      "there is no model directory {}; MODEL is a local folder with config.json and *.safetensors (nothing is downloaded)",
                      model_dir.string());
  }
  if (!std::filesystem::is_directory(status))
    return invalid_argument("{} is not a directory; MODEL is the folder that holds config.json and *.safetensors", model_dir.string());
  if (!std::filesystem::exists(model_dir / "config.json", error))
    return make_error(ErrorCode::kNotFound, "{} has no config.json; is it the folder of a Hugging Face checkpoint?", model_dir.string());
  return {};
}

Result<worker::ExecutionPlan> plan_model(ModelOptions options, worker::Processes* processes) {
  const auto check = [&]() -> Result<void> {
    RETURN_IF_ERROR(settle_options(options));
    for (const std::string& notice : options.notices) log_warning("{}", notice);
    return check_model_dir(options.worker.model_dir);
  };
  const Result<void> checked = check();
  if (processes != nullptr) return worker::make_common_plan(options.worker, *processes, version_with_commit(), checked);
  RETURN_IF_ERROR(checked);
  return worker::make_plan(options.worker);
}

Result<void> check_runnable(const worker::ExecutionPlan& plan) {
  if (const std::string refusals = plan.refusals(); !refusals.empty()) return Error{ErrorCode::kUnsupported, refusals, {}};
  if (!plan.fits) return Error{ErrorCode::kResourceExhausted, plan.verdict, {}};
  return {};
}

Result<std::unique_ptr<worker::WorkerGroup>> start_planned(const worker::ExecutionPlan& plan, worker::ActivationRanges* ranges,
                                                           const worker::LoadProgress& on_progress, worker::Processes* processes) {
  RETURN_IF_ERROR(check_runnable(plan));
  log_plan(plan);
  uint64_t weights_bytes = 0;  // of all ranks
  for (const worker::RankPlan& rank : plan.ranks) weights_bytes += rank.memory.weights_bytes;
  Progress progress("loading weights", weights_bytes);
  const auto update = [&](double share) {
    progress.update(share);
    if (on_progress) on_progress(share);
  };
  auto workers = worker::start_workers(plan, update, ranges, nullptr, processes);
  progress.finish(workers.has_value());
  return workers;
}

Result<void> follow_planned(const worker::ExecutionPlan& plan, worker::Processes& processes, const worker::FollowerEvents& events) {
  RETURN_IF_ERROR(check_runnable(plan));
  for (const worker::RankPlan& rank : plan.ranks)
    if (rank.shard.pp_rank == plan.process) log_rank(plan, rank);
  return worker::follow_process_0(plan, processes, events);
}

}  // namespace quern::app
