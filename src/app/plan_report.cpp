#include "app/plan_report.h"

#include <fmt/format.h>

#include <algorithm>
#include <iterator>
#include <map>
#include <set>

#include "app/format.h"
#include "app/speed_report.h"

namespace quern::app {
namespace {

std::string memory_table(const worker::ExecutionPlan& plan) {
  const worker::MemoryPlan& memory = plan.memory;
  const worker::WorkerLimits& limits = plan.limits;
  std::string text = plan.ranks.size() == 1 ? "memory\n" : "memory of the rank with the least to spare\n";
  const auto row = [&](std::string_view what, uint64_t bytes, const std::string& remark = {}) {
    fmt::format_to(std::back_inserter(text), "  {:<24}{:>12}{}{}\n", what, format_bytes(bytes), remark.empty() ? "" : "   ", remark);
  };
  row("weights", memory.weights_bytes, "packed");
  row("workspace", memory.workspace_bytes, fmt::format("{} rows a step", limits.max_rows));
  if (memory.message_bytes > 0) row("messages", memory.message_bytes, "between ranks");
  if (memory.driver_bytes > 0) row("driver, code, graphs", memory.driver_bytes, "not allocated by quern");
  row("recurrent state", memory.state_bytes, fmt::format("{} sequences", limits.num_slots));
  row("rings, conv windows", memory.ring_bytes);
  row("sampler", memory.sampler_bytes);
  if (memory.snapshot_bytes > 0) row("snapshots", memory.snapshot_bytes, fmt::format("{} boundaries", limits.num_snapshots));
  row("KV cache", memory.kv_bytes,
      fmt::format("{} blocks of 64 tokens, {} each", format_count(limits.num_blocks), format_bytes(memory.block_bytes)));
  row("total", memory.total_bytes());
  row("usable", memory.budget_bytes, fmt::format("of {}", format_bytes(memory.device_bytes)));
  return text;
}

/// What every rank keeps and reads; nothing where there is one.
std::string rank_table(const worker::ExecutionPlan& plan) {
  if (plan.ranks.size() == 1) return {};
  std::string text = fmt::format("ranks, tp {} pp {}\n  {:<4}{:<14}{:>8}{:>12}{:>14}{:>12}{:>12}{:>16}\n", plan.options.tp_size, plan.options.pp_size, "", "device", "layers", "weights", "states, KV",
                                 "total", "usable", "read a token");
  for (const worker::RankPlan& rank : plan.ranks) {
    const worker::MemoryPlan& memory = rank.memory;
    fmt::format_to(std::back_inserter(text), "  {:<4}{:<14}{:>8}{:>12}{:>14}{:>12}{:>12}{:>16}\n", rank.shard.rank(), rank.device,
                   fmt::format("{}-{}", rank.shard.layers.begin, rank.shard.layers.end - 1), format_bytes(memory.weights_bytes),
                   format_bytes(memory.total_bytes() - memory.allocated_before()), format_bytes(memory.total_bytes()), format_bytes(memory.budget_bytes),
                   format_bytes(static_cast<uint64_t>(rank.decode_bytes_per_token)));
  }
  return text + "\n";
}

}  // namespace

std::string chosen_kernels(const worker::ExecutionPlan& plan) {
  std::map<std::string, std::set<std::string>> ops;  // candidate -> its ops
  for (const worker::OpChoice& choice : plan.choices)
    if (!choice.candidate.empty()) ops[choice.candidate].insert(choice.op);
  size_t most = 0;
  for (const auto& [candidate, names] : ops) most = std::max(most, names.size());
  std::string text;
  for (const auto& [candidate, names] : ops) {
    text += (text.empty() ? "" : "; ") + candidate;
    if (names.size() < most) text += fmt::format(" for {}", fmt::join(names, ", "));
  }
  return text;
}

std::string expected_decode(const worker::ExecutionPlan& plan) {
  if (plan.traits.read_bandwidth <= 0) return "unknown: the device's read bandwidth is";
  const double share = plan.expected_decode_tokens_per_second * plan.decode_bytes_per_token / plan.traits.read_bandwidth;
  return fmt::format("{:.1f} tok/s for one sequence without speculation: {} read for a token at 1k context, {:.0f} % of {:.1f} GB/s",
                     plan.expected_decode_tokens_per_second, format_bytes(static_cast<uint64_t>(plan.decode_bytes_per_token)), 100 * share,
                     plan.traits.read_bandwidth / 1e9) + (worker::card_speed(plan) ? ", modelled" : "");
}

std::string plan_as_text(const worker::ExecutionPlan& plan) {
  std::string text = fmt::format("{} on {} ({})\n", plan.config.name, plan.options.device, plan.traits.name);
  auto out = std::back_inserter(text);
  fmt::format_to(out, "activations {}, KV {}, ring {}, MTP head {}{}\n\n", dtype_name(plan.activation), dtype_name(plan.kv),
                 dtype_name(plan.ring), plan.with_mtp ? "present" : "absent", plan.draft_head ? ", drafts picked with an FP8 copy of lm_head" : "");
  fmt::format_to(out, "  {:<24}{:>12}{:>14}\n", "tensors", "number", "bytes");
  for (const worker::SchemeTotal& scheme : plan.schemes)
    fmt::format_to(out, "  {:<24}{:>12}{:>14}\n", scheme.scheme, format_count(scheme.num_tensors), format_bytes(scheme.bytes));
  text += "\n" + memory_table(plan) + "\n" + rank_table(plan);
  fmt::format_to(out, "limits    {} tokens per sequence, {} sequences at once, {} tokens of KV\n", format_count(plan.limits.max_model_len),
                 plan.limits.num_slots, format_count(int64_t{plan.limits.num_blocks} * 64));
  fmt::format_to(out, "expected  {}\n", expected_decode(plan));
  if (const auto speed = worker::card_speed(plan)) text += card_speed_as_text(plan, *speed);
  for (const std::string& note : plan.notes) fmt::format_to(out, "note      {}\n", note);
  if (!plan.inventory.unknown.empty())
    fmt::format_to(out, "note      {} unknown tensors, the first is {}\n", plan.inventory.unknown.size(), plan.inventory.unknown[0]);
  if (const std::string refusals = plan.refusals(); !refusals.empty())
    fmt::format_to(out, "kernels   {}; `quern kernels` says why\n", refusals.substr(0, refusals.find('\n')));
  else
    fmt::format_to(out, "kernels   {}\n", chosen_kernels(plan));
  fmt::format_to(out, "verdict   {}", plan.verdict.empty() ? (plan.fits ? "fits" : "does not fit") : plan.verdict);
  return text;
}

Json plan_as_json(const worker::ExecutionPlan& plan) {
  const worker::MemoryPlan& memory = plan.memory;
  Json schemes = Json::array();
  for (const worker::SchemeTotal& scheme : plan.schemes)
    schemes.push_back({{"scheme", scheme.scheme}, {"num_tensors", scheme.num_tensors}, {"bytes", scheme.bytes}});
  Json kernels = Json::array();
  for (const worker::OpChoice& choice : plan.choices)
    kernels.push_back({{"op", choice.op}, {"problem", choice.problem}, {"wanted_by", choice.wanted_by}, {"candidate", choice.candidate}});
  Json modelled;
  if (const auto speed = worker::card_speed(plan)) modelled = card_speed_as_json(plan, *speed);
  Json ranks = Json::array();
  for (const worker::RankPlan& rank : plan.ranks)
    ranks.push_back({{"rank", rank.shard.rank()},
                     {"tp_rank", rank.shard.tp_rank},
                     {"pp_rank", rank.shard.pp_rank},
                     {"device", rank.device},
                     {"device_name", rank.traits.name},
                     {"first_layer", rank.shard.layers.begin},
                     {"num_layers", rank.shard.layers.size()},
                     {"weights_bytes", rank.memory.weights_bytes},
                     {"total_bytes", rank.memory.total_bytes()},
                     {"budget_bytes", rank.memory.budget_bytes},
                     {"margin_bytes", rank.memory.margin_bytes()},
                     {"decode_bytes_per_token", rank.decode_bytes_per_token}});
  return {
      {"model", plan.config.name},
      {"device", plan.options.device},
      {"device_name", plan.traits.name},
      {"tensor_parallel_size", plan.options.tp_size},
      {"pipeline_parallel_size", plan.options.pp_size},
      {"ranks", ranks},
      {"activation_dtype", dtype_name(plan.activation)},
      {"kv_cache_dtype", dtype_name(plan.kv)},
      {"ring_dtype", dtype_name(plan.ring)},
      {"mtp", plan.with_mtp},
      {"draft_head", plan.draft_head ? "fp8" : "model"},
      {"schemes", schemes},
      {"stored_bytes", plan.inventory.stored_bytes},
      {"memory",
       {{"weights_bytes", memory.weights_bytes},
        {"workspace_bytes", memory.workspace_bytes},
        {"message_bytes", memory.message_bytes},
        {"driver_bytes", memory.driver_bytes},
        {"state_bytes", memory.state_bytes},
        {"ring_bytes", memory.ring_bytes},
        {"sampler_bytes", memory.sampler_bytes},
        {"snapshot_bytes", memory.snapshot_bytes},
        {"kv_bytes", memory.kv_bytes},
        {"total_bytes", memory.total_bytes()},
        {"budget_bytes", memory.budget_bytes},
        {"device_bytes", memory.device_bytes},
        {"slot_bytes", memory.slot_bytes},
        {"block_bytes", memory.block_bytes}}},
      {"limits",
       {{"max_model_len", plan.limits.max_model_len},
        {"max_num_seqs", plan.limits.num_slots},
        {"num_blocks", plan.limits.num_blocks},
        {"kv_tokens", int64_t{plan.limits.num_blocks} * 64},
        {"num_snapshots", plan.limits.num_snapshots},
        {"max_num_batched_tokens", plan.limits.max_rows}}},
      {"decode_bytes_per_token", plan.decode_bytes_per_token},
      {"read_bandwidth_bytes_per_second", plan.traits.read_bandwidth},
      {"expected_decode_tokens_per_second", plan.expected_decode_tokens_per_second},
      {"card_speed", modelled},
      {"kernels", kernels},
      {"refusals", plan.refusals()},
      {"unknown_tensors", plan.inventory.unknown},
      {"notes", plan.notes},
      {"fits", plan.fits},
      {"verdict", plan.verdict},
  };
}

}  // namespace quern::app
