#pragma once

#include "backends/cuda/collective_args.h"
#include "emulation.h"

// What device code promises and no more: halves of a line arrive in any order, and what is not released may be late.

namespace quern::cuda {

inline uint64_t global_time_ns() { return static_cast<uint64_t>(std::chrono::steady_clock::now().time_since_epoch().count()); }

/// Now and then something happens elsewhere between two accesses; with slow ranks, much.
inline void stumble() {
  thread_local uint32_t count = 0;
  ++count;
  if (emulated::slow) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  else if (count % 13 == 0) std::this_thread::yield();
}
inline Line load_line(const Line* line) {
  stumble();
  Line value;
  for (int i : {0, 1}) value.half[i] = __atomic_load_n(&line->half[i], __ATOMIC_RELAXED);
  return value;
}
inline void store_line(Line* line, const Line& value) {
  for (int i : {1, 0}) {
    __atomic_store_n(&line->half[i], value.half[i], __ATOMIC_RELAXED);
    stumble();
  }
}
inline uint4 load_shared_data(const uint4* data) {
  stumble();
  return *data;
}
inline void store_shared_data(uint4* data, const uint4& value) {
  *data = value;
  stumble();
}
inline uint32_t acquire(const uint32_t* word) { return __atomic_load_n(word, __ATOMIC_ACQUIRE); }
inline void release(uint32_t* word, uint32_t value) { __atomic_store_n(word, value, __ATOMIC_RELEASE); }
inline uint32_t look(const uint32_t* word) { return __atomic_load_n(word, __ATOMIC_RELAXED); }

}  // namespace quern::cuda
