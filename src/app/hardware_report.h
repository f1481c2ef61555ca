#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include "base/json.h"
#include "base/result.h"

// `quern doctor --hardware-report`: one file from a machine that we do not have. It holds what its devices measure and nothing of whose they are.

namespace quern::app {

struct HardwareReportOptions {
  std::vector<std::string> devices;   // by name; empty: all cards that can be used, or the CPU where there is none
  std::filesystem::path model_dir;    // a model to decode with, beside the demo model; empty: none
  std::filesystem::path demo_dir;     // empty: where a checkout or an installation has it
  int num_threads = 0;
  bool quick = false;                 // small sizes
};

/// Measures, which takes a minute or two a device. What fails is in the report; an error is one of the options'.
Result<Json> hardware_report(const HardwareReportOptions& options);

/// The readable half of a report, a line each.
std::vector<std::string> report_summary(const Json& report);

/// What must not leave a machine.
struct PrivateWords {
  std::string host, user, home;
};
PrivateWords private_words();
/// The same without these words, and without file names but those of /dev, /sys, /proc and system libraries.
std::string without_private(std::string_view text, const PrivateWords& words);
Json without_private(const Json& value, const PrivateWords& words);

}  // namespace quern::app
