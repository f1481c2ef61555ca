#pragma once

#include <string>
#include <vector>

#include "base/json.h"

namespace quern::app {

/// What a bug report should say of this machine: the build, the processor, memory, cards, drivers and what is known to be wrong with them; docs/cli.md lists the fields. Opens drivers.
Json examine_machine();
/// What is known to be wrong with the cards and drivers of this machine, in sentences.
std::vector<std::string> machine_findings();

}  // namespace quern::app
