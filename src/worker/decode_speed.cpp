#include "worker/decode_speed.h"

#include <algorithm>

#include "worker/card_speed.h"

namespace quern::worker {
namespace {

/// Bytes of weights that one core gets through in a second where memory does not hold it up. Fitted to whole decode steps (docs/performance.md): plain and AVX2
/// on Zen 3, AVX-512 on a Xeon, its bf16 products on Zen 5; AMX as AVX-512.
double core_rate(std::string_view candidate) {
  if (candidate == "cpu.avx512_bf16") return 65e9;
  if (candidate == "cpu.avx512" || candidate.starts_with("cpu.amx")) return 28e9;
  return candidate == "cpu.avx2" ? 13e9 : 1.5e9;
}

/// Share of the read bandwidth (CPU: measured on the machine; cards: the datasheet's) at which kernels of this name read weights for one row.
double read_share(const ExecutionPlan& plan, std::string_view candidate) {
  if (plan.traits.platform == ops::Platform::kCpu) {  // cores compute while they wait for memory only in part: the times of both add up
    const double compute = core_rate(candidate) * std::max(plan.options.num_threads > 0 ? plan.options.num_threads : plan.traits.num_cores, 1);
    return compute / (compute + plan.traits.read_bandwidth);
  }
  // H200, 2026-12-01: 27.1 GB of linear layers in 6.30 ms, at 4.8 TB/s; in a whole step of cuda.plain, 28.7 ms.
  if (candidate.starts_with("cuda.sm90")) return 0.89;
  if (candidate == "cuda.mma" || candidate == "cuda.mma.e4m3") return 0.55;  // H200: 2.2 to 2.9 TB/s, FP8 weights; other cards have not been measured
  if (candidate == "cuda.plain") return 0.20;
  return candidate.ends_with(".plain") ? 0.05 : 0.85;  // OpenCL: a guess and a target, no measurements
}
/// What a layer with this mixer takes beside its weights on a card: the mixer, waiting between launches, its part of embedding and sampling.
double mixer_seconds(std::string_view candidate) {
  if (candidate.starts_with("cuda.mma") || candidate == "cuda.sm90") return 6.7e-6;  // what is left of 6.72 ms, an H200's step at 1k context
  if (candidate == "cuda.plain") return 280e-6;          // 17.9 ms of a step of 38.3, at 1k context
  return 0;
}

/// Of an op that has several problems, the slowest choice.
std::string_view candidate_of(const ExecutionPlan& plan, std::string_view op) {
  std::string_view slowest;
  for (const OpChoice& choice : plan.choices)
    if (choice.op == op && (slowest.empty() || read_share(plan, choice.candidate) < read_share(plan, slowest))) slowest = choice.candidate;
  return slowest;
}

}  // namespace

std::string_view op_that_reads(std::string_view name, bool tied) {
  if (name.starts_with("mtp.")) return {};
  if (name == "embed_tokens.weight") return tied ? "head" : "";
  if (name == "lm_head.weight") return "head";
  constexpr std::pair<std::string_view, std::string_view> kParts[] = {{".in_proj_", "gdn_in"},      {".out_proj.", "out_residual"},  {".o_proj.", "out_residual"}, {".gate_proj.", "mlp_in"},
                                                                      {".up_proj.", "mlp_in"},      {".down_proj.", "down_residual"}, {".q_proj.", "attn_in"},      {".k_proj.", "attn_in"},
                                                                      {".v_proj.", "attn_in"}};
  for (const auto& [part, op] : kParts)
    if (name.find(part) != std::string_view::npos) return op;
  return {};
}

namespace {

/// A decode row's sum between GPUs that reach each other's memory: assumed, from round trips of 1.4 us through a peer's memory on two H200 and the launches around them. Ranks on a CPU exchange in memory that they share.
constexpr double kCudaAllReduce = 5e-6;
double exchange_seconds(const ExecutionPlan& plan) {
  return plan.options.tp_size > 1 && plan.traits.platform == ops::Platform::kCuda ? 2 * static_cast<double>(plan.config.num_layers()) * kCudaAllReduce : 0;
}

/// What one token takes on a rank.
double seconds_on(const RankPlan& rank, const ExecutionPlan& plan) {
  const double bandwidth = rank.traits.read_bandwidth;
  double seconds = 0, weight_bytes = 0;
  for (const auto& [name, linear] : rank.inventory.linears) {
    const std::string_view op = op_that_reads(name, rank.config.tie_word_embeddings && rank.shard.last_stage());
    if (op.empty()) continue;
    const auto bytes = static_cast<double>(linear.packed_bytes());
    weight_bytes += bytes;
    seconds += bytes / (bandwidth * read_share(plan, candidate_of(plan, op)));
  }
  const std::string_view gdn = candidate_of(plan, "gdn_mix"), attention = candidate_of(plan, "attention");
  const auto num_attention = static_cast<double>(rank.config.num_attention_layers());
  const double in_mixers = num_attention * mixer_seconds(attention) + (static_cast<double>(rank.config.num_layers()) - num_attention) * mixer_seconds(gdn);
  // Where mixers have no time of their own, their states and keys are read like weights; through OpenCL at most as their own kernels read.
  double share = read_share(plan, candidate_of(plan, "mlp_in"));
  if (plan.traits.platform == ops::Platform::kOpenCl) share = std::min({share, read_share(plan, gdn), read_share(plan, attention)});
  return seconds + (in_mixers > 0 ? in_mixers : std::max(rank.decode_bytes_per_token - weight_bytes, 0.0) / (bandwidth * share));
}

}  // namespace

double expected_decode_speed(const ExecutionPlan& plan) {
  if (plan.traits.read_bandwidth <= 0) return 0;
  if (const auto modelled = card_speed(plan)) return modelled->tokens_per_second();
  double seconds = exchange_seconds(plan);  // a token passes one stage after the other; in each the slowest rank counts
  const auto tp_size = static_cast<size_t>(plan.options.tp_size);
  for (size_t first = 0; first < plan.ranks.size(); first += tp_size) {
    double slowest = 0;
    for (size_t r = first; r < first + tp_size; ++r) {
      if (plan.ranks[r].traits.read_bandwidth <= 0) return 0;
      slowest = std::max(slowest, seconds_on(plan.ranks[r], plan));
    }
    seconds += slowest;
  }
  return 1 / seconds;
}

}  // namespace quern::worker
