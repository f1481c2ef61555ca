#pragma once

#include <sys/types.h>

#include <filesystem>
#include <string>
#include <vector>

namespace quern::testing {

struct ProgramResult {
  int exit_code = -1;       // 128 + n when signal n ended it
  std::string output, log;  // stdout and stderr
};

/// Runs build/quern with these arguments to its end.
ProgramResult run_quern(const std::vector<std::string>& arguments);

/// build/quern, or another program, in the background. The destructor kills what still runs.
class BackgroundProgram {
 public:
  explicit BackgroundProgram(const std::vector<std::string>& arguments, const std::string& program = {});
  ~BackgroundProgram();
  BackgroundProgram(const BackgroundProgram&) = delete;
  BackgroundProgram& operator=(const BackgroundProgram&) = delete;

  /// What it has written to stderr so far.
  [[nodiscard]] std::string log() const;
  /// Waits until the log contains `text`; false when the program ended without it.
  bool wait_for_log(const std::string& text);
  void send(int signal) const;
  /// Waits for the end; the exit code, or 128 + the signal.
  int wait();

 private:
  pid_t pid_ = -1;
  std::filesystem::path folder_;
};

}  // namespace quern::testing
