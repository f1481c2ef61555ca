#include "app/command_line.h"

#include <CLI/CLI.hpp>
#include <algorithm>
#include <map>

#include "app/build_info.h"
#include "app/nearest.h"

// CLI11 reads one option table; it throws, and this is the file that catches. Which command is meant, names with underscores, names of
// several letters behind one dash (-tp) and the nearest name to an unknown one are settled before.

namespace quern::app {
namespace {

std::vector<std::string> split_names(const Option& option) {
  const std::vector<std::string_view> names = split_at_commas(option.names);
  return {names.begin(), names.end()};
}

/// "-tp": CLI11 would read -t with the value "p".
bool is_long_name_behind_one_dash(std::string_view name) { return name.size() > 2 && name[0] == '-' && name[1] != '-'; }

std::string with_dashes(std::string_view name) {
  std::string result(name);
  std::replace(result.begin(), result.end(), '_', '-');
  return result;
}

bool looks_like_an_option(std::string_view argument) {
  if (argument.size() < 2 || argument[0] != '-') return false;
  return argument[1] == '-' || (argument[1] < '0' || argument[1] > '9');  // "-1" is a value, "-" is stdin
}

/// Finds the command whose words stand first; `arguments` loses them.
Result<const Command*> find_command(const std::vector<Command>& commands, std::span<const std::string>& arguments) {
  for (size_t words = std::min<size_t>(2, arguments.size()); words > 0; --words) {
    std::string name = arguments[0];
    if (words == 2) name += " " + arguments[1];
    for (const Command& command : commands) {
      if (command.name != name) continue;
      arguments = arguments.subspan(words);
      return &command;
    }
  }
  const std::string& given = arguments[0];
  std::vector<std::string> second_words, names;
  for (const Command& command : commands) {
    if (command.name.starts_with(given + " ")) second_words.push_back(command.name.substr(given.size() + 1));
    names.push_back(command.name.substr(0, command.name.find(' ')));
  }
  if (!second_words.empty()) {
    const std::string choices = fmt::format("{}", fmt::join(second_words, ", "));
    if (arguments.size() < 2 || looks_like_an_option(arguments[1])) return invalid_argument("`quern {}` needs one of: {}", given, choices);
    return invalid_argument("`quern {} {}` is not a command; there are: {}", given, arguments[1], choices);
  }
  const std::string nearest = nearest_name(given, names);
  if (nearest.empty()) return invalid_argument("'{}' is not a command; `quern --help` lists them", given);
  return invalid_argument("'{}' is not a command; did you mean `quern {}`?", given, nearest);
}

/// Option names as the table spells them, "--name=value" split in two, and an error for a name that the table lacks.
Result<std::vector<std::string>> normalize(const Command& command, std::span<const std::string> arguments) {
  std::map<std::string, std::pair<std::string, const Option*>> known;  // name -> the option's long name, option
  std::vector<std::string> spellings = {"--help"};
  for (const OptionGroup& group : command.groups) {
    for (const Option& option : group.options) {
      const std::vector<std::string> names = split_names(option);
      for (const std::string& name : names) {  // the last name of an option is a long one
        known[name] = {names.back(), &option};
        spellings.push_back(name);
      }
    }
  }
  std::vector<std::string> result;
  for (size_t i = 0; i < arguments.size(); ++i) {
    const std::string& argument = arguments[i];
    if (argument == "--") {
      result.insert(result.end(), arguments.begin() + static_cast<ptrdiff_t>(i), arguments.end());
      break;
    }
    if (!looks_like_an_option(argument)) {
      result.push_back(argument);
      continue;
    }
    const size_t equals = argument.find('=');
    const std::string name = with_dashes(argument.substr(0, equals));
    if (name == "--help" || name == "-h") {
      result.push_back("--help");
      continue;
    }
    const auto found = known.find(name);
    if (found == known.end()) {
      const std::string nearest = nearest_name(name, spellings);
      if (nearest.empty()) return invalid_argument("unknown option {}; `quern {} --help` lists them all", name, command.name);
      return invalid_argument("unknown option {}; did you mean {}?", name, nearest);
    }
    const auto& [canonical, option] = found->second;
    const bool takes_value = !option->value.empty();
    if (!takes_value && equals != std::string::npos) return invalid_argument("{} takes no value", name);
    if (!takes_value) {
      result.push_back(canonical);
      continue;
    }
    if (equals == std::string::npos && i + 1 == arguments.size()) return invalid_argument("{} needs a value ({})", name, option->value);
    const std::string value = equals == std::string::npos ? arguments[++i] : argument.substr(equals + 1);
    if (value.empty()) return invalid_argument("{} needs a value ({})", name, option->value);
    result.push_back(canonical + "=" + value);  // joined, so that a value that begins with a dash stays a value
  }
  return result;
}

void add_option(CLI::App& app, const OptionGroup& group, const Option& option, std::optional<Error>& failure) {
  std::string names;
  for (const std::string& name : split_names(option)) {
    if (is_long_name_behind_one_dash(name)) continue;
    names += (names.empty() ? "" : ",") + name;
  }
  const auto store = [&option, &failure, names](const CLI::results_t& values) {
    for (const std::string& value : values) {
      if (failure) break;
      if (Result<void> done = option.set(value); !done) failure = done.error().with_context(names);
    }
    return true;
  };
  CLI::Option* added = nullptr;
  if (option.value.empty()) {
    added = app.add_flag_callback(
        names, [store] { store({""}); }, option.help);
  } else {
    added = app.add_option(names, CLI::callback_t(store), option.help);
    added->expected(1)->type_name(option.value);
    added->multi_option_policy(option.repeatable ? CLI::MultiOptionPolicy::TakeAll : CLI::MultiOptionPolicy::TakeLast);
  }
  added->group(group.heading);
}

/// Runs CLI11 over the table. Returns help when it was asked for, otherwise an empty string.
Result<std::string> run_parser(const Command& command, std::vector<std::string> arguments) {
  CLI::App app(command.summary, "quern " + command.name);
  app.get_formatter()->column_width(42);
  app.get_formatter()->label("REQUIRED", "");
  app.set_help_flag("-h,--help", "Print this help and exit");
  std::optional<Error> failure;
  for (const Positional& positional : command.positionals) {
    CLI::Option* added = app.add_option(positional.name, CLI::callback_t([&failure, &positional](const CLI::results_t& values) {
                                          if (Result<void> done = positional.set(values.back()); !done)
                                            failure = done.error().with_context(positional.name);
                                          return true;
                                        }),
                                        "");
    added->expected(1)->type_name("");
    if (positional.required) added->required();
  }
  for (const OptionGroup& group : command.groups) {
    for (const Option& option : group.options) add_option(app, group, option, failure);
  }
  try {
    std::reverse(arguments.begin(), arguments.end());  // as CLI11 wants a vector
    app.parse(std::move(arguments));
  } catch (const CLI::CallForHelp&) {
    return app.help();
  } catch (const CLI::RequiredError& missing) {
    for (const Positional& positional : command.positionals) {
      if (std::string_view(missing.what()).starts_with(positional.name))
        return invalid_argument("{} is missing; `quern {} --help` shows how it is used", positional.name, command.name);
    }
    return invalid_argument("{}", missing.what());
  } catch (const CLI::ExtrasError& extras) {
    return invalid_argument("one argument too many: {}", extras.what());
  } catch (const CLI::ParseError& error) {
    return invalid_argument("{}", error.what());
  }
  if (failure) return *failure;
  return std::string();
}

}  // namespace

std::string program_help(const std::vector<Command>& commands) {
  std::string text = fmt::format(
      "quern {}: serves Qwen3.5/3.6 models over an OpenAI-compatible API\n\n"
      "Usage: quern COMMAND [OPTIONS]\n\nCommands:\n",
      version());
  for (const Command& command : commands) text += fmt::format("  {:<18}{}\n", command.name, command.summary);
  text += "\n`quern COMMAND --help` lists a command's options; `quern --version` prints the version.\n";
  return text;
}

Result<Invocation> parse_command_line(const std::vector<Command>& commands, std::span<const std::string> arguments) {
  if (arguments.empty()) return Error{ErrorCode::kInvalidArgument, "no command given\n\n" + program_help(commands), {}};
  const std::string& first = arguments[0];
  if (first == "--help" || first == "-h" || first == "help") return Invocation{nullptr, program_help(commands)};
  if (first == "--version" || first == "-V" || first == "version")
    return Invocation{nullptr, fmt::format("quern {}\n", version_with_commit())};
  if (looks_like_an_option(first))
    return invalid_argument("options follow a command, and {} stands before one; `quern --help` lists the commands", first);
  ASSIGN_OR_RETURN(const Command* command, find_command(commands, arguments));
  const auto in_command = [&](Error error) { return error.with_context("quern " + command->name); };
  if (!command->why_absent.empty()) return in_command(Error{ErrorCode::kUnsupported, command->why_absent, {}});
  Result<std::vector<std::string>> normalized = normalize(*command, arguments);
  if (!normalized) return in_command(std::move(normalized).error());
  Result<std::string> help = run_parser(*command, std::move(normalized).value());
  if (!help) return in_command(std::move(help).error());
  if (!help->empty()) return Invocation{nullptr, *help};
  return Invocation{command, {}};
}

}  // namespace quern::app
