#pragma once

#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/json.h"
#include "base/result.h"
#include "ops/linear.h"

namespace quern::weights {

/// What a config says about one linear layer.
struct DeclaredScheme {
  ops::WeightScheme scheme = ops::WeightScheme::kBF16;
  bool static_input_scale = false;
};

/// Which modules an entry of a config names: a name and everything inside it, `re:` a regular expression from the start of the name, a name
/// with `*`, or a class ("Linear", "Embedding").
class ModulePattern {
 public:
  enum class Kind : uint8_t { kName, kRegex, kGlob, kClass };  // the first that matches decides, in this order
  static Result<ModulePattern> parse(std::string_view text);
  ModulePattern(ModulePattern&&) noexcept;
  ModulePattern& operator=(ModulePattern&&) noexcept;
  ~ModulePattern();

  [[nodiscard]] Kind kind() const { return kind_; }
  /// `module` is canonical ("layers.0.mlp.up_proj"); the entry may have any release's prefix.
  [[nodiscard]] bool matches(std::string_view module) const;

 private:
  struct Regex;
  ModulePattern();
  Kind kind_ = Kind::kName;
  std::string text_;
  std::unique_ptr<Regex> regex_;
};

/// A quantization_config in our words. The scheme of a tensor is decided by what is stored (model-spec.md 2.5); this supplies what tensors
/// cannot tell, a cross-check, and the whole plan where there are no tensors yet.
class DeclaredQuantization {
 public:
  /// Null is a model without quantization. Errors name the format and what is supported.
  static Result<DeclaredQuantization> parse(const Json& quantization);

  [[nodiscard]] bool present() const { return !method_.empty(); }
  [[nodiscard]] const std::string& method() const { return method_; }  // "fp8", "compressed-tensors", "modelopt", or empty
  [[nodiscard]] bool fp8_kv() const { return fp8_kv_; }
  /// Of a linear's canonical module; empty: it is not quantized.
  [[nodiscard]] std::optional<DeclaredScheme> scheme_of(std::string_view module) const;

 private:
  friend class DeclaredParser;
  struct Group {
    std::vector<ModulePattern> targets;
    DeclaredScheme scheme;
  };
  std::string method_;
  std::vector<Group> groups_;
  std::vector<ModulePattern> ignored_;
  bool fp8_kv_ = false;
};

}  // namespace quern::weights
