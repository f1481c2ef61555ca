#pragma once

#include <span>
#include <string>

#include "base/result.h"

namespace quern::app {

/// The whole program: argv without its first word in, an ExitCode out.
int run(std::span<const std::string> arguments);

/// Prints "quern: ..." to stderr; for the error that ends a command.
void print_error(const Error& error);

}  // namespace quern::app
