#pragma once

#include <atomic>
#include <mutex>
#include <optional>

#include "ops/device.h"

namespace quern::cpu {

/// Runs what it is given at once, on the calling thread. What can fail is a wait for another rank: the first failure is kept, and finish() and wait() report it.
class Stream final : public ops::Stream {
 public:
  explicit Stream(bool records) : records_(records) {}
  void copy_to_device(const void* source, const ops::TensorView& destination) override;
  void copy_to_host(const ops::TensorView& source, void* destination) override;
  void copy(const ops::TensorView& source, const ops::TensorView& destination) override;
  void fill_zero(const ops::TensorView& destination) override;
  Result<void> finish() override { return outcome(); }
  ops::Mark mark() override { return 0; }
  Result<void> wait(ops::Mark) override { return outcome(); }  // what was enqueued is done
  [[nodiscard]] bool can_record() const override { return records_; }

  void fail(Error error);
  [[nodiscard]] Result<void> outcome() const;

 private:
  bool records_;
  std::atomic<bool> failed_ = false;
  mutable std::mutex mutex_;  // of error_: wait() is called from another thread
  std::optional<Error> error_;
};

/// The Stream behind a launch's stream.
inline Stream& cpu_stream(ops::Stream& stream) { return static_cast<Stream&>(stream); }

}  // namespace quern::cpu
