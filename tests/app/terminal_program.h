#pragma once

#include <sys/types.h>

#include <string>
#include <vector>

namespace quern::testing {

/// build/quern on a terminal of its own, 80 columns wide. The destructor kills what still runs.
class TerminalProgram {
 public:
  explicit TerminalProgram(const std::vector<std::string>& arguments, const std::vector<std::string>& environment = {});
  ~TerminalProgram();
  TerminalProgram(const TerminalProgram&) = delete;
  TerminalProgram& operator=(const TerminalProgram&) = delete;

  /// Types these bytes.
  void type(const std::string& keys) const;
  /// Reads on until what came since the last call contains `text`; that part, with `text` at its end. A failed test when the program ends
  /// first.
  std::string read_until(const std::string& text);
  /// Reads to the end; the exit code, or 128 + the signal.
  int wait();
  void send(int signal) const;
  /// Whether the terminal shows what is typed by itself, as it does before and after a program that edits lines.
  [[nodiscard]] bool echoes() const;
  [[nodiscard]] const std::string& all() const { return all_; }

 private:
  bool read_more();
  pid_t pid_ = -1;
  int terminal_ = -1;
  std::string all_;
  size_t seen_ = 0;
};

}  // namespace quern::testing
