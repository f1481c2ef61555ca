#pragma once

#include <algorithm>
#include <atomic>
#include <barrier>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <memory>
#include <thread>
#include <vector>

#include "base/dtype.h"
#include "base/float_convert.h"

// As much of CUDA as the kernels of collective.cu use, for running them on a CPU: every thread of every block is a thread of the process.

#define __device__
#define __global__
#define __grid_constant__
#define __launch_bounds__(...)

struct uint2 {
  uint32_t x, y;
};
struct alignas(16) uint4 {
  uint32_t x, y, z, w;
};

namespace quern::emulated {

/// The barrier of a block; threads that have ended are not waited for.
struct Block {
  explicit Block(int num_threads) : barrier(num_threads) {}
  std::barrier<> barrier;
  std::atomic<bool> all = true;
};
struct Index {
  unsigned x = 0;
};
inline thread_local Index thread_index, block_index, block_extent, grid_extent;
inline thread_local Block* block = nullptr;
inline thread_local bool slow = false;  // what this thread launches takes its time over shared memory

template <class Args>
void launch(void (*kernel)(Args), int num_blocks, int num_threads, const std::remove_const_t<Args>& args) {
  std::vector<std::unique_ptr<Block>> blocks;
  std::vector<std::jthread> threads;
  for (int b = 0; b < num_blocks; ++b) {
    blocks.push_back(std::make_unique<Block>(num_threads));
    for (int t = 0; t < num_threads; ++t)
      threads.emplace_back([&args, kernel, b, t, num_threads, num_blocks, is_slow = slow, own = blocks.back().get()] {
        thread_index.x = static_cast<unsigned>(t);
        block_index.x = static_cast<unsigned>(b);
        block_extent.x = static_cast<unsigned>(num_threads);
        grid_extent.x = static_cast<unsigned>(num_blocks);
        block = own;
        slow = is_slow;
        kernel(args);
        own->barrier.arrive_and_drop();
      });
  }
}

}  // namespace quern::emulated

#define threadIdx quern::emulated::thread_index
#define blockIdx quern::emulated::block_index
#define blockDim quern::emulated::block_extent
#define gridDim quern::emulated::grid_extent

using std::min;
inline void __syncthreads() { quern::emulated::block->barrier.arrive_and_wait(); }
inline int __syncthreads_and(bool value) {
  quern::emulated::Block& block = *quern::emulated::block;
  if (!value) block.all = false;
  block.barrier.arrive_and_wait();
  const bool all = block.all;
  block.barrier.arrive_and_wait();
  block.all = true;
  block.barrier.arrive_and_wait();
  return all ? 1 : 0;
}
inline void __nanosleep(unsigned) { std::this_thread::yield(); }
inline void __threadfence_system() { std::atomic_thread_fence(std::memory_order_seq_cst); }
inline uint32_t atomicCAS(uint32_t* word, uint32_t expected, uint32_t wanted) {
  std::atomic_ref(*word).compare_exchange_strong(expected, wanted);
  return expected;
}
inline float __uint_as_float(uint32_t bits) { return std::bit_cast<float>(bits); }
inline uint32_t __float_as_uint(float value) { return std::bit_cast<uint32_t>(value); }
inline quern::bf16 __float2bfloat16_rn(float value) { return quern::to_bf16(value); }
inline uint16_t __bfloat16_as_ushort(quern::bf16 value) { return std::bit_cast<uint16_t>(value); }
