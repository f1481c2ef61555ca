#include "backends/cuda/async.cuh"
#include "backends/cuda/attention_args.h"
#include "backends/cuda/numeric.cuh"

namespace quern::cuda {

namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32;

__device__ const int32_t* block_table_of(const StepTables& step, int row) {
  return step.block_tables + int64_t{step.runs[step.row_runs[row]].slot} * step.block_tables_stride;
}
/// The row of the cache that holds `index` of a sequence.
__device__ int64_t place_of(const int32_t* block_table, int index, int kv_head, int num_kv_heads) {
  return (int64_t{block_table[index / kGrid]} * num_kv_heads + kv_head) * kGrid + index % kGrid;
}

/// values <- rotate(norm(values)); all threads of the block, `values` in shared memory.
__device__ void norm_and_rotate(const RotateArgs& args, float* values, const float* factors, const int32_t* position, float* shared) {
  const int d = args.head_dim, half = args.num_frequencies;
  float sum = 0;
  for (int i = static_cast<int>(threadIdx.x); i < d; i += kThreads) sum = fmaf(values[i], values[i], sum);
  const float scale = 1.0f / sqrtf(block_sum<kThreads>(sum, shared) / static_cast<float>(d) + args.eps);
  for (int i = static_cast<int>(threadIdx.x); i < d; i += kThreads) values[i] = round_to(args.activation, values[i] * scale * factors[i]);
  __syncthreads();
  for (int i = static_cast<int>(threadIdx.x); i < half; i += kThreads) {
    const float angle = static_cast<float>(position[args.axis[i]]) * args.inv_freq[i];
    float sine, cosine;
    sincosf(angle, &sine, &cosine);
    sine = round_to(args.activation, sine * args.rope_scale);
    cosine = round_to(args.activation, cosine * args.rope_scale);
    const float a = values[i], b = values[i + half];
    values[i] = round_to(args.activation, a * cosine - b * sine);
    values[i + half] = round_to(args.activation, b * cosine + a * sine);
  }
  __syncthreads();
}

__device__ void write_kv(void* cache, DType dtype, const float* scales, int kv_head, int64_t at, float x) {
  if (dtype == DType::kE4M3)
    static_cast<uint8_t*>(cache)[at] = f32_to_e4m3(x / (scales == nullptr ? 1.0f : scales[kv_head]));
  else
    store(cache, dtype, at, x);
}

}  // namespace

/// A block per row and head; query heads first, then kv heads.
extern "C" __global__ void __launch_bounds__(kThreads) rotate_rows(const __grid_constant__ RotateArgs args) {
  __shared__ float values[kMaxHeadDim];
  __shared__ float shared[kWarps];
  release_successor();
  await_predecessor();
  const int local = static_cast<int>(blockIdx.x), row = args.first_row + local, head = static_cast<int>(blockIdx.y), d = args.head_dim;
  const int32_t* position = args.step.positions + int64_t{row} * 3;
  if (head < args.num_q_heads) {
    const int64_t from = (int64_t{local} * args.num_q_heads + head) * 2 * d, to = (int64_t{row} * args.num_q_heads + head) * d;
    for (int i = static_cast<int>(threadIdx.x); i < d; i += kThreads) {
      values[i] = load(args.q, args.activation, from + i);
      store(args.gate, args.activation, to + i, load(args.q, args.activation, from + d + i));
    }
    __syncthreads();
    norm_and_rotate(args, values, args.q_norm, position, shared);
    for (int i = static_cast<int>(threadIdx.x); i < d; i += kThreads) store(args.query, args.activation, to + i, values[i]);
    return;
  }
  const int index = args.step.indices[row], kv_head = head - args.num_q_heads;
  if (index < 0) return;  // padding
  const int64_t from = (int64_t{local} * args.num_kv_heads + kv_head) * d;
  for (int i = static_cast<int>(threadIdx.x); i < d; i += kThreads) values[i] = load(args.k, args.activation, from + i);
  __syncthreads();
  norm_and_rotate(args, values, args.k_norm, position, shared);
  const int64_t to = place_of(block_table_of(args.step, row), index, kv_head, args.num_kv_heads) * d;
  for (int i = static_cast<int>(threadIdx.x); i < d; i += kThreads) {
    write_kv(args.kv.k, args.kv.dtype, args.kv.k_scale, kv_head, to + i, values[i]);
    write_kv(args.kv.v, args.kv.dtype, args.kv.v_scale, kv_head, to + i, load(args.v, args.activation, from + i));
  }
}

/// A block per row and query head. Parts of 512 keys from the sequence's start, each with its own maximum and sum, merged in order: a row's arithmetic depends on its
/// own index alone.
extern "C" __global__ void __launch_bounds__(kThreads) attention(const __grid_constant__ AttentionArgs args) {
  __shared__ float query[kMaxHeadDim], scores[kKvSplit], shared[kWarps], maxima[kWarps];
  constexpr int kDims = kMaxHeadDim / kThreads;  // of a thread
  const int row = static_cast<int>(blockIdx.x), head = static_cast<int>(blockIdx.y), d = args.head_dim;
  const int thread = static_cast<int>(threadIdx.x), warp = thread / 32, lane = thread % 32;
  const int64_t at = (int64_t{row} * args.num_q_heads + head) * d;
  const int index = args.step.indices[row];
  if (index >= 0) {
    const int32_t kind = (args.step.runs[args.step.row_runs[row]].flags & kIsDecode) != 0 ? kDecodeRuns : kPromptRuns;
    if ((kind & args.kinds) == 0) return;
  }
  if (index < 0) {
    for (int i = thread; i < d; i += kThreads) store(args.out, args.activation, at + i, 0.0f);
    return;
  }
  const int kv_head = args.kv_head[head];
  const int32_t* block_table = block_table_of(args.step, row);
  const bool scaled = args.kv.dtype == DType::kE4M3;
  const float k_scale = scaled && args.kv.k_scale != nullptr ? args.kv.k_scale[kv_head] : 1.0f;
  const float v_scale = scaled && args.kv.v_scale != nullptr ? args.kv.v_scale[kv_head] : 1.0f;
  const float scale = k_scale / sqrtf(static_cast<float>(d));
  for (int i = thread; i < d; i += kThreads) query[i] = load(args.query, args.activation, at + i);

  float total[kDims] = {}, max = -INFINITY, sum = 0;
  for (int part = args.first_index / static_cast<int>(kKvSplit) * static_cast<int>(kKvSplit); part <= index; part += static_cast<int>(kKvSplit)) {
    const int begin = part > args.first_index ? part : args.first_index, end = min(part + static_cast<int>(kKvSplit), index + 1);
    __syncthreads();
    float part_max = -INFINITY;
    for (int j = begin + warp; j < end; j += kWarps) {
      const int64_t key = place_of(block_table, j, kv_head, args.num_kv_heads) * d;
      float dot = 0;
      for (int i = lane; i < d; i += 32) dot = fmaf(query[i], load(args.kv.k, args.kv.dtype, key + i), dot);
      const float score = scale * warp_sum(dot);
      if (lane == 0) scores[j - part] = score;
      part_max = fmaxf(part_max, score);
    }
    if (lane == 0) maxima[warp] = part_max;
    __syncthreads();
    for (int w = 0; w < kWarps; ++w) part_max = fmaxf(part_max, maxima[w]);
    float weights = 0;
    for (int j = begin + thread; j < end; j += kThreads) {
      const float weight = expf(scores[j - part] - part_max);
      scores[j - part] = weight;
      weights += weight;
    }
    const float part_sum = block_sum<kThreads>(weights, shared);  // also: all weights are written
    float values[kDims] = {};
    for (int j = begin; j < end; ++j) {
      const int64_t value = place_of(block_table, j, kv_head, args.num_kv_heads) * d;
      const float weight = scores[j - part];
#pragma unroll
      for (int c = 0; c < kDims; ++c) {
        const int i = thread + c * kThreads;
        if (i < d) values[c] = fmaf(weight, load(args.kv.v, args.kv.dtype, value + i), values[c]);
      }
    }
    const float new_max = fmaxf(max, part_max), before = expf(max - new_max), now = expf(part_max - new_max);
    sum = sum * before + part_sum * now;
#pragma unroll
    for (int c = 0; c < kDims; ++c) total[c] = total[c] * before + values[c] * now;
    max = new_max;
  }
  const float factor = sum > 0 ? v_scale / sum : sum;  // no key at all: 0; NaN stays NaN
#pragma unroll
  for (int c = 0; c < kDims; ++c) {
    const int i = thread + c * kThreads;
    if (i >= d) continue;
    const float gate = load(args.gate, args.activation, at + i);
    store(args.out, args.activation, at + i, round_to(args.activation, total[c] * factor) * round_to(args.activation, sigmoid(gate)));
  }
}

}  // namespace quern::cuda
