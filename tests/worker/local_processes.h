#pragma once

#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include "worker/common_plan.h"
#include "worker/start.h"

namespace quern::worker {

/// Processes that are threads of one program: what they send goes through its memory. Faults can be put in between.
class LocalProcesses {
 public:
  explicit LocalProcesses(int32_t size) {
    for (int32_t rank = 0; rank < size; ++rank) ends_.push_back(std::make_unique<End>(*this, rank, size));
  }
  Processes& operator[](int32_t rank) { return *ends_[static_cast<size_t>(rank)]; }

  /// Nothing that this one sends arrives any more, and it hears nothing.
  void lose(int32_t rank) {
    const std::lock_guard lock(mutex_);
    lost_.at(static_cast<size_t>(rank)) = true;
  }
  /// Sees, and may change, every message on its way.
  std::function<void(int32_t from, int32_t to, int32_t tag, std::vector<std::byte>&)> on_the_way;

  /// Bytes that have gone from one to another, by tag.
  uint64_t num_bytes(int32_t from, int32_t to, int32_t tag) {
    const std::lock_guard lock(mutex_);
    return num_bytes_[{from, to, tag}];
  }

 private:
  using Key = std::tuple<int32_t, int32_t, int32_t>;  // from, to, tag

  class End final : public Processes {
   public:
    End(LocalProcesses& all, int32_t rank, int32_t size) : all_(all), rank_(rank), size_(size), host_(fmt::format("host{}", rank)) {}
    [[nodiscard]] int32_t rank() const override { return rank_; }
    [[nodiscard]] int32_t size() const override { return size_; }
    [[nodiscard]] const std::string& host() const override { return host_; }
    [[nodiscard]] int32_t num_on_host() const override { return size_; }
    [[nodiscard]] std::string_view transport() const override { return "memory"; }
    Result<void> send(int32_t to, int32_t tag, std::span<const std::byte> bytes, std::shared_ptr<const void> /*owner*/, const Patience& /*patience*/) override {
      std::vector<std::byte> copy(bytes.begin(), bytes.end());
      if (all_.on_the_way) all_.on_the_way(rank_, to, tag, copy);
      const std::lock_guard lock(all_.mutex_);
      if (all_.lost_[static_cast<size_t>(rank_)] || all_.lost_[static_cast<size_t>(to)]) return {};  // as into a wire that leads nowhere
      all_.num_bytes_[{rank_, to, tag}] += copy.size();
      all_.mail_[{rank_, to, tag}].push_back(std::move(copy));
      all_.arrived_.notify_all();
      return {};
    }
    Result<std::vector<std::byte>> receive(int32_t from, int32_t tag, const Patience& patience) override {
      const auto begin = std::chrono::steady_clock::now();
      std::unique_lock lock(all_.mutex_);
      auto& mail = all_.mail_[{from, rank_, tag}];
      while (mail.empty()) {
        if (patience.stop && patience.stop()) return make_error(ErrorCode::kCancelled, "a message from process {} was not awaited", from);
        const auto waited = std::chrono::steady_clock::now() - begin;
        if (waited > patience.deadline) return make_error(ErrorCode::kUnavailable, "a message from process {} was given up after {:.1f} s", from, std::chrono::duration<double>(waited).count());
        all_.arrived_.wait_for(lock, std::chrono::milliseconds(5));
      }
      std::vector<std::byte> bytes = std::move(mail.front());
      mail.pop_front();
      return bytes;
    }
    Result<size_t> receive(int32_t from, int32_t tag, std::span<std::byte> room, std::shared_ptr<void> /*owner*/, const Patience& patience) override {
      ASSIGN_OR_RETURN(const std::vector<std::byte> bytes, receive(from, tag, patience));
      if (bytes.size() > room.size()) return make_error(ErrorCode::kInternal, "{} bytes where {} were the most", bytes.size(), room.size());
      std::copy(bytes.begin(), bytes.end(), room.begin());
      return bytes.size();
    }
    void leave() override {}

   private:
    LocalProcesses& all_;
    const int32_t rank_, size_;
    const std::string host_;
  };

  std::vector<std::unique_ptr<End>> ends_;
  std::mutex mutex_;
  std::condition_variable arrived_;
  std::map<Key, std::deque<std::vector<std::byte>>> mail_;
  std::map<Key, uint64_t> num_bytes_;
  std::map<size_t, bool> lost_ = [this] {
    std::map<size_t, bool> none;
    for (size_t rank = 0; rank < 64; ++rank) none[rank] = false;
    return none;
  }();
};

/// A model in such processes: the group of process 0, and behind it the others. The devices are those of every process.
class ModelInProcesses final : public WorkerGroup {
 public:
  /// One stage in each process. `source_of` may replace a process's checkpoint.
  struct Setup {
    WorkerOptions options;
    std::function<weights::WeightSource*(int32_t process)> source_of = {};
  };
  static Result<std::unique_ptr<ModelInProcesses>> start(LocalProcesses& processes, const Setup& setup) {
    std::unique_ptr<ModelInProcesses> model(new ModelInProcesses());
    const int32_t size = processes[0].size();
    model->outcomes_.resize(static_cast<size_t>(size));
    const auto plan_of = [&processes, setup](int32_t process) {
      WorkerOptions options = setup.options;
      options.pp_size = 1;
      return make_common_plan(options, processes[process], fmt::format("quern of {}", options.model_dir.empty() ? "nowhere" : "these tests"));
    };
    const auto source_of = [setup](int32_t process) { return setup.source_of ? setup.source_of(process) : nullptr; };
    for (int32_t process = 1; process < size; ++process)
      model->others_.emplace_back([&processes, process, plan_of, source_of, outcome = &model->outcomes_[static_cast<size_t>(process)]] {
        const auto plan = plan_of(process);
        *outcome = plan ? follow_process_0(*plan, processes[process], {}, source_of(process)) : Result<void>(plan.error());
      });
    ASSIGN_OR_RETURN(model->plan_, plan_of(0));
    ASSIGN_OR_RETURN(model->group_, start_workers(model->plan_, {}, nullptr, source_of(0), &processes[0]));
    return model;
  }
  ~ModelInProcesses() override { end(); }

  [[nodiscard]] const ExecutionPlan& plan() const { return plan_; }
  /// Gives the group back and waits for the others' ends: what each of them says.
  const std::vector<Result<void>>& end() {
    group_.reset();
    others_.clear();
    return outcomes_;
  }

  [[nodiscard]] const WorkerLimits& limits() const override { return group_->limits(); }
  void submit(StepPlan plan) override { group_->submit(std::move(plan)); }
  void submit_masks(StepMasks masks) override { group_->submit_masks(std::move(masks)); }
  StepResult wait() override { return group_->wait(); }
  std::optional<StepResult> wait_or_wake() override { return group_->wait_or_wake(); }
  void wake() override { group_->wake(); }
  std::optional<StepResult> poll() override { return group_->poll(); }

 private:
  ModelInProcesses() = default;
  ExecutionPlan plan_;
  std::vector<Result<void>> outcomes_;
  std::vector<std::jthread> others_;
  std::unique_ptr<WorkerGroup> group_;
};

}  // namespace quern::worker
