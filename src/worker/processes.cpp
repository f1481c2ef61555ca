#include "worker/processes.h"

#include <pthread.h>
#include <signal.h>

#include <cstdlib>
#include <limits>
#include <mutex>
#include <thread>

#include "worker/open_mpi.h"

// MPI's launcher starts the processes on their hosts, and its library carries their bytes; who does what is decided above.

namespace quern::worker {
namespace {

using Clock = std::chrono::steady_clock;

/// A number that the launcher has put into the environment; 1 without it.
int32_t launched(const char* name) {
  const char* value = std::getenv(name);
  return value != nullptr ? static_cast<int32_t>(std::strtol(value, nullptr, 10)) : 1;
}

/// Waits as one does who may share a core with the one he waits for: at full speed for a moment, then in naps that are short while something may come soon.
class Waiting {
 public:
  explicit Waiting(const Processes::Patience& patience) : patience_(patience) {}
  /// False when the wait is given up.
  bool once_more() {
    const auto waited = Clock::now() - begin_;
    if (waited < kSpin) return true;
    if (waited > patience_.deadline || (patience_.stop && patience_.stop())) return false;
    std::this_thread::sleep_for(waited < kSoon ? kShortNap : kLongNap);
    return true;
  }
  [[nodiscard]] Error given_up(std::string_view what, int32_t other) const {
    const auto waited = Clock::now() - begin_;
    return make_error(waited > patience_.deadline ? ErrorCode::kUnavailable : ErrorCode::kCancelled, "{} process {} was given up after {:.1f} s", what, other,
                      std::chrono::duration<double>(waited).count());
  }

 private:
  static constexpr std::chrono::microseconds kSpin{100}, kSoon{50'000}, kShortNap{20}, kLongNap{250};
  const Processes::Patience& patience_;
  const Clock::time_point begin_ = Clock::now();
};

class MpiProcesses final : public Processes {
 public:
  MpiProcesses(const OpenMpi& mpi, int32_t rank, int32_t size, std::string host) : mpi_(mpi), rank_(rank), size_(size), host_(std::move(host)) {}

  [[nodiscard]] int32_t rank() const override { return rank_; }
  [[nodiscard]] int32_t size() const override { return size_; }
  [[nodiscard]] const std::string& host() const override { return host_; }
  [[nodiscard]] int32_t num_on_host() const override { return launched("OMPI_COMM_WORLD_LOCAL_SIZE"); }
  [[nodiscard]] std::string_view transport() const override { return "mpi"; }

  Result<void> send(int32_t to, int32_t tag, std::span<const std::byte> bytes, std::shared_ptr<const void> owner, const Patience& patience) override {
    CHECK(bytes.size() <= static_cast<size_t>(std::numeric_limits<int>::max()));
    OpenMpi::Handle request = nullptr;
    RETURN_IF_ERROR(outcome(mpi_.isend(bytes.data(), static_cast<int>(bytes.size()), mpi_.bytes, to, tag, mpi_.world, &request), "MPI_Isend"));
    return complete(request, "a message for", to, std::move(owner), patience);
  }

  Result<std::vector<std::byte>> receive(int32_t from, int32_t tag, const Patience& patience) override {
    ASSIGN_OR_RETURN(Incoming incoming, await(from, tag, patience));
    auto bytes = std::make_shared<std::vector<std::byte>>(incoming.num_bytes);
    RETURN_IF_ERROR(take(incoming, *bytes, bytes, from, patience));
    return std::move(*bytes);
  }

  Result<size_t> receive(int32_t from, int32_t tag, std::span<std::byte> room, std::shared_ptr<void> owner, const Patience& patience) override {
    ASSIGN_OR_RETURN(Incoming incoming, await(from, tag, patience));
    if (incoming.num_bytes > room.size()) return make_error(ErrorCode::kInternal, "process {} has sent {} bytes where {} were the most", from, incoming.num_bytes, room.size());
    RETURN_IF_ERROR(take(incoming, room.first(incoming.num_bytes), std::move(owner), from, patience));
    return incoming.num_bytes;
  }

  void leave() override { mpi_.finalize(); }

 private:
  struct Incoming {
    OpenMpi::Handle message = nullptr;
    size_t num_bytes = 0;
  };

  [[nodiscard]] Result<void> outcome(int code, std::string_view function) const {
    if (code == OpenMpi::kSuccess) return {};
    char text[OpenMpi::kMaxName] = {};
    int length = 0;
    mpi_.error_string(code, text, &length);
    return make_error(ErrorCode::kUnavailable, "{}: {}", function, text);
  }

  Result<Incoming> await(int32_t from, int32_t tag, const Patience& patience) {
    Incoming incoming;
    OpenMpi::Status status{};
    int found = 0, count = 0;
    for (Waiting waiting(patience);;) {
      RETURN_IF_ERROR(outcome(mpi_.improbe(from, tag, mpi_.world, &found, &incoming.message, &status), "MPI_Improbe"));
      if (found != 0) break;
      if (!waiting.once_more()) return waiting.given_up("a message from", from);
    }
    RETURN_IF_ERROR(outcome(mpi_.get_count(&status, mpi_.bytes, &count), "MPI_Get_count"));
    incoming.num_bytes = static_cast<size_t>(count);
    return incoming;
  }

  Result<void> take(Incoming& incoming, std::span<std::byte> room, std::shared_ptr<const void> owner, int32_t from, const Patience& patience) {
    OpenMpi::Handle request = nullptr;
    RETURN_IF_ERROR(outcome(mpi_.imrecv(room.data(), static_cast<int>(room.size()), mpi_.bytes, &incoming.message, &request), "MPI_Imrecv"));
    return complete(request, "the rest of a message from", from, std::move(owner), patience);
  }

  Result<void> complete(OpenMpi::Handle request, std::string_view what, int32_t other, std::shared_ptr<const void> owner, const Patience& patience) {
    OpenMpi::Status status{};
    int done = 0;
    for (Waiting waiting(patience);;) {
      const Result<void> tested = outcome(mpi_.test(&request, &done, &status), "MPI_Test");
      if (tested && done != 0) return {};
      if (tested && waiting.once_more()) continue;
      // MPI cannot take a message back, so what it may still read or write stays where it is.
      const std::lock_guard lock(mutex_);
      given_up_.push_back(std::move(owner));
      if (!tested) return tested.error();
      return waiting.given_up(what, other);
    }
  }

  const OpenMpi mpi_;
  const int32_t rank_, size_;
  const std::string host_;
  std::mutex mutex_;
  std::vector<std::shared_ptr<const void>> given_up_;  // under mutex_
};

/// Threads that a library starts take no signals: those are for the program.
class SignalsBlocked {
 public:
  SignalsBlocked() {
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_BLOCK, &all, &before_);
  }
  ~SignalsBlocked() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
  SignalsBlocked(const SignalsBlocked&) = delete;
  SignalsBlocked& operator=(const SignalsBlocked&) = delete;

 private:
  sigset_t before_{};
};

}  // namespace

Result<std::unique_ptr<Processes>> join_processes() {
  if (launched("OMPI_COMM_WORLD_SIZE") <= 1) {
    for (const char* name : {"PMI_SIZE", "MPI_LOCALNRANKS"})
      if (launched(name) > 1) return make_error(ErrorCode::kUnsupported, "{} says that another MPI's launcher has started this process; that of Open MPI is wanted", name);
    return std::unique_ptr<Processes>();
  }
  ASSIGN_OR_RETURN(const OpenMpi mpi, OpenMpi::load());
  const SignalsBlocked blocked;
  int provided = 0, rank = 0, size = 1, length = 0;
  if (mpi.init_thread(nullptr, nullptr, OpenMpi::kThreadMultiple, &provided) != OpenMpi::kSuccess) return make_error(ErrorCode::kUnavailable, "MPI_Init_thread has failed");
  if (provided < OpenMpi::kThreadMultiple) return make_error(ErrorCode::kUnsupported, "this Open MPI does not serve several threads (MPI_THREAD_MULTIPLE)");
  mpi.set_error_handler(mpi.world, mpi.errors_return);
  mpi.rank(mpi.world, &rank);
  mpi.size(mpi.world, &size);
  char host[OpenMpi::kMaxName + 1] = {};
  mpi.processor_name(host, &length);
  return std::unique_ptr<Processes>(std::make_unique<MpiProcesses>(mpi, rank, size, host));
}

}  // namespace quern::worker
