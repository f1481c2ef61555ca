#include "app/completion.h"

#include <sys/wait.h>

#include <cstdio>
#include <fstream>

#include "app/commands.h"
#include "app/man_page.h"
#include "support/test_support.h"

// Completions and manual pages: every option of every command is in them, and the shells agree that they work.

namespace quern::app {
namespace {

using quern::testing::TemporaryFolder;
using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::IsSupersetOf;
using ::testing::Not;

struct ShellOutput {
  int exit_code = -1;
  std::string text;
  std::vector<std::string> lines;
};

/// Runs a command line of sh; stdout and stderr together.
ShellOutput run(const std::string& command) {
  ShellOutput result;
  FILE* pipe = popen(("exec 2>&1; " + command).c_str(), "r");
  EXPECT_NE(pipe, nullptr);
  char buffer[4096];
  while (const size_t got = std::fread(buffer, 1, sizeof buffer, pipe)) result.text.append(buffer, got);
  const int status = pclose(pipe);
  result.exit_code = WIFEXITED(status) ? WEXITSTATUS(status) : -1;
  size_t begin = 0;
  for (size_t end = 0; (end = result.text.find('\n', begin)) != std::string::npos; begin = end + 1)
    result.lines.push_back(result.text.substr(begin, end - begin));
  return result;
}

bool is_installed(const std::string& program) { return run("command -v " + program).exit_code == 0; }

class Completion : public ::testing::Test {
 protected:
  std::string script(Shell shell) {
    const std::filesystem::path file = folder_.path() / "script";
    std::ofstream(file) << completion_script(shell, all_commands());
    return file.string();
  }

  /// What bash offers for the last of these words, in a folder with model-dir/ and file.json.
  std::vector<std::string> bash(const std::string& words) {
    std::filesystem::create_directory(folder_.path() / "model-dir");
    std::ofstream(folder_.path() / "file.json") << "{}";
    const std::filesystem::path file = folder_.path() / "ask.bash";
    std::ofstream(file) << "source " << script(Shell::kBash) << "\ncompopt() { :; }\n"  // there is no completion under way
                        << "COMP_WORDS=(" << words << ")\nCOMP_CWORD=$((${#COMP_WORDS[@]} - 1))\n_quern || echo failed\n"
                        << "if ((${#COMPREPLY[@]})); then printf '%s\\n' \"${COMPREPLY[@]}\"; fi\n";
    return run("cd " + folder_.path().string() + " && bash --norc " + file.string()).lines;
  }

  TemporaryFolder folder_;
};

TEST_F(Completion, HasEveryOptionAndCommand) {
  for (const Shell shell : {Shell::kBash, Shell::kZsh, Shell::kFish}) {
    const std::string text = completion_script(shell, all_commands());
    for (const Command& command : all_commands()) {
      const size_t begin = shell == Shell::kFish ? 0 : text.find("    '" + command.name + "')");
      ASSERT_NE(begin, std::string::npos) << command.name;
      const std::string part = text.substr(begin, shell == Shell::kFish ? std::string::npos : text.find(";;\n    ", begin) - begin);
      for (const OptionGroup& group : command.groups) {
        for (const Option& option : group.options) {
          for (const std::string_view name : split_at_commas(option.names)) {
            if (shell != Shell::kFish) {
              EXPECT_THAT(part, HasSubstr(std::string(name))) << command.name;
              continue;
            }
            const std::string wanted = name.starts_with("--") ? fmt::format(" -l {} ", name.substr(2))
                                       : name.size() == 2     ? fmt::format(" -s {} ", name.substr(1))
                                                              : fmt::format(" -o {} ", name.substr(1));
            const size_t line = text.find(fmt::format("-n '__quern_command {}'", command.name));
            bool found = false;
            for (size_t at = line; at != std::string::npos && !found;
                 at = text.find(fmt::format("-n '__quern_command {}'", command.name), at + 1))
              found = text.substr(at, text.find('\n', at) - at).find(wanted) != std::string::npos;
            EXPECT_TRUE(found) << command.name << " " << name;
          }
        }
      }
    }
  }
}

TEST_F(Completion, CompletesInBash) {
  if (!is_installed("bash")) GTEST_SKIP() << "there is no bash";
  EXPECT_THAT(bash("quern ser"), ElementsAre("serve"));
  EXPECT_THAT(bash("quern ''"), IsSupersetOf({"serve", "bench", "chat", "plan", "completion", "help"}));
  EXPECT_THAT(bash("quern bench ''"), IsSupersetOf({"latency", "throughput", "serve"}));
  EXPECT_THAT(bash("quern bench thr"), ElementsAre("throughput"));
  EXPECT_THAT(bash("quern plan --max-model"), ElementsAre("--max-model-len"));
  EXPECT_THAT(bash("quern bench latency --batch"), ElementsAre("--batch-size"));
  EXPECT_THAT(bash("quern plan --dtype ''"), ElementsAre("auto", "bfloat16", "float32"));
  EXPECT_THAT(bash("quern plan --dtype b"), ElementsAre("bfloat16"));
  EXPECT_THAT(bash("quern plan --dtype = f"), ElementsAre("float32")) << "--dtype=f, which bash takes apart";
  EXPECT_THAT(bash("quern plan --dtype ="), IsSupersetOf({"auto", "bfloat16", "float32"}));
  EXPECT_THAT(bash("quern plan --log-level w"), ElementsAre("warning"));
  EXPECT_THAT(bash("quern plan mod"), ElementsAre("model-dir")) << "MODEL is a folder";
  EXPECT_THAT(bash("quern completion ''"), ElementsAre("bash", "zsh", "fish"));
  EXPECT_THAT(bash("quern plan --max-model-len ''"), IsEmpty()) << "a number is a number of one's own";
  EXPECT_THAT(bash("quern no-such-command --x"), IsEmpty());
}

TEST_F(Completion, IsCleanBash) {
  if (!is_installed("bash")) GTEST_SKIP() << "there is no bash";
  const ShellOutput syntax = run("bash -n " + script(Shell::kBash));
  EXPECT_EQ(syntax.exit_code, 0) << syntax.text;
  if (!is_installed("shellcheck")) GTEST_SKIP() << "there is no shellcheck";
  const ShellOutput checked = run("shellcheck --shell=bash " + script(Shell::kBash));
  EXPECT_EQ(checked.exit_code, 0) << checked.text;
}

TEST_F(Completion, CompletesInZsh) {
  if (!is_installed("zsh")) GTEST_SKIP() << "there is no zsh";
  const ShellOutput syntax = run("zsh -n " + script(Shell::kZsh));
  EXPECT_EQ(syntax.exit_code, 0) << syntax.text;
  // A shell on a terminal of its own, which is asked with the Tab key and lists what it would offer.
  const std::filesystem::path file = folder_.path() / "ask.zsh";
  std::ofstream(file) << "zmodload zsh/zpty\nzpty shell 'zsh -f -i'\n"
                      << "zpty -w shell 'PROMPT=ready\\>; autoload -Uz compinit; compinit -D -u; source " << script(Shell::kZsh)
                      << "; LISTMAX=10000; setopt nolistbeep; echo armed'\nzpty -r shell text '*armed*armed*ready>*'\n"
                      << "ask() { zpty -n -w shell \"$1\"$'\\t'$'\\C-u'\"echo done-$2\"$'\\n'; zpty -r shell text "
                         "\"*done-$2*done-$2*ready>*\"; print -r -- \"$text\" }\n"
                      << "ask 'quern ser' 1\nask 'quern plan --max-model-l' 2\nask 'quern plan --dtype=bfl' 3\nask 'quern bench thr' 4\n";
  const ShellOutput offered = run("zsh -f " + file.string());
  for (const char* wanted : {"quern serve", "--max-model-len", "--dtype=bfloat16", "bench throughput"})
    EXPECT_THAT(offered.text, HasSubstr(wanted));
}

TEST_F(Completion, CompletesInFish) {
  if (!is_installed("fish")) GTEST_SKIP() << "there is no fish";
  const std::string file = script(Shell::kFish);
  const auto ask = [&](const std::string& line) {
    return run("cd " + folder_.path().string() + " && HOME=" + folder_.path().string() + " fish --no-config -c 'source " + file +
               "; complete -C \"" + line + "\"'")
        .text;
  };
  EXPECT_THAT(ask("quern ser"), HasSubstr("serve\t"));
  EXPECT_THAT(ask("quern bench "), HasSubstr("latency\t"));
  EXPECT_THAT(ask("quern plan --max-model"), HasSubstr("--max-model-len"));
  EXPECT_THAT(ask("quern bench latency --batch"), HasSubstr("--batch-size"));
  EXPECT_THAT(ask("quern serve --batch"), Not(HasSubstr("--batch-size")));
  EXPECT_THAT(ask("quern plan --dtype "), HasSubstr("bfloat16"));
  EXPECT_THAT(ask("quern plan --dtype "), Not(HasSubstr("script"))) << "no files where words are wanted";
  EXPECT_THAT(ask("quern plan "), HasSubstr("script")) << "MODEL is a path";
  EXPECT_THAT(ask("quern completion "), HasSubstr("zsh"));
}

TEST(ManPage, HasEveryOptionAndItsHelp) {
  for (const Command& command : all_commands()) {
    const std::string page = man_page(command);
    EXPECT_THAT(page, HasSubstr(".SH NAME\n")) << command.name;
    for (const OptionGroup& group : command.groups) {
      for (const Option& option : group.options) {
        for (const std::string_view name : split_at_commas(option.names)) {
          std::string escaped;
          for (const char c : name) escaped += c == '-' ? "\\-" : std::string(1, c);
          EXPECT_THAT(page, HasSubstr("\\fB" + escaped + "\\fR")) << command.name;
        }
      }
    }
  }
  const std::string all = program_man_page(all_commands());
  for (const Command& command : all_commands()) EXPECT_THAT(all, HasSubstr(command.summary.substr(0, 12))) << command.name;
}

TEST(ManPage, IsWellFormed) {
  const TemporaryFolder folder;
  std::vector<std::string> pages = {program_man_page(all_commands())};
  for (const Command& command : all_commands()) pages.push_back(man_page(command));
  Command nasty{.name = "nasty", .summary = ".SH starts with a dot"};
  nasty.groups.push_back(
      {"'Quotes' \\ and \"more\"", {{.names = "-x,--ex", .value = "A\\B", .help = "'begins with a quote\\n, has - and \\fB"}}});
  pages.push_back(man_page(nasty));
  EXPECT_THAT(pages.back(), HasSubstr("\\(aqbegins with a quote\\en, has \\- and \\efB"));
  const bool mandoc = is_installed("mandoc"), groff = is_installed("groff");
  for (const std::string& page : pages) {
    std::ofstream(folder.path() / "page.1") << page;
    const std::string file = (folder.path() / "page.1").string();
    if (mandoc) {
      EXPECT_THAT(run("mandoc -Tlint -Wwarning " + file).text, IsEmpty());
    }
    if (groff) {  // as `man --warnings` does
      EXPECT_THAT(run("LC_ALL=C.UTF-8 groff -Kutf8 -man -Tutf8 -ww -z -rHY=0 " + file).text, IsEmpty());
    }
  }
  if (!mandoc && !groff) GTEST_SKIP() << "there is neither mandoc nor groff";
}

}  // namespace
}  // namespace quern::app
