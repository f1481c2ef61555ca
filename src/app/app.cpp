#include "app/app.h"

#include <fmt/format.h>

#include <cstdio>

#include "app/command_line.h"
#include "app/commands.h"
#include "app/exit_code.h"
#include "base/log_mark.h"

namespace quern::app {

std::vector<Command> all_commands() {
  return {serve_command(),         chat_command(),          plan_command(),           kernels_command(),
          devices_command(),       eval_command(),          quantize_command(),       bench_latency_command(),
          bench_throughput_command(), bench_serve_command(), doctor_command(),        completion_command(),
          man_command()};
}

void print_error(const Error& error) { fmt::print(stderr, "{}quern: {}\n", log_mark(), error.message); }

int run(std::span<const std::string> arguments) {
  const std::vector<Command> commands = all_commands();
  Result<Invocation> invocation = parse_command_line(commands, arguments);
  if (!invocation) {
    fmt::print(stderr, "{}{}\n", invocation.error().message.starts_with("quern") ? "" : "quern: ", invocation.error().message);
    return kUsage;
  }
  if (invocation->command == nullptr) {
    fmt::print("{}", invocation->output);
    return kSuccess;
  }
  return invocation->command->run();
}

}  // namespace quern::app
