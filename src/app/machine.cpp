#include "app/machine.h"

#include <sched.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <fstream>
#include <set>
#include <sstream>
#include <string_view>

#include "base/file.h"

namespace quern::app {
namespace {

constexpr std::array<std::string_view, 9> kFeatures = {"avx2",       "fma",         "f16c",     "avx512f", "avx512bw",
                                                       "avx512vbmi", "avx512_bf16", "amx_bf16", "amx_int8"};

std::vector<std::string> lines_of(const char* path) {
  std::ifstream file(path);
  std::vector<std::string> lines;
  for (std::string line; std::getline(file, line);) lines.push_back(line);
  return lines;
}

/// The value of the first "key : value" or "key=value" line.
std::string value_of(const std::vector<std::string>& lines, std::string_view key) {
  for (const std::string& line : lines) {
    if (!line.starts_with(key)) continue;
    const size_t separator = line.find_first_of(":=");
    if (separator == std::string::npos) continue;
    const size_t begin = line.find_first_not_of(" \t\"", separator + 1);
    if (begin == std::string::npos) continue;
    return line.substr(begin, line.find_last_not_of(" \t\"") + 1 - begin);
  }
  return {};
}

uint64_t number_in(std::string_view text) {
  uint64_t value = 0;
  std::from_chars(text.data(), text.data() + text.size(), value);
  return value;
}

int usable_cores() {
  cpu_set_t set;
  CPU_ZERO(&set);
  return sched_getaffinity(0, sizeof set, &set) == 0 ? CPU_COUNT(&set) : 0;
}

}  // namespace

Machine inspect_machine() {
  Machine machine;
  machine.system = value_of(lines_of("/etc/os-release"), "PRETTY_NAME");
  const std::vector<std::string> cpu = lines_of("/proc/cpuinfo");
  machine.cpu = value_of(cpu, "model name");
  std::istringstream flags(value_of(cpu, "flags"));
  std::set<std::string> present;
  for (std::string flag; flags >> flag;) present.insert(flag);
  for (const std::string_view feature : kFeatures) {
    if (present.contains(std::string(feature))) machine.cpu_features.emplace_back(feature);
  }
  machine.num_cores = usable_cores();
  const std::vector<std::string> memory = lines_of("/proc/meminfo");
  machine.memory_bytes = number_in(value_of(memory, "MemTotal")) * 1024;
  machine.available_bytes = number_in(value_of(memory, "MemAvailable")) * 1024;
  for (const char* path : {"/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"}) {
    const std::vector<std::string> limit = lines_of(path);
    if (!limit.empty() && machine.memory_limit_bytes == 0) machine.memory_limit_bytes = number_in(limit[0]);
  }
  if (machine.memory_limit_bytes >= machine.memory_bytes) machine.memory_limit_bytes = 0;  // version 1 writes "none" as a huge number
  return machine;
}

std::vector<std::string> opened_libraries() {
  std::set<std::string> libraries;
  for (const std::string& line : lines_of("/proc/self/maps")) {
    const size_t path = line.find('/');
    if (path != std::string::npos && line.find(".so", path) != std::string::npos) libraries.insert(line.substr(path));
  }
  return {libraries.begin(), libraries.end()};
}

}  // namespace quern::app
