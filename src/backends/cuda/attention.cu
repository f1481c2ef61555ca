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

__device__ void write_kv(void* cache, DType dtype, const float* scales, int kv_head, int64_t at, float x) {
  if (dtype == DType::kE4M3)
    static_cast<uint8_t*>(cache)[at] = f32_to_e4m3(x / (scales == nullptr ? 1.0f : scales[kv_head]));
  else
    store(cache, dtype, at, x);
}

/// The other way round than unpack8, for what bf16 holds.
__device__ __forceinline__ uint4 narrow(const float (&x)[8]) {
  uint32_t word[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) word[i] = __float_as_uint(x[2 * i]) >> 16 | (__float_as_uint(x[2 * i + 1]) & 0xffff0000u);
  return make_uint4(word[0], word[1], word[2], word[3]);
}
/// Sum of the squares of a warp's 256 elements, lane l's eight from 8 l on, in the order of block_sum<256>.
__device__ __forceinline__ float square_sum_256(const float (&x)[8]) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const bool second = (lane & 1) != 0, upper = (lane & 2) != 0;
  float four[4], two[2];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float low = x[i] * x[i], high = x[i + 4] * x[i + 4];
    four[i] = (upper ? high : low) + __shfl_xor_sync(kAllLanes, upper ? low : high, 2);
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) two[i] = (second ? four[i + 2] : four[i]) + __shfl_xor_sync(kAllLanes, second ? four[i] : four[i + 2], 1);
  float of_32 = (upper ? two[1] : two[0]) + __shfl_xor_sync(kAllLanes, upper ? two[0] : two[1], 2);
  of_32 += __shfl_xor_sync(kAllLanes, of_32, 1);
  of_32 += __shfl_xor_sync(kAllLanes, of_32, 2);
  float sum = 0;
#pragma unroll
  for (int i = 0; i < 8; ++i) sum += __shfl_sync(kAllLanes, of_32, 4 * i);
  return sum;
}
__device__ __forceinline__ void write_kv_eight(void* cache, DType dtype, const float* scales, int kv_head, int64_t at, const uint4& words) {
  if (dtype != DType::kE4M3) {
    *reinterpret_cast<uint4*>(static_cast<__nv_bfloat16*>(cache) + at) = words;
    return;
  }
  const float scale = scales == nullptr ? 1.0f : scales[kv_head];
  float x[8];
  unpack8(words, x);
  uint32_t code[2] = {};
#pragma unroll
  for (int i = 0; i < 8; ++i) code[i / 4] |= static_cast<uint32_t>(f32_to_e4m3(x[i] / scale)) << (i % 4 * 8);
  *reinterpret_cast<uint2*>(static_cast<uint8_t*>(cache) + at) = make_uint2(code[0], code[1]);
}

}  // namespace

/// A block per row and head; query heads first, then kv heads. One row is waited for by a whole GPU: weights are read before the predecessor has ended, and what is far away is on its way at once.
extern "C" __global__ void __launch_bounds__(kThreads) rotate_rows(const __grid_constant__ RotateArgs args) {
  constexpr int kDims = kMaxHeadDim / kThreads;  // of a thread
  __shared__ float values[kMaxHeadDim];
  __shared__ float shared[kWarps];
  release_successor();
  const int thread = static_cast<int>(threadIdx.x), local = static_cast<int>(blockIdx.x), row = args.first_row + local, head = static_cast<int>(blockIdx.y), d = args.head_dim, half = args.num_frequencies;
  const int kv_head = head - args.num_q_heads;
  const bool is_query = kv_head < 0;
  const int32_t* const position = args.step.positions + int64_t{row} * 3;
  const int32_t* const block_table = is_query || args.step.row_runs[row] < 0 ? nullptr : block_table_of(args.step, row);
  if (thread == 0) {
    prefetch_line(position);
    prefetch_line(args.step.indices + row);
  }
  const auto each = [&](const auto& visit) {  // visit(c, i): the thread's elements
#pragma unroll
    for (int c = 0; c < kDims; ++c)
      if (const int i = thread + c * kThreads; i < d) visit(c, i);
  };
  float factors[kDims], x[kDims], beside[kDims];  // beside: of the gate, or of the value
  each([&](int c, int i) { factors[c] = (is_query ? args.q_norm : args.k_norm)[i]; });
  static_assert(kMaxHeadDim / 2 <= kThreads);  // a thread turns a pair at most
  const bool turns = thread < half;
  const int axis = turns ? args.axis[thread] : 0;
  const float frequency = turns ? args.inv_freq[thread] : 0;
  await_predecessor();
  const int index = args.step.indices[row], turn = turns ? position[axis] : 0;
  const int64_t from = is_query ? (int64_t{local} * args.num_q_heads + head) * 2 * d : (int64_t{local} * args.num_kv_heads + kv_head) * d;
  float sum = 0;
  each([&](int c, int i) {
    x[c] = load(is_query ? args.q : args.k, args.activation, from + i);
    beside[c] = is_query ? load(args.q, args.activation, from + d + i) : load(args.v, args.activation, from + i);
  });
  if (!is_query && index < 0) return;  // padding
  const int64_t to = (is_query ? int64_t{row} * args.num_q_heads + head : place_of(block_table, index, kv_head, args.num_kv_heads)) * d;
  float sine = 0, cosine = 0;
  if (turns) {
    sincosf(static_cast<float>(turn) * frequency, &sine, &cosine);
    sine = round_to(args.activation, sine * args.rope_scale);
    cosine = round_to(args.activation, cosine * args.rope_scale);
  }
  each([&](int c, int) { sum = fmaf(x[c], x[c], sum); });
  const float scale = 1.0f / sqrtf(block_sum<kThreads>(sum, shared) / static_cast<float>(d) + args.eps);
  each([&](int c, int i) { values[i] = round_to(args.activation, x[c] * scale * factors[c]); });
  __syncthreads();
  if (turns) {
    const float a = values[thread], b = values[thread + half];
    values[thread] = round_to(args.activation, a * cosine - b * sine);
    values[thread + half] = round_to(args.activation, b * cosine + a * sine);
  }
  __syncthreads();
  each([&](int c, int i) {
    if (is_query) {
      store(args.query, args.activation, to + i, values[i]);
      store(args.gate, args.activation, to + i, beside[c]);
    } else {
      write_kv(args.kv.k, args.kv.dtype, args.kv.k_scale, kv_head, to + i, values[i]);
      write_kv(args.kv.v, args.kv.dtype, args.kv.v_scale, kv_head, to + i, beside[c]);
    }
  });
}

/// The same for heads of 256 elements of bf16 and frequencies in eights: a warp has a head, eight neighbouring elements a lane; kRotatedHeads heads a block. Sums have the order that they have there.
extern "C" __global__ void __launch_bounds__(kRotatedHeads * 32) rotate_heads_256(const __grid_constant__ RotateArgs args) {
  constexpr int kDim = 256;
  __shared__ __align__(16) float sines[kDim / 2], cosines[kDim / 2];
  release_successor();
  await_predecessor();
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32, head = static_cast<int>(blockIdx.y) * kRotatedHeads + thread / 32;
  const int local = static_cast<int>(blockIdx.x), row = args.first_row + local, frequencies = args.num_frequencies, kv_head = head - args.num_q_heads;
  const int index = args.step.indices[row];
  const bool is_query = kv_head < 0, there = is_query || (kv_head < args.num_kv_heads && index >= 0);  // padding has no place in the cache
  uint4 words = {0, 0, 0, 0}, beside = words;  // what is turned; the gate, or the value
  if (there) {
    const int64_t at = is_query ? (int64_t{local} * args.num_q_heads + head) * 2 * kDim : (int64_t{local} * args.num_kv_heads + kv_head) * kDim;
    const auto eight = [&](const void* from, int64_t first) { return *reinterpret_cast<const uint4*>(static_cast<const __nv_bfloat16*>(from) + first + lane * 8); };
    words = eight(is_query ? args.q : args.k, at);
    beside = is_query ? eight(args.q, at + kDim) : eight(args.v, at);
  }
  const int32_t* position = args.step.positions + int64_t{row} * 3;
  for (int i = thread; i < frequencies; i += kRotatedHeads * 32) {
    float sine, cosine;
    sincosf(static_cast<float>(position[args.axis[i]]) * args.inv_freq[i], &sine, &cosine);
    sines[i] = round_to(DType::kBF16, sine * args.rope_scale);
    cosines[i] = round_to(DType::kBF16, cosine * args.rope_scale);
  }
  __syncthreads();
  if (!there) return;
  float x[8];
  unpack8(words, x);
  const float scale = 1.0f / sqrtf(square_sum_256(x) / static_cast<float>(kDim) + args.eps);
  const float* factors = (is_query ? args.q_norm : args.k_norm) + lane * 8;
#pragma unroll
  for (int i = 0; i < 8; ++i) x[i] = round_to(DType::kBF16, x[i] * scale * factors[i]);
  const int lanes = frequencies / 8, first = lane < lanes ? lane * 8 : (lane - lanes) * 8;  // lanes that hold the first elements of pairs
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const float other = __shfl_sync(kAllLanes, x[i], lane < lanes ? lane + lanes : lane - lanes);
    if (lane >= 2 * lanes) continue;
    const float a = lane < lanes ? x[i] : other, b = lane < lanes ? other : x[i], sine = sines[first + i], cosine = cosines[first + i];
    const float low = a * cosine - b * sine, high = b * cosine + a * sine;
    x[i] = round_to(DType::kBF16, lane < lanes ? low : high);
  }
  if (is_query) {
    const int64_t to = (int64_t{row} * args.num_q_heads + head) * kDim + lane * 8;
    *reinterpret_cast<uint4*>(static_cast<__nv_bfloat16*>(args.query) + to) = narrow(x);
    *reinterpret_cast<uint4*>(static_cast<__nv_bfloat16*>(args.gate) + to) = beside;
    return;
  }
  const int64_t to = place_of(block_table_of(args.step, row), index, kv_head, args.num_kv_heads) * kDim + lane * 8;
  write_kv_eight(args.kv.k, args.kv.dtype, args.kv.k_scale, kv_head, to, narrow(x));
  write_kv_eight(args.kv.v, args.kv.dtype, args.kv.v_scale, kv_head, to, beside);
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
