#include "app/program.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <thread>

#include "base/check.h"
#include "base/file.h"

namespace quern::testing {
namespace {

std::filesystem::path make_folder() {
  std::string name = (std::filesystem::temp_directory_path() / "quern-program-XXXXXX").string();
  CHECK(::mkdtemp(name.data()) != nullptr);
  return name;
}

pid_t start(const std::vector<std::string>& arguments, const std::filesystem::path& folder, const std::string& program = QUERN_PROGRAM) {
  std::vector<std::string> words = {program};
  words.insert(words.end(), arguments.begin(), arguments.end());
  std::vector<char*> argv;
  for (std::string& word : words) argv.push_back(word.data());
  argv.push_back(nullptr);
  const std::string output = (folder / "stdout").string(), log = (folder / "stderr").string();
  const pid_t pid = fork();
  CHECK(pid >= 0);
  if (pid != 0) return pid;
  dup2(open("/dev/null", O_RDONLY), STDIN_FILENO);
  dup2(open(output.c_str(), O_CREAT | O_WRONLY, 0600), STDOUT_FILENO);
  dup2(open(log.c_str(), O_CREAT | O_WRONLY | O_APPEND, 0600), STDERR_FILENO);
  execv(argv[0], argv.data());
  _exit(127);
}

int wait_for(pid_t pid) {
  int status = 0;
  CHECK(waitpid(pid, &status, 0) == pid);
  return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

std::string text_of(const std::filesystem::path& file) {
  Result<std::string> text = read_file(file);
  return text ? std::move(text).value() : std::string();
}

}  // namespace

ProgramResult run_quern(const std::vector<std::string>& arguments) {
  const std::filesystem::path folder = make_folder();
  ProgramResult result;
  result.exit_code = wait_for(start(arguments, folder));
  result.output = text_of(folder / "stdout");
  result.log = text_of(folder / "stderr");
  std::filesystem::remove_all(folder);
  return result;
}

BackgroundProgram::BackgroundProgram(const std::vector<std::string>& arguments, const std::string& program) : folder_(make_folder()) {
  pid_ = program.empty() ? start(arguments, folder_) : start(arguments, folder_, program);
}

BackgroundProgram::~BackgroundProgram() {
  if (pid_ > 0) {
    kill(pid_, SIGKILL);
    wait_for(pid_);
  }
  std::error_code ignored;
  std::filesystem::remove_all(folder_, ignored);
}

std::string BackgroundProgram::log() const { return text_of(folder_ / "stderr"); }

bool BackgroundProgram::wait_for_log(const std::string& text) {
  while (true) {
    siginfo_t info{};  // asked before the log is read, so that a last line is not missed
    const bool ended = waitid(P_PID, static_cast<id_t>(pid_), &info, WEXITED | WNOHANG | WNOWAIT) == 0 && info.si_pid == pid_;
    if (log().find(text) != std::string::npos) return true;
    if (ended) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  }
}

void BackgroundProgram::send(int signal) const { kill(pid_, signal); }

int BackgroundProgram::wait() {
  const int code = wait_for(pid_);
  pid_ = -1;
  return code;
}

}  // namespace quern::testing
