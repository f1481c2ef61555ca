#include <fmt/format.h>

#include <memory>

#include "app/commands.h"
#include "app/completion.h"
#include "app/exit_code.h"

// `quern completion SHELL`: a completion script on stdout.

namespace quern::app {

Command completion_command() {
  auto shell = std::make_shared<Shell>();
  Command command{.name = "completion", .summary = "Print a completion script for a shell: bash, zsh or fish"};
  command.description =
      "For bash: source <(quern completion bash), in a terminal or in ~/.bashrc. For zsh: into a file _quern in a folder of $fpath. For "
      "fish: into "
      "~/.config/fish/completions/quern.fish.";
  command.positionals.push_back(
      {"SHELL", to_choice<Shell>(*shell, {{"bash", Shell::kBash}, {"zsh", Shell::kZsh}, {"fish", Shell::kFish}})});
  command.run = [shell]() -> int {
    fmt::print("{}", completion_script(*shell, all_commands()));
    return kSuccess;
  };
  return command;
}

}  // namespace quern::app
