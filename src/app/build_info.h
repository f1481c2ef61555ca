#pragma once

#include <string>

namespace quern::app {

/// "0.1.0"
std::string version();
/// "0.1.0 (d253dd0)"; without the commit where the source is no git checkout.
std::string version_with_commit();

/// How this program was built, for `doctor` and for the results of benchmarks.
struct BuildInfo {
  std::string version, commit, compiler, build_type;
  std::string date;  // of the commit, or of the build where the source is no git checkout: "2026-11-30"
  bool server = false;
  std::string cuda, opencl;  // "AUTO", "ON" or "OFF" as configured
};
BuildInfo build_info();

}  // namespace quern::app
