#include "app/man_page.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>

#include "app/build_info.h"

namespace quern::app {
namespace {

/// Text as troff shall print it: a dash that can be copied, a backslash that is one, no line that is a request.
std::string roff(std::string_view text) {
  std::string result;
  for (const char c : text) {
    if (c == '\\') {
      result += "\\e";
    } else if (c == '-') {
      result += "\\-";
    } else if (c == '\'') {
      result += "\\(aq";
    } else if (c == '`') {
      result += "\\(ga";
    } else if (c == '~') {
      result += "\\(ti";
    } else if (c == '^') {
      result += "\\(ha";
    } else if (c == '"') {
      result += "\\(dq";
    } else {
      result += c;
    }
  }
  if (result.starts_with('.')) result.insert(0, "\\&");
  return result;
}

std::string upper(std::string text) {
  std::ranges::transform(text, text.begin(), [](char c) { return c >= 'a' && c <= 'z' ? static_cast<char>(c - 'a' + 'A') : c; });
  return text;
}

std::string heading(const std::string& page, std::string_view summary) {
  return fmt::format(".TH {} 1 {} \"quern {}\" \"User Commands\"\n.SH NAME\n{} \\- {}\n", roff(upper(page)), build_info().date, version(),
                     roff(page), roff(summary));
}

/// ".TP", names in bold, the value in italics, and the help.
std::string entry(const Option& option) {
  std::vector<std::string> names;
  for (const std::string_view name : split_at_commas(option.names)) {
    std::string text = fmt::format("\\fB{}\\fR", roff(name));
    if (!option.value.empty()) text += fmt::format(" \\fI{}\\fR", roff(option.value));
    names.push_back(std::move(text));
  }
  return fmt::format(".TP\n{}\n{}\n", fmt::join(names, ", "), roff(option.help));
}

constexpr std::string_view kExitStatus =
    ".SH EXIT STATUS\n"
    ".TP\n0\nDone.\n"
    ".TP\n1\nIt failed; standard error says why in a sentence.\n"
    ".TP\n2\nThe command line is wrong.\n"
    ".TP\n3\n\\fBquern plan\\fR: the model does not fit.\n"
    ".TP\n130, 143\nStopped at once by SIGINT or SIGTERM.\n";

}  // namespace

std::string man_page_name(const Command& command) {
  std::string name = "quern-" + command.name;
  std::ranges::replace(name, ' ', '-');
  return name;
}

std::string man_page(const Command& command) {
  std::string text = heading(man_page_name(command), command.summary);
  text += fmt::format(".SH SYNOPSIS\n\\fBquern {}\\fR", roff(command.name));
  for (const Positional& positional : command.positionals) {
    const std::string name = fmt::format("\\fI{}\\fR", roff(positional.name));
    text += positional.required ? " " + name : " [" + name + "]";
  }
  text += " [\\fIOPTIONS\\fR]\n";
  text += fmt::format(".SH DESCRIPTION\n{}.\n", roff(command.summary));
  for (std::string_view rest = command.description; !rest.empty();) {
    const size_t end = std::min(rest.find("\n\n"), rest.size());
    text += fmt::format(".PP\n{}\n", roff(rest.substr(0, end)));
    rest.remove_prefix(std::min(end + 2, rest.size()));
  }
  if (!command.why_absent.empty()) text += fmt::format(".PP\n{}\n", roff(command.why_absent));
  text += ".SH OPTIONS\n";
  text += entry({.names = "-h,--help", .help = "Print the options and exit."});
  for (const OptionGroup& group : command.groups) {
    text += fmt::format(".SS {}\n", roff(group.heading));
    for (const Option& option : group.options) text += entry(option);
  }
  text += kExitStatus;
  return text + ".SH SEE ALSO\n.BR quern (1)\n";
}

std::string program_man_page(const std::vector<Command>& commands) {
  std::string text = heading("quern", "serves Qwen3.5 and 3.6 models over an OpenAI-compatible API");
  text +=
      ".SH SYNOPSIS\n\\fBquern\\fR \\fICOMMAND\\fR [\\fIOPTIONS\\fR]\n.br\n\\fBquern \\-\\-help\\fR\n.br\n\\fBquern \\-\\-version\\fR\n";
  text += ".SH DESCRIPTION\n";
  text +=
      "Results go to standard output, logs and errors to standard error. Names of options are those of vLLM where it has one; underscores "
      "in them are "
      "read as dashes, and \\fB\\-\\-name=value\\fR is the same as \\fB\\-\\-name value\\fR.\n";
  text += ".SH COMMANDS\n";
  for (const Command& command : commands) text += fmt::format(".TP\n\\fB{}\\fR\n{}.\n", roff(command.name), roff(command.summary));
  text += kExitStatus;
  text +=
      ".SH ENVIRONMENT\n"
      ".TP\nOPENAI_API_KEY\nThe key that \\fBquern chat\\fR and \\fBquern bench serve\\fR send.\n"
      ".TP\nQUERN_CPU_ISA\n\\fIavx2\\fR or \\fIbaseline\\fR hides the processor's newer instructions.\n"
      ".TP\nNO_COLOR\nWhen it is set and not empty, \\fBquern chat\\fR uses no colours.\n";
  text += ".SH SEE ALSO\n";
  for (size_t i = 0; i < commands.size(); ++i)
    text += fmt::format(".BR {} (1){}\n", roff(man_page_name(commands[i])), i + 1 < commands.size() ? "," : "");
  return text;
}

}  // namespace quern::app
