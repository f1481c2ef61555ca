#pragma once

#include <sys/mman.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <new>

namespace quern::tools {

/// When the engine gave each token, in memory that the processes of engine and clients share. Microseconds of the machine's steady clock.
class TokenTimes {
 public:
  TokenTimes(int32_t num_streams, int32_t num_tokens) : num_tokens_(num_tokens), size_(sizeof(int64_t) * num_streams * num_tokens) {
    void* memory = ::mmap(nullptr, size_, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
    times_ = memory == MAP_FAILED ? nullptr : new (memory) std::atomic<int64_t>[static_cast<size_t>(num_streams) * num_tokens] {};
  }
  ~TokenTimes() {
    if (times_ != nullptr) ::munmap(times_, size_);
  }
  TokenTimes(const TokenTimes&) = delete;
  TokenTimes& operator=(const TokenTimes&) = delete;

  [[nodiscard]] bool valid() const { return times_ != nullptr; }
  std::atomic<int64_t>& at(int32_t stream, int32_t token) const { return times_[int64_t{stream} * num_tokens_ + token]; }
  static int64_t now() {
    return std::chrono::duration_cast<std::chrono::microseconds>(std::chrono::steady_clock::now().time_since_epoch()).count();
  }

 private:
  int32_t num_tokens_;
  size_t size_;
  std::atomic<int64_t>* times_ = nullptr;
};

}  // namespace quern::tools
