#include <fmt/format.h>

#include <algorithm>
#include <memory>

#include "app/app.h"
#include "app/commands.h"
#include "app/exit_code.h"
#include "app/man_page.h"
#include "app/nearest.h"
#include "base/file.h"

// `quern man [COMMAND]`: a manual page on stdout, or all of them into a folder.

namespace quern::app {
namespace {

struct ManOptions {
  std::string command, second_word;
  std::filesystem::path output_dir;
};

Result<void> write_pages(const std::vector<Command>& commands, const std::filesystem::path& folder) {
  RETURN_IF_ERROR(write_file(folder / "quern.1", program_man_page(commands)));
  for (const Command& command : commands) RETURN_IF_ERROR(write_file(folder / (man_page_name(command) + ".1"), man_page(command)));
  return {};
}

Result<void> man(const ManOptions& options) {
  const std::vector<Command> commands = all_commands();
  if (!options.output_dir.empty()) return write_pages(commands, options.output_dir);
  if (options.command.empty()) {
    fmt::print("{}", program_man_page(commands));
    return {};
  }
  const std::string name = options.command + (options.second_word.empty() ? "" : " " + options.second_word);
  const auto found = std::ranges::find(commands, name, &Command::name);
  if (found == commands.end()) {
    std::vector<std::string> names;
    for (const Command& command : commands) names.push_back(command.name);
    const std::string nearest = nearest_name(name, names);
    return invalid_argument("there is no command '{}'{}", name,
                            nearest.empty() ? "" : fmt::format("; did you mean `quern man {}`?", nearest));
  }
  fmt::print("{}", man_page(*found));
  return {};
}

}  // namespace

Command man_command() {
  auto options = std::make_shared<ManOptions>();
  Command command{.name = "man", .summary = "Print a manual page, for `man -l -`"};
  command.positionals = {{"COMMAND", to_text(options->command), false}, {"SUBCOMMAND", to_text(options->second_word), false}};
  command.groups.push_back(
      {"Output", {{"--output-dir", "FOLDER", "Write the pages of all commands into this folder instead", to_path(options->output_dir)}}});
  command.run = [options]() -> int {
    if (Result<void> done = man(*options); !done) {
      print_error(done.error());
      return kFailure;
    }
    return kSuccess;
  };
  return command;
}

}  // namespace quern::app
