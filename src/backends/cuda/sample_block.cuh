#pragma once

#include "backends/cuda/sample.cuh"

// What blocks of 1,024 threads that sample rows of logits have in common, a block a row (sample_rows.cu) or a cluster (sample_sm90.cu): the best of what threads have, their sum, the bins of a histogram, and the token at which a count or weight is reached.

namespace quern::cuda {

inline constexpr int kSampleThreads = 1024;
inline constexpr int kBins = 2048;

/// The largest key of the block, in every thread; 0 where there is none.
template <class Shared>
__device__ uint64_t block_max(uint64_t key, Shared& s) {
  for (int distance = 16; distance > 0; distance /= 2) {
    const uint64_t other = __shfl_xor_sync(kAllLanes, key, distance);
    key = other > key ? other : key;
  }
  __syncthreads();
  if (threadIdx.x % 32 == 0) s.keys[threadIdx.x / 32] = key;
  __syncthreads();
  key = s.keys[threadIdx.x % 32];
  for (int distance = 16; distance > 0; distance /= 2) {
    const uint64_t other = __shfl_xor_sync(kAllLanes, key, distance);
    key = other > key ? other : key;
  }
  return key;
}
/// The sum of what the threads have, in every thread, added up in one order.
template <class Shared>
__device__ double block_total(double x, Shared& s) {
  for (int distance = 16; distance > 0; distance /= 2) x += __shfl_xor_sync(kAllLanes, x, distance);
  __syncthreads();
  if (threadIdx.x % 32 == 0) s.sums[threadIdx.x / 32] = x;
  __syncthreads();
  x = s.sums[threadIdx.x % 32];
  for (int distance = 16; distance > 0; distance /= 2) x += __shfl_xor_sync(kAllLanes, x, distance);
  return x;
}

/// How a histogram sorts tokens, the most likely ones to bin 0: by their distance to the best one, then the tokens of one bin by their place in it, then, if they are still too many, by the digits of
/// their keys.
struct Level {
  float best, per_logit;
  int depth = 0;
  int chosen[2] = {};
  uint64_t known = 0, prefix = 0;

  __device__ int shift() const { return depth == 7 ? 0 : 53 - 11 * (depth - 2); }
  /// -1: the histogram is not about this token.
  __device__ int bin(float x, int id) const {
    const float distance = __fmul_rn(__fsub_rn(best, x), per_logit);
    const int first = min(kBins - 1, __float2int_rz(distance));
    if (depth == 0) return first;
    if (first != chosen[0]) return -1;
    const int second = min(kBins - 1, __float2int_rz(__fmul_rn(__fsub_rn(distance, static_cast<float>(first)), static_cast<float>(kBins))));
    if (depth == 1) return second;
    if (second != chosen[1]) return -1;
    const uint64_t key = key_of(x, id);
    return (key & known) == prefix ? kBins - 1 - static_cast<int>(key >> shift() & (kBins - 1)) : -1;
  }
  __device__ void descend(int bin) {
    if (depth < 2) {
      chosen[depth] = bin;
    } else {
      prefix |= static_cast<uint64_t>(kBins - 1 - bin) << shift();
      known |= static_cast<uint64_t>(kBins - 1) << shift();
    }
    ++depth;
  }
};

/// Of `count` tokens, a thread each, the one at which their number in the order of their keys, or their weight, reaches `wanted`: its thread leaves it in s.answer, with the weight up to it and `weight_before`.
template <class Shared>
__device__ void answer_among(const uint64_t* keys, const uint64_t* weights, int count, bool by_weight, uint64_t wanted, bool weighted, uint64_t weight_before, Shared& s) {
  const int thread = static_cast<int>(threadIdx.x);
  if (thread >= count) return;
  const uint64_t mine = keys[thread], own_weight = weighted ? weights[thread] : 0;
  uint64_t larger = 0, larger_weight = 0;
  for (int i = 0; i < count; ++i)
    if (keys[i] > mine) {
      ++larger;
      if (weighted) larger_weight += weights[i];
    }
  if (by_weight ? larger_weight < wanted && larger_weight + own_weight >= wanted : larger + 1 == wanted) {
    s.answer = mine;
    s.answer_weight = weight_before + larger_weight + own_weight;
  }
}

}  // namespace quern::cuda
