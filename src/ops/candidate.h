#pragma once

#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/result.h"
#include "ops/device.h"

// A kernel table that cannot have holes, and refusals that always speak (style.md section 5).

namespace quern::ops {

/// Whether a candidate takes a problem and, if not, why.
struct Verdict {
  bool accepted = false;
  std::string reason;  // of a refusal
};
inline Verdict accept() { return {true, {}}; }
template <class... Args>
Verdict refuse(fmt::format_string<Args...> format, Args&&... args) {
  return {false, fmt::format(format, std::forward<Args>(args)...)};
}

/// Launches on the device that one call of a kernel makes, for models of speed; 0: not counted.
struct LaunchCounts {
  int32_t decode = 0;  // for up to 8 decode rows
  int32_t prompt = 0;  // for up to 512 prompt rows of one sequence
};

template <class Op>
struct Candidate {
  std::string_view name;  // platform, instruction, trick: "cpu.avx512.vbmi", always "<platform>.plain" last
  /// A pure function of numbers: no device is opened to ask it.
  Verdict (*accepts)(const typename Op::Problem&, const DeviceTraits&);
  Result<std::unique_ptr<typename Op::Kernel>> (*make)(const typename Op::Problem&, Device&);
  bool by_request = false;  // taken only where the user names it: not yet measured, or better only in some respect
  LaunchCounts launches = {};
};

/// Why a platform has no kernel for an op at all.
struct Absent {
  std::string_view why;
};

/// Candidates of one op on one platform, best first. There is no empty list without a reason.
template <class Op>
class CandidateList {
 public:
  constexpr CandidateList(Absent why) : why_absent_(why.why) {}  // NOLINT(google-explicit-constructor)
  template <size_t N>
  constexpr CandidateList(const Candidate<Op> (&best_first)[N]) : candidates_(best_first) {}  // NOLINT(google-explicit-constructor)

  [[nodiscard]] constexpr std::span<const Candidate<Op>> candidates() const { return candidates_; }
  [[nodiscard]] constexpr std::string_view why_absent() const { return why_absent_; }

 private:
  std::span<const Candidate<Op>> candidates_;
  std::string_view why_absent_;
};

}  // namespace quern::ops
