#pragma once

#include "backends/cuda/collective_args.h"

// Accesses to memory that other GPUs and the host see. Device code only.

namespace quern::cuda {

__device__ inline uint64_t global_time_ns() {
  uint64_t time;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(time));
  return time;
}

// Volatile accesses are relaxed ones at system scope; elements of a vector are single words.
__device__ inline Line load_line(const Line* line) {
  Line value;
  asm volatile("ld.volatile.global.v2.u64 {%0, %1}, [%2];" : "=l"(value.half[0]), "=l"(value.half[1]) : "l"(line) : "memory");
  return value;
}
__device__ inline void store_line(Line* line, const Line& value) {
  asm volatile("st.volatile.global.v2.u64 [%0], {%1, %2};" ::"l"(line), "l"(value.half[0]), "l"(value.half[1]) : "memory");
}
__device__ inline uint4 load_shared_data(const uint4* data) {
  uint4 v;
  asm volatile("ld.volatile.global.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(data) : "memory");
  return v;
}
__device__ inline void store_shared_data(uint4* data, const uint4& v) {
  asm volatile("st.volatile.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(data), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}
__device__ inline uint32_t acquire(const uint32_t* word) {
  uint32_t value;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(word) : "memory");
  return value;
}
__device__ inline void release(uint32_t* word, uint32_t value) { asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(word), "r"(value) : "memory"); }
__device__ inline uint32_t look(const uint32_t* word) { return *static_cast<const volatile uint32_t*>(word); }

}  // namespace quern::cuda
