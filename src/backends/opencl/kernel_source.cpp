#include "backends/opencl/kernel_source.h"

#include <algorithm>
#include <set>

namespace quern::opencl {

namespace {

Result<void> append(std::string_view name, std::set<std::string_view>& seen, std::string& out) {
  const auto files = source_files();
  const auto file = std::find_if(files.begin(), files.end(), [&](const SourceFile& f) { return f.name == name; });
  if (file == files.end()) return make_error(ErrorCode::kInternal, "this build has no OpenCL source '{}'", name);
  if (!seen.insert(file->name).second) return {};
  constexpr std::string_view kInclude = "#include \"backends/opencl/";  // headers of this folder alone
  std::string_view rest = file->text;
  int line_number = 0;
  out += fmt::format("#line 1 \"{}\"\n", name);
  while (!rest.empty()) {
    const size_t end = rest.find('\n');
    const std::string_view line = rest.substr(0, end);
    rest = end == std::string_view::npos ? std::string_view() : rest.substr(end + 1);
    ++line_number;
    if (line.starts_with(kInclude)) {
      const std::string_view included = line.substr(kInclude.size(), line.find('"', kInclude.size()) - kInclude.size());
      RETURN_IF_ERROR(append(included, seen, out));
      out += fmt::format("#line {} \"{}\"\n", line_number + 1, name);
    } else {
      out.append(line).push_back('\n');
    }
  }
  return {};
}

}  // namespace

Result<std::string> unit_source(std::string_view unit) {
  std::string text;
  std::set<std::string_view> seen;
  RETURN_IF_ERROR(append(fmt::format("{}.cl", unit), seen, text));
  return text;
}

}  // namespace quern::opencl
