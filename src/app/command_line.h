#pragma once

#include <span>
#include <string>
#include <vector>

#include "app/option.h"

namespace quern::app {

/// What a command line asks for.
struct Invocation {
  const Command* command = nullptr;  // null: only `output` is wanted
  std::string output;                // help or version, for stdout
};

/// Finds the command in `arguments` (argv without the program's name), stores all option values and says what to run. Underscores in option
/// names are read as dashes. Errors are usage errors: an unknown command or option comes with the nearest known name.
Result<Invocation> parse_command_line(const std::vector<Command>& commands, std::span<const std::string> arguments);

/// What `quern --help` prints.
std::string program_help(const std::vector<Command>& commands);

}  // namespace quern::app
