#include "worker/shard.h"

#include <algorithm>
#include <charconv>
#include <limits>

#include "base/check.h"
#include "model/tensors.h"
#include "weights/slices.h"

namespace quern::worker {
namespace {

/// Columns and ids are shared out in scale blocks, so that activations that are quantized by 128 stay with one rank; in small models in less.
int64_t unit_of(int64_t extent, int32_t num_ranks) {
  constexpr int64_t kSmallUnit = 32;
  return ceil_div(extent, ops::kScaleBlock) >= num_ranks ? ops::kScaleBlock : kSmallUnit;
}

/// The first ranks have one more where they cannot all have as many.
Range share(int64_t n, int32_t rank, int32_t num_ranks) {
  const int64_t each = n / num_ranks, left = n % num_ranks;
  const int64_t begin = rank * each + std::min<int64_t>(rank, left);
  return {begin, begin + each + (rank < left ? 1 : 0)};
}
Range share_in_units(int64_t extent, int32_t rank, int32_t num_ranks) {
  const int64_t unit = unit_of(extent, num_ranks);
  const Range units = share(ceil_div(extent, unit), rank, num_ranks);
  return {units.begin * unit, std::min(units.end * unit, extent)};
}

/// The heads that `own` read, of `num_read` heads that serve `num_heads` in equal groups.
Range read_by(const Range& own, int64_t num_heads, int64_t num_read) {
  const int64_t group = num_heads / num_read;
  return {own.begin / group, (own.end - 1) / group + 1};
}
std::vector<int32_t> local_map(const Range& own, const Range& read, int64_t num_heads, int64_t num_read) {
  std::vector<int32_t> map;
  for (int64_t head = own.begin; head < own.end; ++head) map.push_back(static_cast<int32_t>(head / (num_heads / num_read) - read.begin));
  return map;
}

Range scaled(const Range& range, int64_t factor, int64_t offset = 0) { return {offset + range.begin * factor, offset + range.end * factor}; }

weights::Slice rows(const Range& range) { return {.row_begin = range.begin, .row_end = range.end}; }
weights::Slice columns(const Range& range) { return {.column_begin = range.begin, .column_end = range.end}; }

/// q, k and v of in_proj_qkv and of the conv's channels, each cut by its own heads.
weights::Slice gdn_channels(const Shard& s, const model::ModelConfig& c) {
  const int64_t dk = c.linear_key_head_dim, dv = c.linear_value_head_dim, keys = c.linear_num_key_heads * dk;
  std::vector<Range> pieces;
  for (const Range& piece : {scaled(s.k_heads, dk), scaled(s.k_heads, dk, keys), scaled(s.v_heads, dv, 2 * keys)}) {
    if (!pieces.empty() && pieces.back().end == piece.begin) pieces.back().end = piece.end;
    else pieces.push_back(piece);
  }
  weights::Slice slice = rows(pieces.front());
  slice.further_rows.assign(pieces.begin() + 1, pieces.end());
  return slice;
}

bool ends_with(std::string_view text, std::string_view end) { return text.ends_with(end); }

/// N of "layers.N.".
std::optional<int64_t> layer_of(std::string_view tensor) {
  constexpr std::string_view kPrefix = "layers.";
  if (!tensor.starts_with(kPrefix)) return std::nullopt;
  int64_t layer = 0;
  std::from_chars(tensor.data() + kPrefix.size(), tensor.data() + tensor.size(), layer);
  return layer;
}

bool keeps(const Shard& shard, const model::ModelConfig& config, std::string_view tensor, bool has_mtp) {
  if (const auto layer = layer_of(tensor)) return shard.layers.begin <= *layer && *layer < shard.layers.end;
  if (tensor == "embed_tokens.weight") return shard.first_stage() || (shard.last_stage() && (has_mtp || config.tie_word_embeddings));
  if (tensor.starts_with("mtp.") && !has_mtp) return false;
  return shard.last_stage();  // final norm, head, MTP
}

}  // namespace

Shard make_shard(const model::ModelConfig& config, int32_t tp_rank, int32_t tp_size, int32_t pp_rank, int32_t pp_size, const Range& layers) {
  Shard s{.tp_rank = tp_rank, .tp_size = tp_size, .pp_rank = pp_rank, .pp_size = pp_size, .layers = layers};
  s.q_heads = share(config.num_attention_heads, tp_rank, tp_size);
  s.kv_heads = read_by(s.q_heads, config.num_attention_heads, config.num_key_value_heads);
  s.kv_head = local_map(s.q_heads, s.kv_heads, config.num_attention_heads, config.num_key_value_heads);
  s.v_heads = share(config.linear_num_value_heads, tp_rank, tp_size);
  s.k_heads = read_by(s.v_heads, config.linear_num_value_heads, config.linear_num_key_heads);
  s.k_head = local_map(s.v_heads, s.k_heads, config.linear_num_value_heads, config.linear_num_key_heads);
  s.intermediate = share_in_units(config.intermediate_size, tp_rank, tp_size);
  s.vocab = share_in_units(config.vocab_size, tp_rank, tp_size);
  return s;
}

Result<void> check_tp_size(const model::ModelConfig& config, int32_t tp_size) {
  const auto num_units = [&](int64_t extent) { return ceil_div(extent, unit_of(extent, tp_size)); };
  for (const auto& [count, what] : {std::pair{config.num_attention_heads, "query heads"},
                                    {config.linear_num_value_heads, "value heads in its GDN layers"},
                                    {num_units(config.intermediate_size), "blocks of MLP columns"},
                                    {num_units(config.vocab_size), "blocks of token ids"}})
    if (count < tp_size) return invalid_argument("-tp {}: {} has {} {}, and every rank needs one", tp_size, config.name, count, what);
  return {};
}

std::optional<weights::Slice> slice_of(const Shard& s, const model::ModelConfig& c, std::string_view tensor, bool has_mtp) {
  if (!keeps(s, c, tensor, has_mtp)) return std::nullopt;
  if (s.tp_size == 1) return weights::Slice{};
  if (tensor == "embed_tokens.weight" || tensor == "lm_head.weight") return rows(s.vocab);
  if (ends_with(tensor, "mlp.gate_proj.weight") || ends_with(tensor, "mlp.up_proj.weight")) return rows(s.intermediate);
  if (ends_with(tensor, "mlp.down_proj.weight")) return columns(s.intermediate);
  if (ends_with(tensor, "self_attn.q_proj.weight")) return rows(scaled(s.q_heads, 2 * c.head_dim));  // query and gate of a head
  if (ends_with(tensor, "self_attn.k_proj.weight") || ends_with(tensor, "self_attn.v_proj.weight")) return rows(scaled(s.kv_heads, c.head_dim));
  if (ends_with(tensor, "self_attn.o_proj.weight")) return columns(scaled(s.q_heads, c.head_dim));
  if (ends_with(tensor, "linear_attn.in_proj_qkv.weight") || ends_with(tensor, "linear_attn.conv1d.weight")) return gdn_channels(s, c);
  if (ends_with(tensor, "linear_attn.in_proj_z.weight")) return rows(scaled(s.v_heads, c.linear_value_head_dim));
  if (ends_with(tensor, "linear_attn.out_proj.weight")) return columns(scaled(s.v_heads, c.linear_value_head_dim));
  for (const std::string_view per_head : {"in_proj_a.weight", "in_proj_b.weight", "A_log", "dt_bias"})
    if (ends_with(tensor, per_head)) return rows(s.v_heads);
  return weights::Slice{};  // norms and mtp.fc: every rank has them whole
}

model::ModelConfig part_of(const model::ModelConfig& config, const Shard& shard) {
  model::ModelConfig part = config;
  part.layers.assign(config.layers.begin() + shard.layers.begin, config.layers.begin() + shard.layers.end);
  part.num_attention_heads = shard.q_heads.size();
  part.num_key_value_heads = shard.kv_heads.size();
  part.linear_num_value_heads = shard.v_heads.size();
  part.linear_num_key_heads = shard.k_heads.size();
  part.intermediate_size = shard.intermediate.size();
  return part;
}

Result<weights::Inventory> part_of(const weights::Inventory& inventory, const model::ModelConfig& config, const Shard& shard, bool with_mtp) {
  weights::Inventory part = inventory;
  std::vector<std::string> faults;
  for (auto entry = part.linears.begin(); entry != part.linears.end();) {
    auto& [name, linear] = *entry;
    const auto slice = slice_of(shard, config, name, with_mtp);
    if (!slice) {
      entry = part.linears.erase(entry);
      continue;
    }
    const weights::RowPieces pieces(*slice, linear.out_features);
    if (linear.scheme == ops::WeightScheme::kFp8Block && !weights::scale_rows_of(pieces, 0)) faults.push_back(name);
    const Range kept = weights::column_range(*slice, linear);
    linear.out_features = pieces.size();
    linear.in_features = kept.size();
    ++entry;
  }
  if (!faults.empty())
    return make_error(ErrorCode::kUnsupported, "-tp {}: heads of {} cannot be shared out, since they do not lie on its scale blocks of {}: {}{}", shard.tp_size, config.name, ops::kScaleBlock,
                      faults.front(), faults.size() > 1 ? fmt::format(" and {} more", faults.size() - 1) : "");
  for (auto entry = part.vectors.begin(); entry != part.vectors.end();) {
    auto& [name, vector] = *entry;
    const auto slice = slice_of(shard, config, name, with_mtp);
    if (!slice) {
      entry = part.vectors.erase(entry);
      continue;
    }
    vector.second = weights::shape_of_rows(vector.second, weights::RowPieces(*slice, vector.second[0]).size());
    ++entry;
  }
  for (auto& [layer, scales] : part.kv_scales)
    for (std::vector<float>* per_head : {&scales.k, &scales.v})
      if (std::ssize(*per_head) == config.num_key_value_heads && config.num_key_value_heads > 1)
        *per_head = std::vector<float>(per_head->begin() + shard.kv_heads.begin, per_head->begin() + shard.kv_heads.end);
  return part;
}

std::vector<Range> split_layers(const StageCosts& costs) {
  const auto num_layers = std::ssize(costs.layer_bytes), num_stages = std::ssize(costs.bandwidth);
  CHECK(num_stages >= 1 && num_stages <= num_layers);
  std::vector<double> before(1, 0.0);  // bytes of the layers before each
  for (const double bytes : costs.layer_bytes) before.push_back(before.back() + bytes);
  struct Load {
    double overflow = 0, seconds = 0;  // the worst stage's
    [[nodiscard]] bool operator<(const Load& other) const { return overflow != other.overflow ? overflow < other.overflow : seconds < other.seconds; }
  };
  const auto load_of = [&](int64_t stage, int64_t begin, int64_t end) {
    const auto at = static_cast<size_t>(stage);
    const bool first = stage == 0, last = stage == num_stages - 1;
    const double read = before[static_cast<size_t>(end)] - before[static_cast<size_t>(begin)] + (last ? costs.last_bytes : 0);
    const double kept = read + (first ? costs.first_resident_bytes : 0) + (last ? costs.last_resident_bytes : 0);
    return Load{std::max(kept - costs.memory_bytes[at], 0.0), read / costs.bandwidth[at]};
  };
  const auto worse = [](const Load& a, const Load& b) { return Load{std::max(a.overflow, b.overflow), std::max(a.seconds, b.seconds)}; };
  // best[stage][end]: stages 0 .. stage hold the layers before `end`, each at least one.
  struct Best {
    Load load{std::numeric_limits<double>::infinity(), 0};
    int64_t begin = -1;
  };
  std::vector<std::vector<Best>> best(static_cast<size_t>(num_stages), std::vector<Best>(static_cast<size_t>(num_layers + 1)));
  for (int64_t end = 1; end <= num_layers; ++end) best[0][static_cast<size_t>(end)] = {load_of(0, 0, end), 0};
  for (int64_t stage = 1; stage < num_stages; ++stage)
    for (int64_t end = stage + 1; end <= num_layers; ++end)
      for (int64_t begin = stage; begin < end; ++begin) {
        const Load load = worse(best[static_cast<size_t>(stage - 1)][static_cast<size_t>(begin)].load, load_of(stage, begin, end));
        Best& known = best[static_cast<size_t>(stage)][static_cast<size_t>(end)];
        if (known.begin < 0 || load < known.load) known = {load, begin};
      }
  std::vector<Range> stages(static_cast<size_t>(num_stages));
  for (int64_t stage = num_stages - 1, end = num_layers; stage >= 0; --stage) {
    const int64_t begin = best[static_cast<size_t>(stage)][static_cast<size_t>(end)].begin;
    stages[static_cast<size_t>(stage)] = {begin, end};
    end = begin;
  }
  return stages;
}

}  // namespace quern::worker
