#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>

namespace quern::weights {

// Names of checkpoints and our canonical ones (model/tensors.h). "Module" is a name without ".weight".

/// What a stored name is, before anyone has asked whether the model wants it.
enum class NameKind : uint8_t { kText, kVision, kRotary };
NameKind name_kind(std::string_view stored);

/// The name without the prefix of its release: `model.language_model.`, `language_model.model.`, `language_model.` or `model.`.
std::string_view canonical_name(std::string_view stored);

/// Spellings of a canonical module in checkpoints and their configs, the released one first.
std::string released_module(std::string_view canonical);

/// "layers.3.mlp.up_proj.weight" -> "layers.3.mlp.up_proj"; other names as they are.
std::string_view module_of(std::string_view weight_name);

/// True when `entry` names `module` or something that contains it: equal, or equal up to a dot of `module`. Never a substring:
/// "mlp.gate" is not "mlp.gate_proj".
bool covers(std::string_view entry, std::string_view module);

/// A projection that some checkpoints store as rows of one merged tensor (model-spec.md 2.7).
struct Merged {
  std::string_view name;                      // "gate_up_proj"
  std::span<const std::string_view> members;  // in row order
};
/// The merge that `module` ("layers.0.mlp.gate_proj") may be part of.
const Merged* merge_of(std::string_view module);
/// "layers.0.mlp.gate_proj" -> "layers.0.mlp.gate_up_proj" for that merge.
std::string merged_module(std::string_view module, const Merged& merged);

/// A scale of the KV cache, in any spelling.
struct KvScaleName {
  enum class Kind : uint8_t { kQuery, kKey, kValue, kKeyAndValue };
  Kind kind = Kind::kKey;
  std::string layer;  // canonical prefix, "layers.3." or "mtp.layers.0."
};
std::optional<KvScaleName> parse_kv_scale(std::string_view canonical);

/// True for names that only quantization formats use. One that nobody consumes means that numbers would come out wrong.
bool looks_like_scale(std::string_view canonical);

}  // namespace quern::weights
