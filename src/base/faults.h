#pragma once

#include <fmt/format.h>

#include <cstddef>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/result.h"

namespace quern {

/// Collects what is wrong with one thing, so that a user hears of everything at once.
class Faults {
 public:
  /// Further faults than this are counted, not printed.
  static constexpr size_t kShown = 20;

  template <class... Args>
  void add(fmt::format_string<Args...> format, Args&&... args) {
    add_text(fmt::format(format, std::forward<Args>(args)...));
  }
  void add(const Error& error) { add_text(error.message); }

  [[nodiscard]] bool empty() const { return faults_.empty(); }
  [[nodiscard]] size_t size() const { return faults_.size(); }

  /// "`what`: the fault", or "`what`: 3 faults" with one line for each.
  [[nodiscard]] Error to_error(std::string_view what, ErrorCode code = ErrorCode::kInvalidArgument) const {
    if (faults_.size() == 1) return make_error(code, "{}: {}", what, faults_.front());
    std::string text = fmt::format("{}: {} faults", what, faults_.size());
    for (size_t i = 0; i < faults_.size() && i < kShown; ++i) text += "\n  " + faults_[i];
    if (faults_.size() > kShown) text += fmt::format("\n  and {} more", faults_.size() - kShown);
    return Error{code, std::move(text), {}};
  }

 private:
  /// Neighbours that share one cause are one fault.
  void add_text(std::string text) {
    if (faults_.empty() || faults_.back() != text) faults_.push_back(std::move(text));
  }
  std::vector<std::string> faults_;
};

}  // namespace quern
