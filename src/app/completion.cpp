#include "app/completion.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <map>

#include "base/check.h"

namespace quern::app {
namespace {

std::string replace_all(std::string text, std::string_view from, std::string_view to) {
  for (size_t at = text.find(from); at != std::string::npos; at = text.find(from, at + to.size())) text.replace(at, from.size(), to);
  return text;
}

/// In single quotes of a POSIX shell.
std::string single_quoted(std::string_view text) { return "'" + replace_all(std::string(text), "'", "'\\''") + "'"; }

/// "bench latency" -> "bench"; the second word of those that have one.
std::string first_word(const Command& command) { return command.name.substr(0, command.name.find(' ')); }
std::string second_word(const Command& command) {
  const size_t space = command.name.find(' ');
  return space == std::string::npos ? "" : command.name.substr(space + 1);
}

/// What may stand first, each once, with a summary: that of the command, or how many there are.
std::vector<std::pair<std::string, std::string>> first_words(const std::vector<Command>& commands) {
  std::vector<std::pair<std::string, std::string>> words;
  for (const Command& command : commands) {
    const std::string word = first_word(command);
    if (second_word(command).empty()) {
      words.emplace_back(word, command.summary);
    } else if (words.empty() || words.back().first != word) {
      words.emplace_back(word, fmt::format("{} ...", word));
    }
  }
  words.emplace_back("help", "List the commands");
  words.emplace_back("version", "Print the version");
  return words;
}

/// Second words by first word.
std::map<std::string, std::vector<std::pair<std::string, std::string>>> second_words(const std::vector<Command>& commands) {
  std::map<std::string, std::vector<std::pair<std::string, std::string>>> words;
  for (const Command& command : commands) {
    if (const std::string word = second_word(command); !word.empty()) words[first_word(command)].emplace_back(word, command.summary);
  }
  return words;
}

std::string joined_firsts(const std::vector<std::pair<std::string, std::string>>& words) {
  std::string text;
  for (const auto& [word, summary] : words) text += (text.empty() ? "" : " ") + word;
  return text;
}

/// Calls `visit(option, names)` for every option of the command, --help included.
template <class Visit>
void for_each_option(const Command& command, const Visit& visit) {
  for (const OptionGroup& group : command.groups) {
    for (const Option& option : group.options) visit(option, split_at_commas(option.names));
  }
  const Option help{.names = "-h,--help", .help = "Print this help and exit"};
  visit(help, split_at_commas(help.names));
}

// bash

std::string bash_command(const Command& command) {
  std::vector<std::string> names;
  std::vector<std::string> paths, free;  // patterns of `case`
  std::string words;
  for_each_option(command, [&](const Option& option, const std::vector<std::string_view>& all) {
    for (const std::string_view name : all) names.emplace_back(name);
    if (option.value.empty()) return;
    if (!option.set.words.empty()) {
      words += fmt::format("        {}) values={} ;;\n", fmt::join(all, "|"),
                           single_quoted(fmt::format("{}", fmt::join(option.set.words, " "))));
    } else if (option.set.is_path) {
      paths.push_back(fmt::format("{}", fmt::join(all, "|")));
    } else {
      free.push_back(fmt::format("{}", fmt::join(all, "|")));
    }
  });
  std::string text =
      fmt::format("    {})\n      names={}\n", single_quoted(command.name), single_quoted(fmt::format("{}", fmt::join(names, " "))));
  text += "      case $previous in\n" + words;
  if (!paths.empty()) text += fmt::format("        {}) files=yes ;;\n", fmt::join(paths, "|"));
  if (!free.empty()) text += fmt::format("        {}) return ;;\n", fmt::join(free, "|"));
  text += "        *)\n";
  std::vector<std::string> positional_words;
  bool path = false;
  for (const Positional& positional : command.positionals) {
    path = path || positional.set.is_path;
    positional_words.insert(positional_words.end(), positional.set.words.begin(), positional.set.words.end());
  }
  text += fmt::format("          if [[ $current == -* ]]; then values=$names; else values={}{}; fi ;;\n",
                      single_quoted(fmt::format("{}", fmt::join(positional_words, " "))), path ? " files=yes" : "");
  return text + "      esac ;;\n";
}

std::string bash_script(const std::vector<Command>& commands) {
  std::string text =
      "# bash completion of quern, made by `quern completion bash`\n"
      "_quern() {\n"
      "  local current=${COMP_WORDS[COMP_CWORD]} previous=${COMP_WORDS[COMP_CWORD-1]} command=${COMP_WORDS[1]}\n"
      "  local names='' values='' files=''\n"
      "  COMPREPLY=()\n";
  text += fmt::format("  if ((COMP_CWORD == 1)); then\n    mapfile -t COMPREPLY < <(compgen -W {} -- \"$current\")\n    return\n  fi\n",
                      single_quoted(joined_firsts(first_words(commands)) + " --help --version"));
  for (const auto& [first, seconds] : second_words(commands)) {
    text += fmt::format(
        "  if [[ $command == {0} ]]; then\n    if ((COMP_CWORD == 2)); then\n      mapfile -t COMPREPLY < <(compgen -W {1} -- "
        "\"$current\")\n"
        "      return\n    fi\n    command=\"{0} ${{COMP_WORDS[2]}}\"\n  fi\n",
        first, single_quoted(joined_firsts(seconds)));
  }
  text +=
      "  # --name=value comes as three words\n"
      "  if [[ $current == = ]]; then current=''; elif [[ $previous == = ]]; then previous=${COMP_WORDS[COMP_CWORD-2]}; fi\n"
      "  case $command in\n";
  for (const Command& command : commands) text += bash_command(command);
  text +=
      "    *) return ;;\n"
      "  esac\n"
      "  if [[ -n $files ]]; then\n"
      "    compopt -o filenames\n"
      "    mapfile -t COMPREPLY < <(compgen -f -- \"$current\")\n"
      "  fi\n"
      "  if [[ -n $values ]]; then mapfile -t -O \"${#COMPREPLY[@]}\" COMPREPLY < <(compgen -W \"$values\" -- \"$current\"); fi\n"
      "}\n"
      "complete -F _quern quern\n";
  return text;
}

// zsh

/// Inside of "[...]" and ":...:" of an _arguments specification.
std::string zsh_escaped(std::string_view text) {
  std::string result;
  for (const char c : text) {
    if (c == '[' || c == ']' || c == ':' || c == '\\') result += '\\';
    result += c;
  }
  return result;
}

/// ":message:action" for a value.
std::string zsh_value(std::string_view name, const Setter& set) {
  std::string action;
  if (set.is_path) action = "_files";
  if (!set.words.empty()) action = fmt::format("({})", fmt::join(set.words, " "));
  return fmt::format(":{}:{}", zsh_escaped(name), action);
}

std::string zsh_command(const Command& command) {
  std::vector<std::string> specifications;
  for_each_option(command, [&](const Option& option, const std::vector<std::string_view>& names) {
    for (const std::string_view name : names) {
      const bool takes_value = !option.value.empty();
      const bool joined = takes_value && name.starts_with("--");  // --name value and --name=value
      specifications.push_back(
          single_quoted(fmt::format("{}{}{}[{}]{}", option.repeatable ? "*" : "", name, joined ? "=" : "", zsh_escaped(option.help),
                                    takes_value ? zsh_value(option.value, option.set) : "")));
    }
  });
  for (size_t i = 0; i < command.positionals.size(); ++i) {
    const Positional& positional = command.positionals[i];
    specifications.push_back(
        single_quoted(fmt::format("{}{}{}", i + 1, positional.required ? "" : ":", zsh_value(positional.name, positional.set))));
  }
  return fmt::format("    {})\n      _arguments \\\n        {} ;;\n", single_quoted(command.name),
                     fmt::join(specifications, " \\\n        "));
}

std::string zsh_words(std::string_view variable, const std::vector<std::pair<std::string, std::string>>& words) {
  std::string text = fmt::format("  {}=(\n", variable);
  for (const auto& [word, summary] : words)
    text += fmt::format("    {}\n", single_quoted(fmt::format("{}:{}", word, replace_all(summary, ":", "\\:"))));
  return text + "  )\n";
}

std::string zsh_script(const std::vector<Command>& commands) {
  std::string text =
      "#compdef quern\n"
      "# zsh completion of quern, made by `quern completion zsh`\n"
      "_quern() {\n"
      "  local -a choices\n"
      "  local command=${words[2]}\n";
  text += zsh_words("choices", first_words(commands));
  text += "  if ((CURRENT == 2)); then\n    _describe command choices\n    return\n  fi\n  shift words\n  ((CURRENT--))\n";
  for (const auto& [first, seconds] : second_words(commands)) {
    text += fmt::format("  if [[ $command == {} ]]; then\n", first) + zsh_words("choices", seconds);
    text += fmt::format(
        "    if ((CURRENT == 2)); then\n      _describe command choices\n      return\n    fi\n    command=\"{} ${{words[2]}}\"\n"
        "    shift words\n    ((CURRENT--))\n  fi\n",
        first);
  }
  text += "  case $command in\n";
  for (const Command& command : commands) text += zsh_command(command);
  // Sourced it registers itself; found in $fpath it is the function's body.
  text += "  esac\n}\nif [[ $funcstack[1] == _quern ]]; then\n  _quern \"$@\"\nelse\n  compdef _quern quern\nfi\n";
  return text;
}

// fish

std::string fish_script(const std::vector<Command>& commands) {
  const auto fish_quoted = [](std::string_view text) {
    return "'" + replace_all(replace_all(std::string(text), "\\", "\\\\"), "'", "\\'") + "'";
  };
  std::string text =
      "# fish completion of quern, made by `quern completion fish`\n"
      "# Whether the words behind quern begin with these.\n"
      "function __quern_command\n"
      "    set -l given (commandline -opc)\n"
      "    set -e given[1]\n"
      "    set -l n (count $argv)\n"
      "    test (count $given) -ge $n; and test \"$given[1..$n]\" = \"$argv\"\n"
      "end\n"
      "complete -c quern -f\n"
      "complete -c quern -n 'test (count (commandline -opc)) -eq 1' -l help -d 'List the commands'\n"
      "complete -c quern -n 'test (count (commandline -opc)) -eq 1' -l version -d 'Print the version'\n";
  for (const auto& [word, summary] : first_words(commands))
    text += fmt::format("complete -c quern -n 'test (count (commandline -opc)) -eq 1' -a {} -d {}\n", word, fish_quoted(summary));
  for (const auto& [first, seconds] : second_words(commands)) {
    for (const auto& [word, summary] : seconds)
      text += fmt::format("complete -c quern -n '__quern_command {}; and test (count (commandline -opc)) -eq 2' -a {} -d {}\n", first, word,
                          fish_quoted(summary));
  }
  for (const Command& command : commands) {
    const std::string begin = fmt::format("complete -c quern -n '__quern_command {}'", command.name);
    for_each_option(command, [&](const Option& option, const std::vector<std::string_view>& names) {
      text += begin;
      for (const std::string_view name : names) {
        if (name.starts_with("--")) {
          text += fmt::format(" -l {}", name.substr(2));
        } else {
          text += fmt::format(" -{} {}", name.size() == 2 ? "s" : "o", name.substr(1));
        }
      }
      if (!option.value.empty()) text += option.set.is_path ? " -r -F" : " -x";
      if (!option.set.words.empty()) text += fmt::format(" -a {}", fish_quoted(fmt::format("{}", fmt::join(option.set.words, " "))));
      text += fmt::format(" -d {}\n", fish_quoted(option.help));
    });
    for (const Positional& positional : command.positionals) {
      if (positional.set.is_path) text += begin + " -F\n";
      if (!positional.set.words.empty())
        text += begin + fmt::format(" -a {}\n", fish_quoted(fmt::format("{}", fmt::join(positional.set.words, " "))));
    }
  }
  return text;
}

}  // namespace

std::string completion_script(Shell shell, const std::vector<Command>& commands) {
  switch (shell) {
    case Shell::kBash: return bash_script(commands);
    case Shell::kZsh: return zsh_script(commands);
    case Shell::kFish: return fish_script(commands);
  }
  CHECK_UNREACHABLE();
}

}  // namespace quern::app
