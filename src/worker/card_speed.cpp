#include "worker/card_speed.h"

#include <map>

#include "backends/platforms.h"
#include "worker/decode_speed.h"

namespace quern::worker {
namespace {

constexpr double kLanes = 16, kEnginesOfCore = 8;

/// Of an op with several problems, the choice with the most launches, which is the one that mixes schemes.
int64_t launches_of(const ExecutionPlan& plan, std::string_view op, ops::RowKind kind) {
  int64_t most = 0;
  for (const OpChoice& choice : plan.choices)
    if (choice.op == op) most = std::max<int64_t>(most, kind == ops::RowKind::kDecode ? choice.launches.decode : choice.launches.prompt);
  return most;
}

std::string_view candidate_of(const ExecutionPlan& plan, std::string_view op) {
  for (const OpChoice& choice : plan.choices)
    if (choice.op == op) return choice.candidate;
  return {};
}

/// Of a prompt the last row alone has logits.
int64_t logit_rows(const StepShape& shape) { return shape.kind == ops::RowKind::kDecode ? shape.num_rows() : shape.num_sequences; }

/// Bytes that a token reads on a rank, by the op that reads them and their dtype.
std::map<std::pair<std::string_view, DType>, uint64_t> bytes_read(const ExecutionPlan& plan, const RankPart& part) {
  std::map<std::pair<std::string_view, DType>, uint64_t> bytes;
  for (const auto& [name, linear] : part.inventory.linears) {
    const std::string_view op = op_that_reads(name, plan.config.tie_word_embeddings);
    if (op.empty() || (op == "head" && !part.last_stage)) continue;
    bytes[{op, ops::stored_dtype(linear.scheme)}] += linear.packed_bytes();
  }
  return bytes;
}

void add_weights(const ExecutionPlan& plan, const RankPart& part, const StepShape& shape, RankWork& work) {
  for (const auto& [weights, num_bytes] : bytes_read(plan, part)) {
    const auto& [op, dtype] = weights;
    const int64_t rows = op == "head" ? logit_rows(shape) : shape.num_rows();
    const ops::RowKind kind = op == "head" ? ops::RowKind::kDecode : shape.kind;
    const auto bytes = static_cast<double>(num_bytes);
    const auto pass = backends::weight_pass(candidate_of(plan, op), dtype, kind, rows);
    work.weight_bytes += bytes * static_cast<double>(pass ? ceil_div(rows, int64_t{pass->read_rows}) : 1);
    if (pass) work.weight_slots += bytes * pass->slots_per_byte * static_cast<double>(ceil_div(rows, int64_t{pass->turn_rows}));
  }
}

void add_mixers(const ExecutionPlan& plan, const RankPart& part, const StepShape& shape, RankWork& work) {
  const model::ModelConfig& c = part.config;
  const auto gdn_layers = static_cast<double>(c.num_linear_layers()), attention_layers = static_cast<double>(c.num_attention_layers());
  const auto sequences = static_cast<double>(shape.num_sequences), rows = static_cast<double>(shape.num_rows()), rows_each = static_cast<double>(shape.rows_each);
  constexpr double kGrid = ops::kGrid;

  const auto d_k = static_cast<double>(c.linear_key_head_dim), d_v = static_cast<double>(c.linear_value_head_dim), v_heads = static_cast<double>(c.linear_num_value_heads);
  const double state_bytes = v_heads * d_k * d_v * 4;
  const double ring_bytes = kGrid / 2 * (static_cast<double>(c.linear_num_key_heads) * d_k + v_heads * d_v) * static_cast<double>(dtype_size(plan.ring));  // half full on average
  work.mixer_bytes += gdn_layers * sequences * (state_bytes + ring_bytes + rows_each / kGrid * state_bytes);                                              // every 64 rows it is written
  const auto chunk = shape.kind == ops::RowKind::kPrompt ? backends::gdn_chunk_pass(candidate_of(plan, "gdn_mix"), plan.ring) : std::nullopt;
  if (chunk) {
    const double chunks = gdn_layers * sequences * static_cast<double>(ceil_div(int64_t{shape.rows_each}, int64_t{chunk->rows}));
    work.gdn_slots += chunks * ((2 * static_cast<double>(c.linear_num_key_heads) + v_heads) * chunk->slots_per_head + v_heads * chunk->slots_per_value_head);
    work.gdn_walk_slots += chunks * v_heads * chunk->walk_slots_per_value_head;
  } else if (const auto pass = backends::gdn_row_pass(candidate_of(plan, "gdn_mix"), plan.ring, shape.kind, shape.rows_each)) {
    const double k_heads = static_cast<double>(c.linear_num_key_heads), channels = 2 * k_heads * d_k + v_heads * d_v;
    work.gdn_walk_slots += gdn_layers * v_heads * (sequences * pass->slots_per_run + rows * pass->slots_per_row);
    work.gdn_slots += gdn_layers * (rows * 2 * k_heads * pass->slots_per_row_of_head + sequences * channels * pass->slots_per_channel);
    work.launches += c.num_linear_layers() * pass->launches;
  }
  work.gdn_groups = shape.num_sequences * c.linear_num_value_heads;

  const double keys = std::max(static_cast<double>(shape.context) - (rows_each - 1) / 2, 1.0);  // of an average row
  const double key_bytes = 2 * static_cast<double>(c.num_key_value_heads * c.head_dim) * static_cast<double>(dtype_size(plan.kv));
  work.mixer_bytes += attention_layers * sequences * static_cast<double>(shape.context) * key_bytes;
  const auto attention = shape.kind == ops::RowKind::kDecode ? backends::attention_decode_pass(candidate_of(plan, "attention"), plan.kv, static_cast<int64_t>(keys)) : std::nullopt;
  if (attention) {
    work.attention_sub_groups = shape.num_rows() * c.num_key_value_heads * attention->sub_groups;
    work.attention_slots += attention_layers * static_cast<double>(work.attention_sub_groups) * attention->slots;
  } else {
    work.attention_products += attention_layers * rows * keys * 2 * static_cast<double>(c.num_attention_heads * c.head_dim);
  }
}

void add_launches(const ExecutionPlan& plan, const RankPart& part, const StepShape& shape, RankWork& work) {
  // Counted for up to 8 decode rows; more are prepared in launches of their own, as prompt rows are.
  constexpr int64_t kFewRows = 8;
  const auto of = [&](std::string_view op) {
    const int64_t few = launches_of(plan, op, shape.kind);
    return shape.num_rows() > kFewRows ? std::max(few, launches_of(plan, op, ops::RowKind::kPrompt)) : few;
  };
  const int64_t attention = part.config.num_attention_layers(), gdn = part.config.num_linear_layers();
  work.launches += attention * (of("attn_in") + of("attention") + of("out_residual")) + gdn * (of("gdn_in") + launches_of(plan, "gdn_mix", shape.kind) + of("out_residual")) +
                   (attention + gdn) * (of("mlp_in") + of("down_residual")) + of("state_copy");
  if (part.first_stage) work.launches += of("embed");
  if (part.last_stage) work.launches += of("head") + of("sample") + (part.tp_size > 1 ? 1 : 0);  // candidates, and drawing from those of all
}

void add_exchanges(const ExecutionPlan& plan, const RankPart& part, const StepShape& shape, RankWork& work) {
  const double row_bytes = static_cast<double>(plan.config.hidden_size) * static_cast<double>(dtype_size(plan.activation)), rows = static_cast<double>(shape.num_rows());
  if (!part.last_stage) work.hand_over_bytes = rows * row_bytes;
  if (part.tp_size == 1) return;
  work.all_reduces = 2 * part.config.num_layers() + (part.first_stage ? 1 : 0);  // after mixer and MLP; the embedding's rows, shared out by token
  work.all_reduce_bytes = rows * row_bytes * (part.tp_size - 1);
  if (part.last_stage) work.gather_bytes = static_cast<double>(logit_rows(shape) * ops::candidate_words(ops::kMaxCandidates)) * sizeof(int32_t) * (part.tp_size - 1);
}

}  // namespace

RankWork rank_work(const ExecutionPlan& plan, const RankPart& part, const StepShape& shape) {
  RankWork work;
  add_weights(plan, part, shape, work);
  add_mixers(plan, part, shape, work);
  add_launches(plan, part, shape, work);
  add_exchanges(plan, part, shape, work);
  return work;
}

RankWork draft_work(const ExecutionPlan& plan, const RankPart& part) {
  RankWork work;
  for (const auto& [name, linear] : part.inventory.linears) {
    const bool head = op_that_reads(name, plan.config.tie_word_embeddings) == "head";
    if (!head && !name.starts_with("mtp.")) continue;
    const auto bytes = static_cast<double>(linear.packed_bytes());
    const auto pass = backends::weight_pass(candidate_of(plan, head ? "head" : "mtp_in"), ops::stored_dtype(linear.scheme), ops::RowKind::kDecode, 1);
    work.weight_bytes += bytes;
    if (pass) work.weight_slots += bytes * pass->slots_per_byte;
  }
  for (const std::string_view op : {"embed", "mtp_in", "attn_in", "attention", "out_residual", "mlp_in", "down_residual", "head", "sample", "draft_rows"})
    work.launches += launches_of(plan, op, ops::RowKind::kDecode);
  RankWork exchanged;
  add_exchanges(plan, part, {}, exchanged);
  if (part.tp_size > 1) {
    work.all_reduces = 3;  // embedding, mixer, MLP
    work.all_reduce_bytes = exchanged.all_reduce_bytes;
    work.gather_bytes = static_cast<double>(ops::kKeyWords) * sizeof(int32_t) * (part.tp_size - 1);
    ++work.launches;  // the best of all ranks' drafts
  }
  return work;
}

StepTerms step_terms(const RankWork& work, const CardRates& card, ops::RowKind kind, const SpeedAssumptions& assumed) {
  StepTerms terms;
  const double bandwidth = assumed.read_share * card.read_bandwidth;
  const auto exchange = [&](double bytes) { return std::max(assumed.all_reduce_seconds, bytes / assumed.exchange_bytes_per_second); };
  terms.weight_read = work.weight_bytes / bandwidth;
  terms.weight_issue = work.weight_slots / card.issue_rate / (kind == ops::RowKind::kPrompt ? assumed.prompt_share : 1);
  terms.mixer_read = work.mixer_bytes / bandwidth;
  const double products = kLanes * card.issue_rate * assumed.mixer_share;
  const double busy = std::min(static_cast<double>(work.gdn_groups) / std::max(card.num_cores, 1), 1.0);
  const double busy_in_attention = std::min(static_cast<double>(work.attention_sub_groups) / (kEnginesOfCore * std::max(card.num_cores, 1)), 1.0);
  terms.mixer_issue = (work.attention_products + kLanes * work.gdn_slots) / products;
  if (work.gdn_walk_slots > 0) terms.mixer_issue += kLanes * work.gdn_walk_slots / (products * busy);
  if (work.attention_slots > 0) terms.mixer_issue += kLanes * work.attention_slots / (products * busy_in_attention);
  terms.launches = static_cast<double>(work.launches) * assumed.launch_seconds;
  terms.all_reduces = static_cast<double>(work.all_reduces) * exchange(work.all_reduce_bytes);
  terms.gather = work.gather_bytes > 0 ? exchange(work.gather_bytes) : 0;
  terms.hand_over = work.hand_over_bytes > 0 ? exchange(work.hand_over_bytes) : 0;
  return terms;
}

namespace {

CardRates rates_of(const ops::DeviceTraits& traits) { return {traits.read_bandwidth, backends::issue_rate(traits), traits.num_cores}; }

using Stages = std::vector<std::vector<RankPart>>;
Stages stages_of(const ExecutionPlan& plan) {
  Stages stages(static_cast<size_t>(plan.options.pp_size));
  for (const RankPlan& rank : plan.ranks)
    stages[static_cast<size_t>(rank.shard.pp_rank)].push_back({rank.config, rank.inventory, rank.traits, rank.shard.tp_size, rank.shard.first_stage(), rank.shard.last_stage()});
  return stages;
}

/// Of the slowest rank of a stage.
template <class Work>
CardSpeed::Stage slowest(const std::vector<RankPart>& ranks, ops::RowKind kind, const SpeedAssumptions& assumed, const Work& work_of) {
  CardSpeed::Stage found;
  for (const RankPart& part : ranks) {
    CardSpeed::Stage stage{work_of(part), rates_of(part.traits), {}};
    stage.terms = step_terms(stage.work, stage.card, kind, assumed);
    if (stage.terms.seconds() >= found.terms.seconds()) found = stage;
  }
  return found;
}

/// Whether all that a token costs on a rank is known: a card's engines, and what the chosen kernels compile to.
bool is_known(const ExecutionPlan& plan, const RankPart& part) {
  if (rates_of(part.traits).issue_rate <= 0 || part.traits.read_bandwidth <= 0) return false;
  for (const std::string_view mixer : {"attention", "gdn_mix"})
    if (candidate_of(plan, mixer).ends_with(".plain")) return false;
  for (const auto& [weights, bytes] : bytes_read(plan, part))
    if (!backends::weight_pass(candidate_of(plan, weights.first), weights.second, ops::RowKind::kDecode, 1)) return false;
  return backends::gdn_row_pass(candidate_of(plan, "gdn_mix"), plan.ring, ops::RowKind::kDecode, 1).has_value();
}

}  // namespace

std::optional<CardSpeed> card_speed(const ExecutionPlan& plan, const SpeedAssumptions& assumed) {
  const Stages stages = stages_of(plan);
  if (!plan.refusals().empty()) return std::nullopt;
  for (const auto& ranks : stages)
    for (const RankPart& part : ranks)
      if (!is_known(plan, part)) return std::nullopt;
  CardSpeed speed;
  speed.assumed = assumed;
  const auto stage_of = [&](size_t stage, const StepShape& shape) { return slowest(stages[stage], shape.kind, assumed, [&](const RankPart& part) { return rank_work(plan, part, shape); }); };
  const auto seconds = [&](const StepShape& shape) {  // through all stages
    double sum = 0;
    for (size_t stage = 0; stage < stages.size(); ++stage) sum += stage_of(stage, shape).terms.seconds();
    return sum;
  };
  for (size_t stage = 0; stage < stages.size(); ++stage) speed.stages.push_back(stage_of(stage, {}));
  speed.decode_seconds = seconds({});
  for (int drafts = 1; drafts <= 4; ++drafts) speed.verify_seconds[drafts - 1] = seconds({.rows_each = 1 + drafts});
  constexpr int32_t kSequences = 16, kPrompt = 512;
  const auto num_groups = static_cast<int32_t>(stages.size());
  double longest = 0;
  for (size_t stage = 0; stage < stages.size(); ++stage) longest = std::max(longest, stage_of(stage, {.num_sequences = (kSequences + num_groups - 1) / num_groups}).terms.seconds());
  speed.decode_seconds_16 = num_groups * longest;
  speed.prompt_seconds = seconds({.kind = ops::RowKind::kPrompt, .rows_each = kPrompt, .context = kPrompt});
  constexpr int32_t kLongPrompt = 8192;
  for (int32_t done = 0; done < kLongPrompt;) {
    const int32_t rows = std::min(std::max(plan.limits.max_rows, 1), kLongPrompt - done);
    done += rows;
    speed.long_prompt_seconds += seconds({.kind = ops::RowKind::kPrompt, .rows_each = rows, .context = done});
  }
  if (plan.with_mtp) speed.draft_seconds = slowest(stages.back(), ops::RowKind::kDecode, assumed, [&](const RankPart& part) { return draft_work(plan, part); }).terms.seconds();
  return speed;
}

}  // namespace quern::worker
