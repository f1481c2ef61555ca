#pragma once

#include <string>
#include <vector>

#include "app/option.h"

// Manual pages in man(7)'s macros, written from the option tables.

namespace quern::app {

/// "quern-bench-latency", without the section.
std::string man_page_name(const Command& command);
/// The page of one command.
std::string man_page(const Command& command);
/// quern(1), which lists the commands.
std::string program_man_page(const std::vector<Command>& commands);

}  // namespace quern::app
