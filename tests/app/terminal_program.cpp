#include "app/terminal_program.h"

#include <gtest/gtest.h>
#include <pty.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <termios.h>
#include <unistd.h>

#include "base/check.h"

namespace quern::testing {

TerminalProgram::TerminalProgram(const std::vector<std::string>& arguments, const std::vector<std::string>& environment) {
  std::vector<std::string> words = {QUERN_PROGRAM};
  words.insert(words.end(), arguments.begin(), arguments.end());
  std::vector<char*> argv;
  for (std::string& word : words) argv.push_back(word.data());
  argv.push_back(nullptr);
  std::vector<std::string> variables = environment;
  winsize size{.ws_row = 24, .ws_col = 80, .ws_xpixel = 0, .ws_ypixel = 0};
  pid_ = forkpty(&terminal_, nullptr, nullptr, &size);
  CHECK(pid_ >= 0);
  if (pid_ != 0) return;
  setenv("TERM", "xterm", 1);
  unsetenv("NO_COLOR");
  unsetenv("OPENAI_API_KEY");
  for (std::string& variable : variables) putenv(variable.data());
  execv(argv[0], argv.data());
  _exit(127);
}

TerminalProgram::~TerminalProgram() {
  if (pid_ > 0) {
    kill(pid_, SIGKILL);
    waitpid(pid_, nullptr, 0);
  }
  close(terminal_);
}

void TerminalProgram::type(const std::string& keys) const {
  CHECK(write(terminal_, keys.data(), keys.size()) == static_cast<ssize_t>(keys.size()));
}

void TerminalProgram::send(int signal) const { kill(pid_, signal); }

bool TerminalProgram::echoes() const {
  termios mode{};
  CHECK(tcgetattr(terminal_, &mode) == 0);
  return (mode.c_lflag & (ECHO | ICANON)) == (ECHO | ICANON);
}

bool TerminalProgram::read_more() {
  char buffer[4096];
  const ssize_t got = read(terminal_, buffer, sizeof buffer);
  if (got <= 0) return false;
  all_.append(buffer, static_cast<size_t>(got));
  return true;
}

std::string TerminalProgram::read_until(const std::string& text) {
  size_t at = 0;
  while ((at = all_.find(text, seen_)) == std::string::npos) {
    if (read_more()) continue;
    ADD_FAILURE() << "the program ended before it said '" << text << "'; all it said was\n" << all_;
    return {};
  }
  const std::string part = all_.substr(seen_, at + text.size() - seen_);
  seen_ = at + text.size();
  return part;
}

int TerminalProgram::wait() {
  while (read_more()) {
  }
  int status = 0;
  CHECK(waitpid(pid_, &status, 0) == pid_);
  pid_ = -1;
  return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

}  // namespace quern::testing
