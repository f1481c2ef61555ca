#include <cstdio>
#include <set>
#include <string>

#include "backends/opencl/kernel_source.h"

// Reads back what was linked into this program. Exit code 1: an archive is missing, twice there, or without the code of one of the chips.

int main() {
  std::set<std::string> seen;
  int num_wrong = 0;
  for (const quern::opencl::ProgramBinary& program : quern::opencl::program_binaries()) {
    bool whole = program.bytes.starts_with("!<arch>\n") && seen.insert(std::string(program.unit) + " " + std::string(program.definitions)).second;
    for (const char* chip : {"64.20.1.0/", "64.20.2.0/"}) whole = whole && program.bytes.find(chip) != std::string_view::npos;
    std::printf("%s %s: %zu bytes%s\n", std::string(program.unit).c_str(), std::string(program.definitions).c_str(), program.bytes.size(), whole ? "" : ", NOT WHOLE");
    num_wrong += whole ? 0 : 1;
  }
  if (seen.size() != NUM_PROGRAMS) std::printf("%zu programs, not %d\n", seen.size(), NUM_PROGRAMS);
  return num_wrong == 0 && seen.size() == NUM_PROGRAMS ? 0 : 1;
}
