#include "worker/plan.h"

#include <algorithm>
#include <set>

#include "backends/platforms.h"
#include "base/log.h"
#include "worker/decode_speed.h"
#include "worker/problems.h"
#include "worker/sizes.h"

namespace quern::worker {
namespace {

constexpr int32_t kDefaultMaxNumSeqs = 64;
/// Sequences keep their state whether they run or not; by default it takes at most this share of what the weights leave.
constexpr double kDefaultStateShare = 0.4;
/// Host memory is shared with everything else: without an explicit size the CPU platform keeps its KV cache below this.
constexpr uint64_t kDefaultCpuKvBytes = 4ull << 30;
constexpr int32_t kDefaultLogitRows = 64;
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
  n.ring = DType::kF32;
  return n;
}

/// Asks every candidate once per op and problem.
class Chooser {
 public:
  Chooser(const ops::KernelTable& table, const ops::DeviceTraits& traits, const ops::SelectionRules& rules) : table_(table), traits_(traits), rules_(rules) {}

  template <class Op>
  void operator()(const typename Op::Problem& problem, const std::string& wanted_by) {
    const std::string text = describe(problem);
    for (OpChoice& known : choices_) {
      if (known.op == Op::kName && known.problem == text) {
        ++known.num_wanting;
        return;
      }
    }
    const ops::Choice<Op> choice = ops::select(table_.list<Op>(), problem, traits_, rules_);
    OpChoice entry{std::string(Op::kName), text, wanted_by, 1, {}, {}, {}};
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
  const ops::DeviceTraits& traits_;
  const ops::SelectionRules& rules_;
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

Result<void> check_kernel_names(const ops::KernelTable& table, const WorkerOptions& options, const Problems& problems, bool with_mtp) {
  UnknownKernels check{table, options.kernels, {}, {}};
  problems.for_each(with_mtp, check);
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

bool wants(std::string_view name, bool with_mtp) { return with_mtp || !name.starts_with("mtp."); }

uint64_t weights_bytes(const weights::Inventory& inventory, bool with_mtp) {
  uint64_t bytes = 0;
  for (const auto& [name, linear] : inventory.linears)
    if (wants(name, with_mtp)) bytes += round_up(static_cast<int64_t>(linear.packed_bytes()), 256);
  for (const auto& [name, vector] : inventory.vectors)
    if (wants(name, with_mtp)) bytes += static_cast<uint64_t>(vector.second.num_elements()) * sizeof(float);
  return bytes;
}

/// Bytes that one decoded token reads at a context of 1024 tokens: the embedding table is looked up, a tied one is read by the head.
double decode_bytes(const ExecutionPlan& plan, const Sizes& sizes) {
  double bytes = 0;
  for (const auto& [name, linear] : plan.inventory.linears) {
    if (!wants(name, false)) continue;
    if (name == "embed_tokens.weight" && !plan.config.tie_word_embeddings) continue;
    bytes += static_cast<double>(linear.packed_bytes());
  }
  bytes += static_cast<double>(sizes.num_linear_layers * sizes.state_elements * 4);
  bytes += static_cast<double>(sizes.block_bytes) * 1024 / ops::kGrid;
  return bytes;
}

/// The cheapest way out of a plan whose weights and one sequence are `smallest` bytes.
std::string what_would_fit(const ExecutionPlan& plan, uint64_t smallest) {
  const auto share = [&](uint64_t bytes) { return static_cast<double>(bytes) / static_cast<double>(plan.memory.device_bytes); };
  if (share(smallest) < 0.98) return fmt::format("--gpu-memory-utilization {:.2f} would fit", share(smallest) + 0.01);
  uint64_t wide = 0;  // what runtime fp8 would save
  for (const auto& [name, linear] : plan.inventory.linears)
    if (!ops::is_fp8(linear.scheme) && name.find("_proj.") != std::string::npos) wide += linear.packed_bytes() / 2;
  if (wide > 0 && !plan.options.load.quantize_fp8 && smallest - wide <= plan.memory.budget_bytes)
    return fmt::format("--quantization fp8 would save about {} and fit", gib(wide));
  return fmt::format("a device with {} would fit", gib(static_cast<uint64_t>(static_cast<double>(smallest) / plan.options.memory_utilization)));
}

/// How many snapshots there are: as asked, or a share of the `left` bytes.
int32_t choose_snapshots(ExecutionPlan& plan, const Sizes& sizes, int32_t num_seqs, uint64_t left) {
  const int32_t wanted = plan.options.num_snapshots;
  const auto affordable = [&](double share) { return static_cast<int64_t>(static_cast<double>(left) * share / static_cast<double>(sizes.snapshot_bytes)); };
  if (wanted < 0) {
    int64_t most = std::min<int64_t>(affordable(kDefaultSnapshotShare), std::max(int64_t{kDefaultSnapshotsPerSeq} * num_seqs, int64_t{kDefaultLeastSnapshots}));
    if (plan.traits.platform == ops::Platform::kCpu) most = std::min<int64_t>(most, static_cast<int64_t>(kDefaultCpuSnapshotBytes / sizes.snapshot_bytes));
    return static_cast<int32_t>(most);
  }
  const int64_t most = affordable(0.5);
  if (wanted <= most) return wanted;
  plan.notes.push_back(fmt::format("snapshots lowered from {} to {}: each takes {}, and half of what weights and workspace leave is for them", wanted, most, gib(sizes.snapshot_bytes)));
  return static_cast<int32_t>(most);
}

/// Places in host memory: as many blocks to a snapshot as the device has, so that both run out together.
void lay_out_host_memory(ExecutionPlan& plan, const Sizes& sizes) {
  WorkerLimits& limits = plan.limits;
  const uint64_t bytes = plan.options.host_cache_bytes;
  if (bytes == 0) return;
  const uint64_t blocks_each = std::max<uint64_t>(static_cast<uint64_t>(limits.num_blocks / std::max(limits.num_snapshots, 1)), 1);
  const uint64_t snapshots = bytes / (sizes.snapshot_bytes + blocks_each * sizes.block_bytes);
  if (snapshots == 0 || limits.num_snapshots == 0) {
    plan.notes.push_back(fmt::format("the prefix cache uses no host memory: {} hold no snapshot ({}) with {} KV blocks ({} each)", gib(bytes), gib(sizes.snapshot_bytes),
                                     blocks_each, gib(sizes.block_bytes)));
    return;
  }
  limits.num_host_snapshots = static_cast<int32_t>(std::min<uint64_t>(snapshots, 1u << 20));
  limits.num_host_blocks = static_cast<int32_t>(std::min<uint64_t>((bytes - static_cast<uint64_t>(limits.num_host_snapshots) * sizes.snapshot_bytes) / sizes.block_bytes, 1u << 30));
}

/// Divides the budget: weights and workspace first, then snapshots and sequences, then KV blocks.
void lay_out_memory(ExecutionPlan& plan, const Sizes& sizes) {
  const WorkerOptions& options = plan.options;
  MemoryPlan& memory = plan.memory;
  WorkerLimits& limits = plan.limits;
  const bool cpu = plan.traits.platform == ops::Platform::kCpu;
  memory.device_bytes = plan.traits.memory_bytes;
  memory.budget_bytes = static_cast<uint64_t>(static_cast<double>(plan.traits.memory_bytes) * options.memory_utilization);
  memory.weights_bytes = weights_bytes(plan.inventory, plan.with_mtp);
  memory.slot_bytes = sizes.slot_bytes();
  memory.block_bytes = sizes.block_bytes;

  limits.vocab_size = static_cast<int32_t>(plan.config.vocab_size);
  limits.k_max = options.k_max;
  limits.has_mtp = plan.with_mtp;
  limits.block_bytes = sizes.block_bytes;
  limits.snapshot_bytes = sizes.snapshot_bytes;
  limits.max_logit_rows = options.max_logit_rows != 0 ? options.max_logit_rows : kDefaultLogitRows;
  limits.max_model_len = options.max_model_len != 0 ? options.max_model_len : static_cast<int32_t>(plan.config.max_position_embeddings);
  const int32_t wanted_slots = options.max_num_seqs != 0 ? options.max_num_seqs : kDefaultMaxNumSeqs;
  const int32_t smallest_step = static_cast<int32_t>(ops::kGrid) + wanted_slots * (options.k_max + 1);
  limits.max_rows = std::max(options.max_num_batched_tokens != 0 ? options.max_num_batched_tokens : cpu ? 512 : 2048, smallest_step);
  if (options.max_num_batched_tokens != 0 && limits.max_rows != options.max_num_batched_tokens)
    plan.notes.push_back(fmt::format("max_num_batched_tokens raised from {} to {}: one prompt chunk of 64 and a verify of every sequence must fit a step",
                                     options.max_num_batched_tokens, limits.max_rows));

  const auto max_blocks = [&] { return ceil_div(limits.max_model_len, ops::kGrid); };
  memory.workspace_bytes = static_cast<uint64_t>(limits.max_rows) * sizes.row_bytes + static_cast<uint64_t>(limits.max_logit_rows) * sizes.logits_row_bytes +
                           static_cast<uint64_t>(wanted_slots) * static_cast<uint64_t>(max_blocks()) * 4 + kKernelWorkspaceBytes;
  const uint64_t fixed = memory.weights_bytes + memory.workspace_bytes;
  const uint64_t smallest = fixed + memory.slot_bytes + memory.block_bytes;
  if (smallest > memory.budget_bytes) {
    plan.fits = false;
    plan.verdict = fmt::format("does not fit: weights {} + workspace {} + one sequence {} = {}, but {} of {}'s {} may be used (--gpu-memory-utilization {}); {}",
                               gib(memory.weights_bytes), gib(memory.workspace_bytes), gib(memory.slot_bytes + memory.block_bytes),
                               gib(smallest), gib(memory.budget_bytes), plan.traits.name, gib(memory.device_bytes), options.memory_utilization,
                               what_would_fit(plan, smallest));
    return;
  }
  uint64_t left = memory.budget_bytes - fixed;
  limits.num_snapshots = choose_snapshots(plan, sizes, wanted_slots, left - memory.slot_bytes - memory.block_bytes);
  memory.snapshot_bytes = static_cast<uint64_t>(limits.num_snapshots) * sizes.snapshot_bytes;
  left -= memory.snapshot_bytes;

  // Sequences.
  const double state_share = options.max_num_seqs != 0 ? 0.9 : kDefaultStateShare;
  const auto affordable = static_cast<int64_t>(static_cast<double>(left - memory.block_bytes) * state_share / static_cast<double>(memory.slot_bytes));
  limits.num_slots = static_cast<int32_t>(std::clamp<int64_t>(affordable, 1, wanted_slots));
  if (limits.num_slots < wanted_slots)
    plan.notes.push_back(fmt::format("max_num_seqs lowered from {} to {}: each sequence keeps {} of recurrent state", wanted_slots, limits.num_slots, gib(memory.slot_bytes)));
  const auto slots = static_cast<uint64_t>(limits.num_slots);
  memory.state_bytes = slots * sizes.state_slot_bytes;
  memory.ring_bytes = slots * sizes.ring_slot_bytes;
  memory.sampler_bytes = slots * sizes.sampler_slot_bytes;
  left -= slots * memory.slot_bytes;

  // KV blocks: never more than all sequences could fill.
  uint64_t kv_budget = left;
  if (options.kv_cache_memory_bytes) {
    kv_budget = *options.kv_cache_memory_bytes;
    if (kv_budget > left) {
      plan.fits = false;
      plan.verdict = fmt::format("does not fit: --kv-cache-memory-bytes asks for {}, but weights, workspace and {} sequences leave {}", gib(kv_budget), slots, gib(left));
      return;
    }
  } else if (cpu) {
    kv_budget = std::min(kv_budget, std::max(kDefaultCpuKvBytes, static_cast<uint64_t>(options.max_model_len != 0 ? max_blocks() : 0) * memory.block_bytes));
    kv_budget = std::min(kv_budget, left);
  }
  const uint64_t useful = slots * static_cast<uint64_t>(max_blocks());
  limits.num_blocks = static_cast<int32_t>(std::min<uint64_t>({kv_budget / memory.block_bytes, useful, 1ull << 30}));
  memory.kv_bytes = static_cast<uint64_t>(limits.num_blocks) * memory.block_bytes;
  if (limits.num_blocks == 0) {
    plan.fits = false;
    plan.verdict = fmt::format("does not fit: one KV block of 64 tokens needs {} and {} are left for it", gib(memory.block_bytes), gib(kv_budget));
    return;
  }
  if (const int64_t longest = static_cast<int64_t>(limits.num_blocks) * ops::kGrid; longest < limits.max_model_len) {
    if (options.max_model_len != 0) {
      plan.fits = false;
      plan.verdict = fmt::format("does not fit: one sequence of --max-model-len {} needs {} of KV, {} are left ({} tokens); --max-model-len {} would fit",
                                 options.max_model_len, gib(static_cast<uint64_t>(max_blocks()) * memory.block_bytes), gib(kv_budget), longest, longest);
      return;
    }
    plan.notes.push_back(fmt::format("max_model_len lowered from {} to {}: that is what the KV cache of {} holds", limits.max_model_len, longest, gib(memory.kv_bytes)));
    limits.max_model_len = static_cast<int32_t>(longest);
  }
  lay_out_host_memory(plan, sizes);
  plan.fits = true;
  plan.verdict = fmt::format("fits: {} of {} used; {} sequences, {} KV tokens", gib(memory.total_bytes()), gib(memory.device_bytes), limits.num_slots,
                             static_cast<int64_t>(limits.num_blocks) * ops::kGrid);
}

/// Attention layers of the plan whose k and v scales are both in the checkpoint.
int64_t count_kv_scales(const ExecutionPlan& plan) {
  return std::count_if(plan.inventory.kv_scales.begin(), plan.inventory.kv_scales.end(), [&](const auto& entry) {
    return (entry.first >= 0 || plan.with_mtp) && !entry.second.k.empty() && !entry.second.v.empty();
  });
}

Result<void> check_options(const WorkerOptions& options, const model::ModelConfig& config) {
  std::vector<std::string> faults;
  if (options.tp_size != 1 || options.pp_size != 1)
    faults.push_back(fmt::format("-tp {} -pp {}: this version runs a model on one device; tensor and pipeline parallelism are not built yet", options.tp_size, options.pp_size));
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

Result<ExecutionPlan> make_plan(const WorkerOptions& options, model::ModelConfig config, weights::Inventory inventory, const ops::DeviceTraits& traits) {
  RETURN_IF_ERROR(check_options(options, config));
  ExecutionPlan plan;
  plan.options = options;
  plan.config = std::move(config);
  plan.inventory = std::move(inventory);
  plan.traits = traits;
  plan.traits.fp8_matrix = traits.fp8_matrix && options.quantize_activations;
  plan.with_mtp = plan.inventory.has_mtp && options.load.with_mtp.value_or(true);
  if (options.load.with_mtp.value_or(false) && !plan.inventory.has_mtp)
    return invalid_argument("the MTP head was asked for, but {} has no mtp.* tensors", plan.config.name);
  plan.notes = plan.inventory.notes;
  ASSIGN_OR_RETURN(const Numerics numerics, choose_numerics(options, plan.inventory));
  plan.activation = numerics.activation;
  plan.kv = numerics.kv;
  plan.ring = numerics.ring;

  if (plan.kv == DType::kE4M3) {
    const int64_t num_layers = plan.config.num_attention_layers() + (plan.with_mtp ? 1 : 0);
    const int64_t unscaled = num_layers - count_kv_scales(plan);
    if (unscaled > 0) plan.notes.push_back(fmt::format("FP8 KV cache: {} of {} attention layers have no k and v scales in the checkpoint; 1.0 is used", unscaled, num_layers));
  }

  const Problems problems(plan.config, plan.inventory, numerics);
  const ops::KernelTable& table = backends::kernel_table(traits.platform);
  RETURN_IF_ERROR(check_kernel_names(table, options, problems, plan.with_mtp));
  ops::SelectionRules rules;
  rules.forced = options.kernels;
  Chooser chooser(table, plan.traits, rules);
  problems.for_each(plan.with_mtp, chooser);
  plan.choices = chooser.take();
  plan.schemes = count_schemes(plan.inventory);

  const Sizes sizes(plan.config, numerics, plan.with_mtp);
  lay_out_memory(plan, sizes);
  plan.decode_bytes_per_token = decode_bytes(plan, sizes);
  plan.expected_decode_tokens_per_second = expected_decode_speed(plan);
  return plan;
}

Result<ExecutionPlan> make_plan(const WorkerOptions& options) {
  ASSIGN_OR_RETURN(ops::DeviceTraits traits, backends::traits_by_name(options.device));
  ASSIGN_OR_RETURN(model::ModelConfig config, model::load_config(options.model_dir));
  if (config.dtype == "float16" && options.dtype == ModelDType::kAuto)
    return invalid_argument("{}: dtype float16 overflows in this model family's residual stream; use --dtype bfloat16 or float32", config.name);
  bool has_weights = false;
  for (const auto& entry : std::filesystem::directory_iterator(options.model_dir))
    has_weights = has_weights || entry.path().extension() == ".safetensors" || entry.path().filename() == "model.safetensors.index.json";
  if (!has_weights || options.load.format == weights::LoadFormat::kDummy) {
    ASSIGN_OR_RETURN(weights::Inventory inventory, weights::inventory_from_config(config, options.load));
    if (!has_weights) inventory.notes.push_back("no weights in this directory: planned from config.json alone");
    return make_plan(options, std::move(config), std::move(inventory), traits);
  }
  ASSIGN_OR_RETURN(const auto source, weights::open_weights(options.model_dir, config, options.load));
  return make_plan(options, std::move(config), source->inventory(), traits);
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
  return make_plan(options, std::move(config), std::move(inventory), traits);
}

std::vector<std::string> known_cards() {
  std::vector<std::string> names;
  for (const std::string_view name : backends::known_cards()) names.emplace_back(name);
  return names;
}

}  // namespace quern::worker
