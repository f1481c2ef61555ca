// `quern serve` whose workers or ranks fail while they serve.
// A step with token 13 in a prompt fails as one does when a rank no longer answers:
//   failing_server error serve MODEL ...   all steps after it fail at once
//   failing_server hang serve MODEL ...    no result comes any more, as from a driver that does not return
// The last rank meets its fault in the middle of a step, once SIGUSR2 has come:
//   failing_server rank-stops serve MODEL ...   its thread does not go on
//   failing_server rank-slow serve MODEL ...    it goes on after a second
//   failing_server rank-late serve MODEL ...    it goes on after six seconds
//   failing_server rank-lost serve MODEL ...    its device is lost
// The device does not answer any more, once SIGUSR2 has come:
//   failing_server device-hangs serve MODEL ...      who waits for a step waits for ever
//   failing_server device-blocks serve MODEL ...     who gives it work does

#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <string>
#include <thread>
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

std::atomic<bool> fault_wanted{false};

/// The last rank's end of a group: passes everything on, until the fault.
class FaultyRank final : public ops::Collective {
 public:
  FaultyRank(std::unique_ptr<ops::Collective> end, std::string fault) : end_(std::move(end)), fault_(std::move(fault)) {}
  [[nodiscard]] std::string_view transport() const override { return end_->transport(); }
  [[nodiscard]] int32_t rank() const override { return end_->rank(); }
  [[nodiscard]] int32_t size() const override { return end_->size(); }
  void all_gather(const ops::TensorView& mine, const ops::TensorView& all, std::span<const int64_t> widths, ops::Launch& launch) override {
    meet_fault();
    end_->all_gather(mine, all, widths, launch);
  }
  void add_partials(const ops::Combine::Kernel& combine, const ops::TensorView& partial, const ops::TensorView& x, ops::Launch& launch) override {
    meet_fault();
    end_->add_partials(combine, partial, x, launch);
  }
  void send(const ops::TensorView& message, int32_t to, ops::Launch& launch) override {
    meet_fault();
    end_->send(message, to, launch);
  }
  void receive(const ops::TensorView& message, int32_t from, ops::Launch& launch) override {
    meet_fault();
    end_->receive(message, from, launch);
  }
  void abort(const Error& error) override { end_->abort(error); }

 private:
  void meet_fault() {
    if (rank() != size() - 1 || !fault_wanted.exchange(false)) return;
    if (fault_ == "rank-lost") end_->abort(make_error(ErrorCode::kInternal, "the device of rank {} is lost", rank()));
    if (fault_ == "rank-slow") std::this_thread::sleep_for(std::chrono::seconds(1));
    if (fault_ == "rank-late") std::this_thread::sleep_for(std::chrono::seconds(6));
    while (fault_ == "rank-stops") ::pause();
  }

  std::unique_ptr<ops::Collective> end_;
  std::string fault_;
};

/// The queue of a device whose driver does not come back.
class HungStream final : public ops::Stream {
 public:
  HungStream(std::unique_ptr<ops::Stream> stream, bool blocks) : stream_(std::move(stream)), blocks_(blocks) {}
  void copy_to_device(const void* source, const ops::TensorView& destination) override {
    if (blocks_) meet_fault();
    stream_->copy_to_device(source, destination);
  }
  void copy_to_host(const ops::TensorView& source, void* destination) override { stream_->copy_to_host(source, destination); }
  void copy(const ops::TensorView& source, const ops::TensorView& destination) override { stream_->copy(source, destination); }
  void fill_zero(const ops::TensorView& destination) override { stream_->fill_zero(destination); }
  Result<void> finish() override { return stream_->finish(); }
  ops::Mark mark() override { return stream_->mark(); }
  Result<void> wait(ops::Mark mark) override {
    if (!blocks_) meet_fault();
    return stream_->wait(mark);
  }

 private:
  static void meet_fault() {
    while (fault_wanted) ::pause();
  }
  std::unique_ptr<ops::Stream> stream_;
  const bool blocks_;
};

int run(const std::vector<std::string>& arguments) {
  const std::string& fault = arguments.at(0);
  ServeFaults faults;
  if (fault.starts_with("device-")) {
    signal(SIGUSR2, [](int) { fault_wanted = true; });
    faults.wrap_stream = [blocks = fault == "device-blocks"](std::unique_ptr<ops::Stream> stream) { return std::make_unique<HungStream>(std::move(stream), blocks); };
  } else   if (fault.starts_with("rank-")) {
    signal(SIGUSR2, [](int) { fault_wanted = true; });
    faults.wrap_collective = [fault](std::unique_ptr<ops::Collective> end) { return std::make_unique<FaultyRank>(std::move(end), fault); };
  } else {
    faults.wrap_workers = [hang = fault == "hang"](std::unique_ptr<worker::WorkerGroup> workers) { return std::make_unique<LostWorkers>(std::move(workers), hang); };
  }
  const std::vector<Command> commands = {serve_command(std::move(faults))};
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
