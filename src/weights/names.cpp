#include "weights/names.h"

#include <fmt/format.h>

#include <array>
#include <iterator>

namespace quern::weights {
namespace {

using namespace std::string_view_literals;

constexpr std::array kPrefixes{"model.language_model."sv, "language_model.model."sv, "language_model."sv, "model."sv};
constexpr std::array kVisionPrefixes{"model.visual."sv, "visual."sv, "model.vision_tower."sv, "vision_tower."sv};

constexpr std::array kQkv{"q_proj"sv, "k_proj"sv, "v_proj"sv};
constexpr std::array kGateUp{"gate_proj"sv, "up_proj"sv};
constexpr std::array kQkvz{"in_proj_qkv"sv, "in_proj_z"sv};
constexpr std::array kBa{"in_proj_b"sv, "in_proj_a"sv};
constexpr std::array kMerged{Merged{"qkv_proj", kQkv}, Merged{"gate_up_proj", kGateUp}, Merged{"in_proj_qkvz", kQkvz},
                             Merged{"in_proj_ba", kBa}};

struct KvSpelling {
  std::string_view ending;
  KvScaleName::Kind kind;
};
using enum KvScaleName::Kind;
constexpr std::array kKvSpellings{
    KvSpelling{"k_scale", kKey},
    KvSpelling{"v_scale", kValue},
    KvSpelling{"q_scale", kQuery},
    KvSpelling{"kv_scale", kKeyAndValue},
    KvSpelling{"attn.k_scale", kKey},
    KvSpelling{"attn.v_scale", kValue},
    KvSpelling{"attn.q_scale", kQuery},
    KvSpelling{"attn.kv_scale", kKeyAndValue},
    KvSpelling{"k_proj.k_scale", kKey},
    KvSpelling{"v_proj.v_scale", kValue},
    KvSpelling{"q_proj.q_scale", kQuery},
    KvSpelling{"k_proj.output_scale", kKey},
    KvSpelling{"v_proj.output_scale", kValue},
    KvSpelling{"q_proj.output_scale", kQuery},
    KvSpelling{"qkv_proj.k_scale", kKey},
    KvSpelling{"qkv_proj.v_scale", kValue},
    KvSpelling{"qkv_proj.q_scale", kQuery},
    KvSpelling{"qkv_proj.kv_scale", kKeyAndValue},
};

/// "layers.0.mlp.gate_proj" -> {"layers.0.mlp.", "gate_proj"}
std::pair<std::string_view, std::string_view> split_last(std::string_view module) {
  const size_t dot = module.rfind('.');
  return dot == std::string_view::npos ? std::pair(""sv, module) : std::pair(module.substr(0, dot + 1), module.substr(dot + 1));
}

}  // namespace

NameKind name_kind(std::string_view stored) {
  for (const std::string_view prefix : kVisionPrefixes)
    if (stored.starts_with(prefix)) return NameKind::kVision;
  return stored.ends_with("rotary_emb.inv_freq") ? NameKind::kRotary : NameKind::kText;
}

std::string_view canonical_name(std::string_view stored) {
  for (const std::string_view prefix : kPrefixes)
    if (stored.starts_with(prefix)) return stored.substr(prefix.size());
  return stored;
}

std::string released_module(std::string_view canonical) {
  if (canonical.starts_with("lm_head") || canonical.starts_with("mtp.")) return std::string(canonical);
  return fmt::format("{}{}", kPrefixes.front(), canonical);
}

std::string_view module_of(std::string_view weight_name) {
  constexpr std::string_view kWeight = ".weight";
  return weight_name.ends_with(kWeight) ? weight_name.substr(0, weight_name.size() - kWeight.size()) : weight_name;
}

bool covers(std::string_view entry, std::string_view module) {
  return module.starts_with(entry) && (module.size() == entry.size() || module[entry.size()] == '.');
}

const Merged* merge_of(std::string_view module) {
  const std::string_view last = split_last(module).second;
  for (const Merged& merged : kMerged)
    for (const std::string_view member : merged.members)
      if (member == last) return &merged;
  return nullptr;
}

std::string merged_module(std::string_view module, const Merged& merged) {
  return fmt::format("{}{}", split_last(module).first, merged.name);
}

std::optional<KvScaleName> parse_kv_scale(std::string_view canonical) {
  constexpr std::string_view kAttention = "self_attn.";
  const size_t at = canonical.find(kAttention);
  if (at == std::string_view::npos) return std::nullopt;
  const std::string_view ending = canonical.substr(at + kAttention.size());
  for (const KvSpelling& spelling : kKvSpellings)
    if (spelling.ending == ending) return KvScaleName{spelling.kind, std::string(canonical.substr(0, at))};
  return std::nullopt;
}

bool looks_like_scale(std::string_view canonical) {
  const std::string_view last = split_last(canonical).second;
  for (const std::string_view part :
       {"scale"sv, "zero_point"sv, "qzeros"sv, "qweight"sv, "g_idx"sv, "packed"sv, "absmax"sv, "quant"sv, "scb"sv, "SCB"sv})
    if (last.find(part) != std::string_view::npos) return true;
  return false;
}

}  // namespace quern::weights
