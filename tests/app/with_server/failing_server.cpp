// `quern serve` whose workers are lost while they serve: a step with token 13 in a prompt fails as one does when a rank no longer answers.
//   failing_server error serve MODEL ...   all steps after it fail at once
//   failing_server hang serve MODEL ...    no result comes any more, as from a driver that does not return

#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <set>
#include <string>
#include <vector>

#include "app/command_line.h"
#include "app/commands.h"
#include "app/exit_code.h"

namespace quern::app {
namespace {

class LostWorkers final : public worker::WorkerGroup {
 public:
  LostWorkers(std::unique_ptr<worker::WorkerGroup> workers, bool hang) : workers_(std::move(workers)), hang_(hang) {}
  ~LostWorkers() override {
    if (lost_ && hang_) hang();
  }
  [[nodiscard]] const worker::WorkerLimits& limits() const override { return workers_->limits(); }
  void submit(worker::StepPlan plan) override {
    const auto has_token = [](const worker::StepRun& run) { return std::find(run.tokens.begin(), run.tokens.end(), 13) != run.tokens.end(); };
    if (!first_lost_ && std::any_of(plan.runs.begin(), plan.runs.end(), has_token)) first_lost_ = plan.step;
    workers_->submit(std::move(plan));
  }
  void submit_masks(worker::StepMasks masks) override { workers_->submit_masks(std::move(masks)); }
  worker::StepResult wait() override {
    if (lost_ && hang_) hang();
    return look_at(workers_->wait());
  }
  std::optional<worker::StepResult> wait_or_wake() override { return wait(); }
  void wake() override {}
  std::optional<worker::StepResult> poll() override { return wait(); }

 private:
  [[noreturn]] static void hang() {
    while (true) ::pause();
  }
  worker::StepResult look_at(worker::StepResult result) {
    if (!first_lost_ || result.step < *first_lost_) return result;
    lost_ = true;
    return {.step = result.step,
            .error = make_error(ErrorCode::kInternal, "rank 0 (cpu:0): no message from rank 1 for 10.0 s (add_partials 3 of 40 KiB, staged)")};
  }

  std::unique_ptr<worker::WorkerGroup> workers_;
  const bool hang_;
  std::optional<uint64_t> first_lost_;
  bool lost_ = false;
};

int run(const std::vector<std::string>& arguments) {
  const bool hang = arguments.at(0) == "hang";
  const std::vector<Command> commands = {serve_command([hang](std::unique_ptr<worker::WorkerGroup> workers) { return std::make_unique<LostWorkers>(std::move(workers), hang); })};
  const std::vector<std::string> rest(arguments.begin() + 1, arguments.end());
  const Result<Invocation> invocation = parse_command_line(commands, rest);
  if (!invocation) {
    std::fprintf(stderr, "%s\n", invocation.error().message.c_str());
    return kUsage;
  }
  return invocation->command->run();
}

}  // namespace
}  // namespace quern::app

int main(int argc, char** argv) { return quern::app::run({argv + 1, argv + argc}); }
