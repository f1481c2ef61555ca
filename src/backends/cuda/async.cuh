#pragma once

#include <cstdint>

#include "backends/cuda/step_tables.h"

// Copies to shared memory that do not pass registers, reading ahead, and launches that overlap. Device code only.

namespace quern::cuda {

__device__ inline uint32_t shared_address(const void* pointer) { return static_cast<uint32_t>(__cvta_generic_to_shared(pointer)); }

/// 16 bytes from global to shared memory; both are 16-byte aligned.
__device__ inline void copy_async(void* to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(to)), "l"(from) : "memory");
}
/// The same, or 16 bytes of zeros.
__device__ inline void copy_async(void* to, const void* from, bool given) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to)), "l"(from), "r"(given ? 16 : 0) : "memory");
}
/// 4 bytes.
__device__ inline void copy_word_async(void* to, const void* from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(shared_address(to)), "l"(from) : "memory");
}
__device__ inline void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
/// Waits until at most kPending of this thread's groups are under way.
template <int kPending>
__device__ inline void await_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

/// Asks for `bytes` (a multiple of 16) in the L2 cache. On GPUs without bulk copies it does nothing.
__device__ inline void prefetch_bytes(const void* from, int64_t bytes) {
#if __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(static_cast<uint32_t>(bytes)) : "memory");
#endif
}
/// Asks for the word and its neighbours in the L2 cache.
__device__ inline void prefetch_line(const void* word) { asm volatile("prefetch.global.L2 [%0];" ::"l"(word)); }
/// One thread: asks for share `number` of `count`.
__device__ inline void prefetch_share(const Prefetch& prefetch, int number, int count) {
  constexpr int64_t kPiece = 16 << 10;
  const int64_t pieces = (prefetch.bytes + kPiece - 1) / kPiece;
  for (int64_t piece = pieces * number / count; piece < pieces * (number + 1) / count; ++piece) {
    const int64_t at = piece * kPiece;
    prefetch_bytes(static_cast<const char*>(prefetch.address) + at, prefetch.bytes - at < kPiece ? prefetch.bytes - at : kPiece);
  }
}

/// What a kernel reads of the one before it in the stream may be read after this. Without programmatic dependent launch it does nothing.
__device__ inline void await_predecessor() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
/// The kernel after this one may start; it waits by itself.
__device__ inline void release_successor() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

}  // namespace quern::cuda
