#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "app/option.h"

// Completion scripts for shells, written from the option tables: commands, their options, the words that an option takes, files.

namespace quern::app {

enum class Shell : uint8_t { kBash, kZsh, kFish };

/// The script for one shell; to be sourced, or put where that shell looks for completions.
std::string completion_script(Shell shell, const std::vector<Command>& commands);

}  // namespace quern::app
