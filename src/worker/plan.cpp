#include "worker/plan.h"

#include <algorithm>
#include <limits>
#include <set>

#include "backends/platforms.h"
#include "base/log.h"
#include "model/tensors.h"
#include "worker/decode_speed.h"
#include "worker/problems.h"
#include "worker/rank_devices.h"
#include "worker/rank_memory.h"
#include "worker/sizes.h"

namespace quern::worker {
namespace {

constexpr int32_t kDefaultMaxNumSeqs = 64;
/// Sequences keep their state whether they run or not; by default it takes at most this share of what the weights leave.
constexpr double kDefaultStateShare = 0.4;
/// Host memory is shared with everything else: without an explicit size the CPU platform keeps its KV cache below this.
constexpr uint64_t kDefaultCpuKvBytes = 4ull << 30;
/// Rows of logits, at a MiB or so each. What a step has beyond them is computed in further groups, and lm_head is read once more for each: all sequences shall decode in one, and
/// verify their drafts in one where that is not many rows.
constexpr int32_t kLeastLogitRows = 64, kMostVerifyLogitRows = 256, kMostLogitRows = 1024;
/// Snapshots for the prefix cache: some per sequence, from at most this share of what the weights leave (on a CPU also below an absolute size).
constexpr int32_t kDefaultSnapshotsPerSeq = 4, kDefaultLeastSnapshots = 32;
constexpr double kDefaultSnapshotShare = 0.1;
constexpr uint64_t kDefaultCpuSnapshotBytes = 1ull << 30;

std::string gib(uint64_t bytes) { return fmt::format("{:.2f} GiB", static_cast<double>(bytes) / (1ull << 30)); }

Result<Numerics> choose_numerics(const WorkerOptions& options, const weights::Inventory& inventory) {
  Numerics n;
  n.activation = options.dtype == ModelDType::kFloat32 ? DType::kF32 : DType::kBF16;
  n.k_max = options.k_max;
  switch (options.kv_cache_dtype) {
    case KvCacheDType::kAuto: n.kv = inventory.fp8_kv_declared ? DType::kE4M3 : n.activation; break;
    case KvCacheDType::kFp8: n.kv = DType::kE4M3; break;
    case KvCacheDType::kBFloat16:
      if (n.activation == DType::kF32)
        return invalid_argument("--kv-cache-dtype bfloat16 with --dtype float32: the cache holds what the model computes; use auto or fp8");
      n.kv = DType::kBF16;
      break;
  }
  switch (options.ring_dtype) {
    case RingDType::kAuto: n.ring = n.activation; break;
    case RingDType::kFloat32: n.ring = DType::kF32; break;
    case RingDType::kBFloat16:
      if (n.activation == DType::kF32)
        return invalid_argument("--gdn-ring-dtype bfloat16 with --dtype float32: the ring holds what the model computes; use auto or float32");
      n.ring = DType::kBF16;
      break;
  }
  return n;
}

/// Asks every candidate once per op and problem.
class Chooser {
 public:
  Chooser(const ops::KernelTable& table, const ops::SelectionRules& rules) : table_(table), rules_(rules) {}

  /// Whose problems come next.
  void set_rank(const RankPlan& rank) {
    traits_ = rank.traits;
    counts_ = rank.shard.tp_rank == 0;
  }

  template <class Op>
  void operator()(const typename Op::Problem& problem, const std::string& wanted_by) {
    const std::string text = describe(problem);
    for (OpChoice& known : choices_) {
      if (known.op == Op::kName && known.problem == text && known.device_name == traits_.name) {
        if (counts_) ++known.num_wanting;
        return;
      }
    }
    const ops::Choice<Op> choice = ops::select(table_.list<Op>(), problem, traits_, rules_);
    OpChoice entry{std::string(Op::kName), text, traits_.name, wanted_by, 1, {}, {}, {}};
    if (choice.chosen != nullptr) {
      entry.candidate = choice.chosen->name;
      entry.launches = choice.chosen->launches;
    }
    for (const auto& answer : choice.answers)
      entry.answers.push_back({std::string(answer.candidate), answer.verdict.reason, answer.verdict.accepted});
    if (choice.answers.empty()) entry.answers.push_back({fmt::format("{}.plain", ops::platform_name(traits_.platform)), std::string(choice.why_absent), false});
    choices_.push_back(std::move(entry));
  }

  std::vector<OpChoice> take() { return std::move(choices_); }

 private:
  const ops::KernelTable& table_;
  const ops::SelectionRules& rules_;
  ops::DeviceTraits traits_;
  bool counts_ = true;
  std::vector<OpChoice> choices_;
};

/// Names given with --kernel that the platform does not have.
struct UnknownKernels {
  const ops::KernelTable& table;
  const std::map<std::string, std::string, std::less<>>& wanted;
  std::set<std::string, std::less<>> ops_seen;
  std::vector<std::string> faults;

  template <class Op>
  void operator()(const typename Op::Problem&, const std::string&) {
    if (!ops_seen.insert(std::string(Op::kName)).second) return;
    const auto want = wanted.find(Op::kName);
    if (want == wanted.end()) return;
    std::vector<std::string_view> names;
    for (const auto& candidate : table.list<Op>().candidates()) names.push_back(candidate.name);
    if (std::find(names.begin(), names.end(), want->second) == names.end())
      faults.push_back(fmt::format("--kernel {}={}: this platform has {}", want->first, want->second, fmt::join(names, ", ")));
  }
};

Result<void> check_kernel_names(const ops::KernelTable& table, const WorkerOptions& options, const ExecutionPlan& plan, const Numerics& numerics) {
  UnknownKernels check{table, options.kernels, {}, {}};
  for (const RankPlan& rank : plan.ranks) Problems(rank.config, rank.inventory, rank.shard, numerics).for_each(plan.with_mtp, check);
  for (const auto& [op, candidate] : options.kernels)
    if (!check.ops_seen.contains(op)) check.faults.push_back(fmt::format("--kernel {}={}: this model has no op {}; it has {}", op, candidate, op, fmt::join(check.ops_seen, ", ")));
  if (!check.faults.empty()) return invalid_argument("{}", fmt::join(check.faults, "; "));
  return {};
}

std::vector<SchemeTotal> count_schemes(const weights::Inventory& inventory) {
  std::map<std::string, SchemeTotal> totals;
  const auto add = [&](const std::string& scheme, uint64_t bytes) {
    SchemeTotal& total = totals[scheme];
    total.scheme = scheme;
    ++total.num_tensors;
    total.bytes += bytes;
  };
  for (const auto& [name, linear] : inventory.linears) add(std::string(ops::weight_scheme_name(linear.scheme)), linear.packed_bytes());
  for (const auto& [name, vector] : inventory.vectors) add("norms and other vectors", static_cast<uint64_t>(vector.second.num_elements()) * sizeof(float));
  std::vector<SchemeTotal> list;
  for (auto& [scheme, total] : totals) list.push_back(total);
  return list;
}

/// Bytes that one decoded token reads of a rank's memory at a context of 1024 tokens: the embedding table is looked up, a tied one is read by the head.
double decode_bytes(const RankPlan& rank, const Sizes& sizes) {
  double bytes = 0;
  for (const auto& [name, linear] : rank.inventory.linears) {
    if (name.starts_with("mtp.")) continue;
    if (name == "embed_tokens.weight" && !(rank.config.tie_word_embeddings && rank.shard.last_stage())) continue;
    bytes += static_cast<double>(linear.packed_bytes());
  }
  return bytes + sizes.decode_bytes(1024);
}

/// Whether decode rows read half of each element of S alone.
bool reads_upper_halves(const ExecutionPlan& plan) {
  return std::ranges::any_of(plan.choices, [&](const OpChoice& choice) {
    return choice.op == "gdn_mix" && backends::gdn_state_layout(choice.candidate, plan.ring) == ops::GdnStateLayout::kHalves;
  });
}

/// The layers of each stage, from the largest share of each layer.
std::vector<Range> choose_stages(const ExecutionPlan& plan, const std::vector<ops::DeviceTraits>& devices, const Numerics& numerics) {
  const WorkerOptions& options = plan.options;
  const int64_t num_layers = plan.config.num_layers();
  if (options.pp_size == 1) return {{0, num_layers}};
  StageCosts costs;
  for (int64_t layer = 0; layer < num_layers; ++layer) {
    const Shard shard = make_shard(plan.config, 0, options.tp_size, 0, options.pp_size, {layer, layer + 1});
    const model::ModelConfig part = part_of(plan.config, shard);
    double bytes = 0;
    for (const auto& [name, linear] : plan.inventory.linears) {
      if (!name.starts_with(model::layer_prefix(layer))) continue;
      bytes += static_cast<double>(linear.packed_bytes()) / options.tp_size;
    }
    const Sizes sizes(part, shard, numerics, false);
    bytes += sizes.decode_bytes(1024);
    costs.layer_bytes.push_back(bytes);
  }
  for (const auto& [name, linear] : plan.inventory.linears) {
    const double bytes = static_cast<double>(linear.packed_bytes()) / options.tp_size;
    if (name == "embed_tokens.weight") {
      costs.first_resident_bytes += bytes;
      if (plan.config.tie_word_embeddings) costs.last_bytes += bytes;
      else if (plan.with_mtp) costs.last_resident_bytes += bytes;
    } else if (name == "lm_head.weight" || (name.starts_with("mtp.") && plan.with_mtp)) {
      costs.last_bytes += bytes;
    }
  }
  for (int32_t stage = 0; stage < options.pp_size; ++stage) {
    const ops::DeviceTraits& traits = devices[static_cast<size_t>(stage * options.tp_size)];
    costs.bandwidth.push_back(std::max(traits.read_bandwidth, 1.0));
    costs.memory_bytes.push_back(static_cast<double>(traits.memory_bytes) * options.memory_utilization);
  }
  return split_layers(costs);
}

/// The cheapest way out of a plan in which a rank's weights and one sequence are `smallest` bytes.
std::string what_would_fit(const ExecutionPlan& plan, const RankPlan& rank) {
  const uint64_t smallest = rank.memory.smallest_bytes();
  const auto share = [&](uint64_t bytes) { return static_cast<double>(bytes) / static_cast<double>(rank.memory.device_bytes); };
  if (share(smallest) < 0.98) return fmt::format("--gpu-memory-utilization {:.2f} would fit", share(smallest) + 0.01);
  uint64_t wide = 0;  // what runtime fp8 would save
  for (const auto& [name, linear] : rank.inventory.linears)
    if (!ops::is_fp8(linear.scheme) && name.find("_proj.") != std::string::npos) wide += linear.packed_bytes() / 2;
  if (wide > 0 && !plan.options.load.quantize_fp8 && smallest - wide <= rank.memory.budget_bytes)
    return fmt::format("--quantization fp8 would save about {} and fit", gib(wide));
  return fmt::format("a device with {} would fit", gib(static_cast<uint64_t>(static_cast<double>(smallest) / plan.options.memory_utilization)));
}

/// Divides every rank's budget: weights and workspace first, then snapshots and sequences, then KV blocks. Of each there are as many as the rank with the least room has place for.
class MemoryLayout {
 public:
  MemoryLayout(ExecutionPlan& plan, const std::vector<Sizes>& sizes, const std::vector<RankCounter>& counters)
      : plan_(plan), options_(plan.options), limits_(plan.limits), sizes_(sizes), counters_(counters), left_(sizes.size()) {}

  void lay_out() {
    set_limits();
    set_fixed();
    if (fullest().memory.margin_bytes() < 0) {  // places for logits are the first to be given up
      plan_.max_logit_rows = logit_rows_of(1);
      set_fixed();
    }
    if (!check_smallest()) return;
    place_snapshots();
    place_sequences();
    if (!place_blocks()) return;
    lay_out_host_memory();
    plan_.fits = true;
    const MemoryPlan& memory = fullest().memory;
    plan_.verdict = fmt::format("fits: {} of {} used{}; {} sequences, {} KV tokens", gib(memory.total_bytes()), gib(memory.device_bytes), of_rank(fullest()), limits_.num_slots,
                                static_cast<int64_t>(limits_.num_blocks) * ops::kGrid);
  }

  /// The rank with the least to spare.
  [[nodiscard]] const RankPlan& fullest() const {
    return *std::min_element(plan_.ranks.begin(), plan_.ranks.end(), [](const RankPlan& a, const RankPlan& b) {
      const auto spare = [](const MemoryPlan& m) { return m.margin_bytes() < 0 ? m.margin_bytes() : static_cast<int64_t>(m.budget_bytes) - static_cast<int64_t>(m.total_bytes()); };
      return spare(a.memory) < spare(b.memory);
    });
  }

 private:
  [[nodiscard]] bool on_cpu() const { return plan_.traits.platform == ops::Platform::kCpu; }
  [[nodiscard]] std::string of_rank(const RankPlan& rank) const { return plan_.ranks.size() == 1 ? "" : fmt::format(" on rank {} ({})", rank.shard.rank(), rank.device); }
  [[nodiscard]] int64_t max_blocks() const { return ceil_div(limits_.max_model_len, ops::kGrid); }

  /// The least that `count(memory, sizes, left)` says of a rank.
  template <class Count>
  [[nodiscard]] int64_t least(const Count& count) const {
    int64_t result = std::numeric_limits<int64_t>::max();
    for (size_t r = 0; r < sizes_.size(); ++r) result = std::min<int64_t>(result, count(plan_.ranks[r].memory, sizes_[r], left_[r]));
    return result;
  }
  /// How many pieces of `each` bytes a share of `bytes` holds; a rank that keeps nothing of them holds any number.
  [[nodiscard]] static int64_t places(double bytes, uint64_t each) {
    constexpr int64_t kMany = int64_t{1} << 40;
    return each == 0 ? kMany : static_cast<int64_t>(std::min(bytes / static_cast<double>(each), static_cast<double>(kMany)));
  }
  [[nodiscard]] uint64_t sum(uint64_t Sizes::* bytes) const {
    uint64_t total = 0;
    for (const Sizes& sizes : sizes_) total += sizes.*bytes;
    return total;
  }

  void set_limits() {
    limits_.vocab_size = static_cast<int32_t>(plan_.config.vocab_size);
    limits_.k_max = options_.k_max;
    limits_.has_mtp = plan_.with_mtp;
    limits_.num_stages = options_.pp_size;
    limits_.block_bytes = sum(&Sizes::block_bytes);
    limits_.snapshot_bytes = sum(&Sizes::snapshot_bytes);
    limits_.max_model_len = options_.max_model_len != 0 ? options_.max_model_len : static_cast<int32_t>(plan_.config.max_position_embeddings);
    plan_.max_logit_rows = logit_rows_of(wanted_slots());
    const int32_t smallest_step = static_cast<int32_t>(ops::kGrid) + wanted_slots() * verify_rows();
    limits_.max_rows = std::max(options_.max_num_batched_tokens != 0 ? options_.max_num_batched_tokens : on_cpu() ? 512 : 2048, smallest_step);
    if (options_.max_num_batched_tokens != 0 && limits_.max_rows != options_.max_num_batched_tokens)
      plan_.notes.push_back(fmt::format("max_num_batched_tokens raised from {} to {}: one prompt chunk of 64 and a verify of every sequence must fit a step",
                                        options_.max_num_batched_tokens, limits_.max_rows));
  }
  [[nodiscard]] int32_t wanted_slots() const { return options_.max_num_seqs != 0 ? options_.max_num_seqs : kDefaultMaxNumSeqs; }

  [[nodiscard]] int32_t verify_rows() const { return options_.k_max + 1; }  // of one sequence, whose rows stay together
  [[nodiscard]] int32_t logit_rows_of(int32_t num_sequences) const {
    const int32_t wanted = std::clamp(num_sequences, std::min(num_sequences * verify_rows(), kMostVerifyLogitRows), kMostLogitRows);
    return std::max(options_.max_logit_rows != 0 ? options_.max_logit_rows : std::max(wanted, kLeastLogitRows), verify_rows());
  }

  void set_fixed() {
    // Messages from every other rank of the stage and of the pipeline, and to them, with the marks of their pieces.
    constexpr uint64_t kMessagesKept = 5;
    const auto num_others = static_cast<uint64_t>(options_.tp_size - 1 + options_.pp_size - 1);
    const uint64_t message_bytes = num_others * kMessagesKept * plan_.collective_options().max_message_bytes;
    limits_.num_slots = wanted_slots();
    limits_.num_blocks = 1;
    for (size_t r = 0; r < sizes_.size(); ++r) {
      RankPlan& rank = plan_.ranks[r];
      MemoryPlan& memory = rank.memory;
      memory.device_bytes = rank.traits.memory_bytes;
      memory.budget_bytes = static_cast<uint64_t>(static_cast<double>(rank.traits.memory_bytes) * options_.memory_utilization);
      memory.driver_bytes = rank.traits.overhead_bytes;
      memory.message_bytes = message_bytes;
      memory.weights_bytes = counters_[r].weights_bytes();
      memory.slot_bytes = sizes_[r].slot_bytes();
      memory.block_bytes = sizes_[r].block_bytes;
      memory.workspace_bytes = counters_[r].other_bytes(plan_, rank) - static_cast<uint64_t>(limits_.num_slots) * memory.slot_bytes - memory.block_bytes;
    }
  }

  bool check_smallest() {
    const RankPlan& rank = fullest();
    const MemoryPlan& memory = rank.memory;
    if (memory.margin_bytes() < 0) {
      plan_.verdict = fmt::format("does not fit{}: weights {} + workspace {} + one sequence {} = {}, but {} of {}'s {} may be used (--gpu-memory-utilization {}); {}", of_rank(rank),
                                  gib(memory.weights_bytes), gib(memory.workspace_bytes + memory.message_bytes + memory.driver_bytes), gib(memory.slot_bytes + memory.block_bytes), gib(memory.smallest_bytes()),
                                  gib(memory.budget_bytes), rank.traits.name, gib(memory.device_bytes), options_.memory_utilization, what_would_fit(plan_, rank));
      return false;
    }
    for (size_t r = 0; r < sizes_.size(); ++r) left_[r] = plan_.ranks[r].memory.budget_bytes - plan_.ranks[r].memory.allocated_before();
    return true;
  }

  /// As many snapshots as asked, or a share of what is left.
  void place_snapshots() {
    const auto affordable = [&](double share) {
      return least([&](const MemoryPlan& m, const Sizes& sizes, uint64_t left) {
        return places(static_cast<double>(left - m.slot_bytes - m.block_bytes) * share, sizes.snapshot_bytes);
      });
    };
    const int32_t wanted = options_.num_snapshots;
    if (wanted < 0) {
      int64_t most = std::min<int64_t>(affordable(kDefaultSnapshotShare), std::max(int64_t{kDefaultSnapshotsPerSeq} * wanted_slots(), int64_t{kDefaultLeastSnapshots}));
      if (on_cpu()) most = std::min(most, places(static_cast<double>(kDefaultCpuSnapshotBytes), limits_.snapshot_bytes));
      limits_.num_snapshots = static_cast<int32_t>(most);
    } else {
      const int64_t most = affordable(0.5);
      limits_.num_snapshots = static_cast<int32_t>(std::min<int64_t>(wanted, most));
      if (wanted > most)
        plan_.notes.push_back(fmt::format("snapshots lowered from {} to {}: each takes {}, and half of what weights and workspace leave is for them", wanted, most,
                                          gib(limits_.snapshot_bytes)));
    }
    for (size_t r = 0; r < sizes_.size(); ++r) {
      plan_.ranks[r].memory.snapshot_bytes = static_cast<uint64_t>(limits_.num_snapshots) * sizes_[r].snapshot_bytes;
      left_[r] -= plan_.ranks[r].memory.snapshot_bytes;
    }
  }

  void place_sequences() {
    const double state_share = options_.max_num_seqs != 0 ? 0.9 : kDefaultStateShare;
    const auto affordable = [&] {
      return std::clamp<int64_t>(least([&](const MemoryPlan& m, const Sizes&, uint64_t left) { return places(static_cast<double>(left - m.block_bytes) * state_share, m.slot_bytes); }), 1, wanted_slots());
    };
    limits_.num_slots = static_cast<int32_t>(affordable());
    give_back_logits();
    while (limits_.num_slots < affordable() && logit_rows_of(limits_.num_slots + 1) <= plan_.max_logit_rows) ++limits_.num_slots;
    if (limits_.num_slots < wanted_slots())
      plan_.notes.push_back(
          fmt::format("max_num_seqs lowered from {} to {}: each sequence keeps {} of recurrent state", wanted_slots(), limits_.num_slots, gib(fullest().memory.slot_bytes)));
    const auto slots = static_cast<uint64_t>(limits_.num_slots);
    for (size_t r = 0; r < sizes_.size(); ++r) {
      MemoryPlan& memory = plan_.ranks[r].memory;
      memory.state_bytes = slots * sizes_[r].state_slot_bytes;
      memory.ring_bytes = slots * sizes_[r].ring_slot_bytes;
      memory.sampler_bytes = slots * sizes_[r].sampler_slot_bytes;
      left_[r] -= slots * memory.slot_bytes;
    }
  }

  /// The places for logits of sequences that were wanted and have no place themselves.
  void give_back_logits() {
    const int32_t rows = logit_rows_of(limits_.num_slots);
    if (rows >= plan_.max_logit_rows) return;
    std::vector<uint64_t> before;
    for (size_t r = 0; r < sizes_.size(); ++r) before.push_back(counters_[r].other_bytes(plan_, plan_.ranks[r]));
    plan_.max_logit_rows = rows;
    for (size_t r = 0; r < sizes_.size(); ++r) {
      const uint64_t given_back = before[r] - counters_[r].other_bytes(plan_, plan_.ranks[r]);
      plan_.ranks[r].memory.workspace_bytes -= given_back;
      left_[r] += given_back;
    }
  }

  /// KV blocks: never more than all sequences and the prefixes of all snapshots could fill.
  bool place_blocks() {
    const auto slots = static_cast<uint64_t>(limits_.num_slots);
    std::vector<uint64_t> budgets = left_;
    size_t tightest = 0;
    uint64_t blocks = (slots + static_cast<uint64_t>(limits_.num_snapshots)) * static_cast<uint64_t>(max_blocks());
    blocks = std::min<uint64_t>(blocks, 1ull << 30);
    for (size_t r = 0; r < sizes_.size(); ++r) {
      const MemoryPlan& memory = plan_.ranks[r].memory;
      if (options_.kv_cache_memory_bytes) {
        if (*options_.kv_cache_memory_bytes > left_[r]) {
          plan_.verdict = fmt::format("does not fit{}: --kv-cache-memory-bytes asks for {}, but weights, workspace and {} sequences leave {}", of_rank(plan_.ranks[r]),
                                      gib(*options_.kv_cache_memory_bytes), slots, gib(left_[r]));
          return false;
        }
        budgets[r] = *options_.kv_cache_memory_bytes;
      } else if (on_cpu()) {
        const uint64_t wanted = static_cast<uint64_t>(options_.max_model_len != 0 ? max_blocks() : 0) * memory.block_bytes;
        budgets[r] = std::min(left_[r], std::max(kDefaultCpuKvBytes / plan_.ranks.size(), wanted));
      }
      const auto held = static_cast<uint64_t>(places(static_cast<double>(budgets[r]), memory.block_bytes));
      if (held < blocks) {
        blocks = held;
        tightest = r;
      }
    }
    limits_.num_blocks = static_cast<int32_t>(blocks);
    if (const size_t fuller = settle(); fuller < sizes_.size()) {
      tightest = fuller;
      if (options_.kv_cache_memory_bytes) {
        plan_.verdict = fmt::format("does not fit{}: --kv-cache-memory-bytes asks for {}, {} are left", of_rank(plan_.ranks[tightest]), gib(*options_.kv_cache_memory_bytes),
                                    gib(plan_.ranks[tightest].memory.kv_bytes));
        return false;
      }
      budgets[tightest] = plan_.ranks[tightest].memory.kv_bytes;
    }
    const RankPlan& rank = plan_.ranks[tightest];
    if (limits_.num_blocks == 0) {
      plan_.verdict = fmt::format("does not fit{}: one KV block of 64 tokens needs {} and {} are left for it", of_rank(rank), gib(rank.memory.block_bytes), gib(budgets[tightest]));
      return false;
    }
    const int64_t longest = static_cast<int64_t>(limits_.num_blocks) * ops::kGrid;
    if (longest >= limits_.max_model_len) return true;
    if (options_.max_model_len != 0) {
      plan_.verdict = fmt::format("does not fit{}: one sequence of --max-model-len {} needs {} of KV, {} are left ({} tokens); --max-model-len {} would fit", of_rank(rank),
                                  options_.max_model_len, gib(static_cast<uint64_t>(max_blocks()) * rank.memory.block_bytes), gib(budgets[tightest]), longest, longest);
      return false;
    }
    plan_.notes.push_back(fmt::format("max_model_len lowered from {} to {}: that is what the KV cache of {} holds", limits_.max_model_len, longest, gib(rank.memory.kv_bytes)));
    limits_.max_model_len = static_cast<int32_t>(longest);
    return true;
  }

  /// Counts what every rank allocates with the limits as they are; while that is over a budget, KV blocks are given up. The last rank that wanted it, or none.
  size_t settle() {
    size_t fuller = sizes_.size();
    for (bool again = true; again;) {
      again = false;
      const auto blocks = static_cast<uint64_t>(limits_.num_blocks);
      for (size_t r = 0; r < sizes_.size(); ++r) {
        MemoryPlan& memory = plan_.ranks[r].memory;
        memory.kv_bytes = blocks * memory.block_bytes;
        memory.workspace_bytes = 0;
        memory.workspace_bytes = counters_[r].other_bytes(plan_, plan_.ranks[r]) - (memory.planned_allocations() - memory.weights_bytes);
        if (memory.total_bytes() <= memory.budget_bytes || memory.block_bytes == 0) continue;
        const uint64_t given_up = (memory.total_bytes() - memory.budget_bytes + memory.block_bytes - 1) / memory.block_bytes;
        const auto left = static_cast<int32_t>(blocks - std::min(blocks, given_up));
        if (left >= limits_.num_blocks) continue;
        limits_.num_blocks = left;
        fuller = r;
        again = true;
      }
    }
    return fuller;
  }

  /// Places in host memory: as many blocks to a snapshot as the device has, so that both run out together.
  void lay_out_host_memory() {
    const uint64_t bytes = options_.host_cache_bytes;
    if (bytes == 0) return;
    const uint64_t blocks_each = std::max<uint64_t>(static_cast<uint64_t>(limits_.num_blocks / std::max(limits_.num_snapshots, 1)), 1);
    const uint64_t snapshots = bytes / (limits_.snapshot_bytes + blocks_each * limits_.block_bytes);
    if (snapshots == 0 || limits_.num_snapshots == 0) {
      plan_.notes.push_back(fmt::format("the prefix cache uses no host memory: {} hold no snapshot ({}) with {} KV blocks ({} each)", gib(bytes), gib(limits_.snapshot_bytes),
                                        blocks_each, gib(limits_.block_bytes)));
      return;
    }
    limits_.num_host_snapshots = static_cast<int32_t>(std::min<uint64_t>(snapshots, 1u << 20));
    limits_.num_host_blocks = static_cast<int32_t>(
        std::min<uint64_t>((bytes - static_cast<uint64_t>(limits_.num_host_snapshots) * limits_.snapshot_bytes) / limits_.block_bytes, 1u << 30));
  }

  ExecutionPlan& plan_;
  const WorkerOptions& options_;
  WorkerLimits& limits_;
  const std::vector<Sizes>& sizes_;
  const std::vector<RankCounter>& counters_;
  std::vector<uint64_t> left_;  // of each rank's budget
};

const ops::LinearShape& lm_head_of(const ExecutionPlan& plan) { return plan.inventory.linears.at(plan.config.tie_word_embeddings ? "embed_tokens.weight" : "lm_head.weight"); }

/// Whether drafts are to have an FP8 copy of lm_head.
Result<bool> wants_draft_head(const ExecutionPlan& plan) {
  const DraftHead wanted = plan.options.draft_head;
  if (!plan.with_mtp || wanted == DraftHead::kModel) return false;
  if (ops::is_fp8(lm_head_of(plan).scheme)) {
    if (wanted == DraftHead::kFp8) return invalid_argument("draft_head fp8: lm_head of {} is FP8 already", plan.config.name);
    return false;
  }
  return wanted == DraftHead::kFp8 || plan.traits.platform == ops::Platform::kCuda;
}

/// Whether it takes more than a tenth of what the weights leave where it lies.
bool takes_too_much(const ExecutionPlan& plan) {
  if (!plan.fits) return true;
  return std::any_of(plan.ranks.begin(), plan.ranks.end(), [&](const RankPlan& rank) {
    if (!rank.shard.last_stage()) return false;
    const Problems problems(rank.config, rank.inventory, rank.shard, plan.numerics());
    const uint64_t bytes = problems.draft_head().lm_head.packed_bytes();
    return 10 * bytes > rank.memory.budget_bytes - rank.memory.allocated_before() + bytes;
  });
}

/// Attention layers of the plan whose k and v scales are both in the checkpoint.
int64_t count_kv_scales(const ExecutionPlan& plan) {
  return std::count_if(plan.inventory.kv_scales.begin(), plan.inventory.kv_scales.end(), [&](const auto& entry) {
    return (entry.first >= 0 || plan.with_mtp) && !entry.second.k.empty() && !entry.second.v.empty();
  });
}

Result<void> check_options(const WorkerOptions& options, const model::ModelConfig& config) {
  std::vector<std::string> faults;
  if (options.tp_size < 1) faults.push_back(fmt::format("-tp {}: a positive number of ranks is wanted", options.tp_size));
  else if (const auto enough = check_tp_size(config, options.tp_size); !enough) faults.push_back(enough.error().message);
  if (options.pp_size < 1 || options.pp_size > config.num_layers()) faults.push_back(fmt::format("-pp {}: {} has {} layers, and every stage needs one", options.pp_size, config.name, config.num_layers()));
  if (options.max_model_len < 0 || options.max_model_len > config.max_position_embeddings)
    faults.push_back(fmt::format("--max-model-len {} is over the model's limit of {} (max_position_embeddings)", options.max_model_len, config.max_position_embeddings));
  if (!(options.memory_utilization > 0 && options.memory_utilization <= 1))
    faults.push_back(fmt::format("--gpu-memory-utilization {}: a share above 0 and up to 1 is wanted", options.memory_utilization));
  if (options.max_num_seqs < 0 || options.max_num_seqs > 65536) faults.push_back(fmt::format("--max-num-seqs {}: 1 to 65536", options.max_num_seqs));
  if (options.max_num_batched_tokens < 0) faults.push_back(fmt::format("--max-num-batched-tokens {}: a positive number is wanted", options.max_num_batched_tokens));
  if (options.k_max < 0 || options.k_max > 16) faults.push_back(fmt::format("{} drafts in a step: 0 to 16", options.k_max));
  if (!faults.empty()) return invalid_argument("{}", fmt::join(faults, "; "));
  return {};
}

}  // namespace

std::string ExecutionPlan::refusals() const {
  std::string text;
  int num_refused = 0;
  for (const OpChoice& choice : choices) {
    if (!choice.candidate.empty()) continue;
    ++num_refused;
    text += fmt::format("\n  {} {}  wanted by {}", choice.op, choice.problem, choice.wanted_by);
    if (choice.num_wanting > 1) text += fmt::format(" and {} more", choice.num_wanting - 1);
    for (const OpChoice::Answer& answer : choice.answers) text += fmt::format("\n    {:<16} {}", answer.candidate, answer.reason);
  }
  if (num_refused == 0) return {};
  return fmt::format("cannot run {} on {} ({}): {} of {} ops {} no kernel{}", config.name, ops::platform_name(traits.platform), traits.name, num_refused,
                     choices.size(), num_refused == 1 ? "has" : "have", text);
}

Range ExecutionPlan::local_ranks() const {
  if (hosts.empty()) return {0, std::ssize(ranks)};
  return {int64_t{process} * options.tp_size, int64_t{process + 1} * options.tp_size};
}

std::string ExecutionPlan::rank_name(size_t rank) const {
  if (hosts.empty()) return fmt::format("rank {} ({})", rank, ranks[rank].device);
  return fmt::format("rank {} ({} of process {})", rank, ranks[rank].device, ranks[rank].shard.pp_rank);
}

std::string ExecutionPlan::process_name(int32_t number) const {
  const int32_t first = number * options.tp_size;
  return fmt::format("process {} ({}, {})", number, hosts[static_cast<size_t>(number)],
                     options.tp_size == 1 ? fmt::format("rank {}", first) : fmt::format("ranks {} to {}", first, first + options.tp_size - 1));
}

std::vector<ops::DeviceTraits> ExecutionPlan::device_traits() const {
  std::vector<ops::DeviceTraits> traits_of_ranks;
  for (const RankPlan& rank : ranks) traits_of_ranks.push_back(rank.traits);
  return traits_of_ranks;
}

ops::CollectiveOptions ExecutionPlan::collective_options() const {
  constexpr size_t kLeast = size_t{256} << 10;
  ops::CollectiveOptions collective = options.collective;
  const auto step_bytes = static_cast<size_t>(limits.max_rows * config.hidden_size) * dtype_size(activation);
  collective.max_message_bytes = std::min(collective.max_message_bytes, std::max(step_bytes, kLeast));
  const auto logits_bytes = static_cast<size_t>(max_logit_rows * config.vocab_size) * sizeof(float);
  collective.longest_message_bytes = std::min(collective.longest_message_bytes, std::max(step_bytes, options.tp_size > 1 ? logits_bytes : 0));
  // Ranks on a CPU compute for seconds where a card takes milliseconds, and perhaps share their cores with others.
  if (traits.platform == ops::Platform::kCpu) collective.deadline *= 6;
  if (options.collective_timeout.count() > 0) collective.deadline = options.collective_timeout;
  collective.row_bytes = static_cast<size_t>(config.hidden_size) * dtype_size(activation);
  return collective;
}

std::chrono::milliseconds ExecutionPlan::step_timeout() const {
  if (options.step_timeout.count() > 0) return options.step_timeout;
  const bool is_card = traits.platform == ops::Platform::kCuda || traits.architecture != 0;
  return is_card ? std::chrono::minutes(2) : std::chrono::minutes(20);  // a long prompt of a large model takes minutes on a CPU
}

uint64_t ExecutionPlan::kv_bytes_for(int64_t num_blocks) const {
  uint64_t largest = 0;
  for (const RankPlan& rank : ranks) largest = std::max(largest, rank.memory.block_bytes);
  return static_cast<uint64_t>(num_blocks) * largest;
}

namespace {

/// The plan of a model for named devices.
Result<ExecutionPlan> plan_on(const WorkerOptions& options, model::ModelConfig config, weights::Inventory inventory, const std::vector<std::string>& devices,
                              std::vector<ops::DeviceTraits> traits) {
  RETURN_IF_ERROR(check_options(options, config));
  CHECK(traits.size() == devices.size());
  ExecutionPlan plan;
  plan.options = options;
  plan.config = std::move(config);
  plan.inventory = std::move(inventory);
  for (ops::DeviceTraits& each : traits) each.fp8_matrix = each.fp8_matrix && options.quantize_activations;
  plan.traits = traits[0];
  plan.with_mtp = plan.inventory.has_mtp && options.load.with_mtp.value_or(true);
  if (options.load.with_mtp.value_or(false) && !plan.inventory.has_mtp)
    return invalid_argument("the MTP head was asked for, but {} has no mtp.* tensors", plan.config.name);
  plan.notes = plan.inventory.notes;
  ASSIGN_OR_RETURN(Numerics numerics, choose_numerics(options, plan.inventory));
  plan.activation = numerics.activation;
  plan.kv = numerics.kv;
  plan.ring = numerics.ring;
  ASSIGN_OR_RETURN(plan.draft_head, wants_draft_head(plan));
  numerics.draft_head = plan.draft_head;

  if (plan.kv == DType::kE4M3) {
    const int64_t num_layers = plan.config.num_attention_layers() + (plan.with_mtp ? 1 : 0);
    const int64_t unscaled = num_layers - count_kv_scales(plan);
    if (unscaled > 0) plan.notes.push_back(fmt::format("FP8 KV cache: {} of {} attention layers have no k and v scales in the checkpoint; 1.0 is used", unscaled, num_layers));
  }

  const std::vector<Range> stages = choose_stages(plan, traits, numerics);
  std::vector<Sizes> sizes;
  for (size_t r = 0; r < devices.size(); ++r) {
    const auto number = static_cast<int32_t>(r);
    const int32_t stage = number / options.tp_size;
    RankPlan rank{.device = devices[r], .traits = traits[r]};
    rank.shard = make_shard(plan.config, number % options.tp_size, options.tp_size, stage, options.pp_size, stages[static_cast<size_t>(stage)]);
    rank.config = part_of(plan.config, rank.shard);
    ASSIGN_OR_RETURN(rank.inventory, part_of(plan.inventory, plan.config, rank.shard, plan.with_mtp));
    sizes.emplace_back(rank.config, rank.shard, numerics, plan.with_mtp);
    rank.decode_bytes_per_token = decode_bytes(rank, sizes.back());
    plan.ranks.push_back(std::move(rank));
  }

  const ops::KernelTable& table = backends::kernel_table(plan.traits.platform);
  RETURN_IF_ERROR(check_kernel_names(table, options, plan, numerics));
  ops::SelectionRules rules;
  rules.forced = options.kernels;
  Chooser chooser(table, rules);
  for (const RankPlan& rank : plan.ranks) {
    chooser.set_rank(rank);
    Problems(rank.config, rank.inventory, rank.shard, numerics).for_each(plan.with_mtp, chooser);
  }
  plan.choices = chooser.take();
  if (reads_upper_halves(plan))
    for (size_t r = 0; r < plan.ranks.size(); ++r)
      plan.ranks[r].decode_bytes_per_token -= static_cast<double>(sizes[r].num_linear_layers * sizes[r].state_elements * 2);
  plan.schemes = count_schemes(plan.inventory);

  std::vector<RankCounter> counters;
  counters.reserve(plan.ranks.size());  // their kernels know where their devices are
  for (const RankPlan& rank : plan.ranks) counters.emplace_back(plan, rank, table, rules);
  MemoryLayout layout(plan, sizes, counters);
  layout.lay_out();
  plan.memory = layout.fullest().memory;
  if (plan.draft_head && options.draft_head == DraftHead::kAuto && takes_too_much(plan)) {
    WorkerOptions without = options;
    without.draft_head = DraftHead::kModel;
    const std::vector<ops::DeviceTraits> same = plan.device_traits();
    ASSIGN_OR_RETURN(ExecutionPlan smaller, plan_on(without, std::move(plan.config), std::move(plan.inventory), devices, same));
    smaller.options.draft_head = DraftHead::kAuto;
    smaller.notes.emplace_back("drafts are picked with lm_head itself: an FP8 copy would take too much of what the weights leave");
    return smaller;
  }
  for (size_t first = 0; first < plan.ranks.size(); first += static_cast<size_t>(options.tp_size)) {
    double largest = 0;
    for (size_t r = first; r < first + static_cast<size_t>(options.tp_size); ++r) largest = std::max(largest, plan.ranks[r].decode_bytes_per_token);
    plan.decode_bytes_per_token += largest;
  }
  plan.expected_decode_tokens_per_second = expected_decode_speed(plan);
  return plan;
}

/// The plan of the model in options.model_dir.
Result<ExecutionPlan> plan_directory_on(const WorkerOptions& options, model::ModelConfig config, const std::vector<std::string>& devices, const std::vector<ops::DeviceTraits>& traits) {
  if (config.dtype == "float16" && options.dtype == ModelDType::kAuto)
    return invalid_argument("{}: dtype float16 overflows in this model family's residual stream; use --dtype bfloat16 or float32", config.name);
  bool has_weights = false;
  for (const auto& entry : std::filesystem::directory_iterator(options.model_dir))
    has_weights = has_weights || entry.path().extension() == ".safetensors" || entry.path().filename() == "model.safetensors.index.json";
  if (!has_weights || options.load.format == weights::LoadFormat::kDummy) {
    ASSIGN_OR_RETURN(weights::Inventory inventory, weights::inventory_from_config(config, options.load));
    if (!has_weights) inventory.notes.push_back("no weights in this directory: planned from config.json alone");
    return plan_on(options, std::move(config), std::move(inventory), devices, traits);
  }
  ASSIGN_OR_RETURN(const auto source, weights::open_weights(options.model_dir, config, options.load));
  return plan_on(options, std::move(config), source->inventory(), devices, traits);
}

}  // namespace

Result<ExecutionPlan> make_plan(const WorkerOptions& options, model::ModelConfig config, weights::Inventory inventory, std::vector<ops::DeviceTraits> traits) {
  RETURN_IF_ERROR(check_options(options, config));
  ASSIGN_OR_RETURN(const std::vector<std::string> devices, rank_devices(options.device, options.tp_size, options.pp_size));
  if (traits.size() == 1) traits.resize(devices.size(), traits[0]);
  return plan_on(options, std::move(config), std::move(inventory), devices, std::move(traits));
}

Result<ExecutionPlan> make_plan(const WorkerOptions& options) {
  ASSIGN_OR_RETURN(model::ModelConfig config, model::load_config(options.model_dir));
  RETURN_IF_ERROR(check_options(options, config));
  ASSIGN_OR_RETURN(const std::vector<std::string> devices, rank_devices(options.device, options.tp_size, options.pp_size));
  ASSIGN_OR_RETURN(const std::vector<ops::DeviceTraits> traits, traits_of_ranks(devices, options.tp_size));
  return plan_directory_on(options, std::move(config), devices, traits);
}

Result<ExecutionPlan> make_plan_on(const WorkerOptions& options, const std::vector<std::string>& devices, const std::vector<ops::DeviceTraits>& traits) {
  ASSIGN_OR_RETURN(model::ModelConfig config, model::load_config(options.model_dir));
  return plan_directory_on(options, std::move(config), devices, traits);
}

std::vector<KernelRow> kernel_matrix(const ExecutionPlan& plan) {
  std::vector<KernelRow> rows;
  std::set<std::pair<std::string, std::string>> seen;
  for (const OpChoice& choice : plan.choices)
    for (const OpChoice::Answer& answer : choice.answers)
      if (seen.emplace(choice.op, answer.candidate).second)
        rows.push_back({std::string(ops::platform_name(plan.traits.platform)), choice.op, answer.candidate, answer.reason, answer.accepted});
  return rows;
}

Result<ExecutionPlan> plan_reference_model(const std::string& device) {
  ASSIGN_OR_RETURN(ops::DeviceTraits traits, backends::traits_by_name(device));
  ASSIGN_OR_RETURN(const Json json, parse_json(R"({
    "architectures": ["Qwen3_5ForConditionalGeneration"], "model_type": "qwen3_5", "tie_word_embeddings": false,
    "text_config": {"model_type": "qwen3_5_text", "dtype": "bfloat16", "hidden_size": 5120, "intermediate_size": 17408, "num_hidden_layers": 64,
      "full_attention_interval": 4, "num_attention_heads": 24, "num_key_value_heads": 4, "head_dim": 256, "attn_output_gate": true,
      "attention_bias": false, "linear_num_key_heads": 16, "linear_num_value_heads": 48, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
      "linear_conv_kernel_dim": 4, "rms_norm_eps": 1e-6, "hidden_act": "silu", "vocab_size": 248320, "max_position_embeddings": 262144,
      "mtp_num_hidden_layers": 1, "tie_word_embeddings": false, "eos_token_id": 248044,
      "rope_parameters": {"rope_type": "default", "rope_theta": 10000000, "partial_rotary_factor": 0.25, "mrope_interleaved": true, "mrope_section": [11, 11, 10]}},
    "quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128],
      "modules_to_not_convert": ["lm_head", "model.language_model.embed_tokens", "mtp.fc"]}})", "the reference model"));
  ASSIGN_OR_RETURN(model::ModelConfig config, model::parse_config(json, "Qwen3.6-27B-FP8"));
  WorkerOptions options;
  options.device = device;
  ASSIGN_OR_RETURN(weights::Inventory inventory, weights::inventory_from_config(config, options.load));
  return make_plan(options, std::move(config), std::move(inventory), {traits});
}

std::vector<std::string> known_cards() {
  std::vector<std::string> names;
  for (const std::string_view name : backends::known_cards()) names.emplace_back(name);
  return names;
}

}  // namespace quern::worker
