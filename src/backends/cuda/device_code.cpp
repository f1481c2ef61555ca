#include "backends/cuda/device_code.h"

#include <algorithm>
#include <charconv>

namespace quern::cuda {

namespace {

struct Architecture {
  int number = 0;            // 90
  bool exact = false;        // 90a: runs on sm_90 alone
  bool translated = false;   // 90-virtual
};

Architecture parse(std::string_view text) {
  Architecture result;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), result.number);
  CHECK(error == std::errc());
  const std::string_view rest = text.substr(static_cast<size_t>(end - text.data()));
  result.exact = rest.starts_with("a");
  result.translated = rest.ends_with("-virtual");
  return result;
}

bool runs_on(const Architecture& code, int device) {
  if (code.exact) return code.number == device;
  if (code.translated) return code.number <= device;
  return code.number / 10 == device / 10 && code.number <= device;
}

}  // namespace

bool runs_code_for(std::string_view architecture, int device) {
  const auto names = code_architectures();
  return runs_on(parse(architecture), device) && std::find(names.begin(), names.end(), architecture) != names.end();
}

bool waits_for_predecessors(std::span<const std::string_view> architectures, int device) {
  return std::any_of(architectures.begin(), architectures.end(), [&](std::string_view name) {
    const Architecture code = parse(name);
    return code.number >= 90 && !code.translated && runs_on(code, device);
  });
}

std::vector<std::string_view> architectures_from(int first, std::span<const std::string_view> architectures) {
  std::vector<std::string_view> found;
  std::copy_if(architectures.begin(), architectures.end(), std::back_inserter(found), [&](std::string_view name) { return parse(name).number >= first; });
  return found;
}

Result<void> covers(std::span<const std::string_view> architectures, int device) {
  for (const std::string_view architecture : architectures)
    if (runs_on(parse(architecture), device)) return {};
  return make_error(ErrorCode::kUnsupported, "sm_{} is not supported: this build has code for {}", device, fmt::join(architectures, ", "));
}

std::string code_for(std::span<const std::string_view> architectures, int device) {
  // Machine code of the device's own before that of its relatives, and that before code which is translated; of each the newest.
  std::string_view best;
  const auto rank = [](std::string_view name) {
    const Architecture code = parse(name);
    return (code.exact ? 2000 : code.translated ? 0 : 1000) + code.number;
  };
  for (const std::string_view name : architectures)
    if (runs_on(parse(name), device) && (best.empty() || rank(name) > rank(best))) best = name;
  if (best.empty()) return {};
  const bool translated = parse(best).translated;
  return translated ? fmt::format("code for sm_{}, translated by the driver", parse(best).number) : fmt::format("machine code of sm_{}", best);
}

Result<void> build_covers(int device) {
  if (device_code().empty()) return make_error(ErrorCode::kUnsupported, "this build has no CUDA kernels: it was made without nvcc");
  return covers(code_architectures(), device);
}

}  // namespace quern::cuda
