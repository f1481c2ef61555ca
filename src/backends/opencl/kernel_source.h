#pragma once

#include <span>
#include <string>
#include <string_view>

#include "base/result.h"

// The OpenCL C sources of this folder, kept in the program: a driver builds them for the device it meets.

namespace quern::opencl {

struct SourceFile {
  std::string_view name;  // "linear.cl", "numeric.clh"
  std::string_view text;
};

/// All files of this build.
std::span<const SourceFile> source_files();

/// The whole text of `unit`.cl, each header pasted in where it is first included.
Result<std::string> unit_source(std::string_view unit);

/// Machine code of one program: an archive of a binary for each of bmg-g21 and bmg-g31.
struct ProgramBinary {
  std::string_view unit, definitions, bytes;
};

/// Those that were compiled with this build; none where it had no ocloc.
std::span<const ProgramBinary> program_binaries();

}  // namespace quern::opencl
