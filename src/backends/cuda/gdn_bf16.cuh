#pragma once

#include "backends/cuda/gdn_jobs.cuh"

// What the kernels for decode rows of rings of bfloat16 have in common: how products and updates stand in shared memory, and the fold of a
// chunk. Device code only.
//
// Factors that are no bf16 (q, weights, updates of a fold) are split in two: products are those of f32 to about 2^-17.

namespace quern::cuda {

inline constexpr int kParts = 3;  // k, q in two
inline constexpr int kTerms = 4;  // weights for k in two, for q in two

/// What a row knows of a head.
struct alignas(16) Factors {
  float beta, decay, total;  // decay: e^total
  float own;                 // k . q of the row itself
};

/// Where piece `i` of position j stands: lanes that read at the same time find different banks.
__device__ constexpr int update_piece(int j, int i) { return i ^ (j / 4 % 2); }
/// Where the weight of position j stands among 64 of a term: lane t of four has positions 2 t and the next of each eight, one after the
/// other.
__device__ inline int weight_at(int j) { return (j % 8 / 2 * 8 + j / 8) * 2 + j % 2; }

/// By all threads: the keys of the chunk at `start` at their places in `tile`; those from position `own` on are the rows' own.
template <class Memory>
__device__ void stage_keys(Memory& s, void* tile, const GdnArgs& g, const Job& job, int start, int own) {
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
  for (int i = 0; i < kChunk / kWarps / 2; ++i) {  // a warp has its eight positions, half of it one
    const int j = warp * (kChunk / kWarps) + 2 * i + lane / 16, piece = lane % 16;
    const uint4 x =
        j < own ? __ldcg(reinterpret_cast<const uint4*>(static_cast<const __nv_bfloat16*>(g.ring_k) +
                                                        (ring_row(g, job, start, j) * g.num_k_heads + job.k_head) * kDim + 8 * piece))
                : *reinterpret_cast<const uint4*>(&s.parts[j - own][0][8 * piece]);
    *reinterpret_cast<uint4*>(static_cast<unsigned char*>(tile) + swizzled<kDim / 8>(j, piece)) = x;
  }
}

/// Products of the warp's eight keys with k and q in two of each row, summed: to `dots`, by position. `earlier`: of the key lane / 4 the 32
/// places that lane % 4 has.
template <int kRows, class Memory>
__device__ __forceinline__ void put_dots(Memory& s, const uint4 (&earlier)[4], int warp, int lane) {
  float sums[2][4] = {};
  const int r = kRows == 1 ? 0 : lane / 16, part = min(lane / 4 % 4, kParts - 1);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const uint4 x = *reinterpret_cast<const uint4*>(&s.parts[r][part][8 * (lane % 4) + 32 * i]);
    uint4 further{0, 0, 0, 0};
    if constexpr (kRows > 2) further = *reinterpret_cast<const uint4*>(&s.parts[r + 2][part][8 * (lane % 4) + 32 * i]);
    const uint32_t front[4] = {x.x, further.x, x.y, further.y}, back[4] = {x.z, further.z, x.w, further.w};
    multiply_add(sums[0], front, earlier[i].x, earlier[i].y);
    multiply_add(sums[1], back, earlier[i].z, earlier[i].w);
  }
  if (lane / 4 % 4 < kParts && (kRows > 1 || lane < 16)) {
    const int j = warp * 8 + 2 * (lane % 4);
    *reinterpret_cast<float2*>(&s.dots[r][part][j]) = {sums[0][0] + sums[1][0], sums[0][1] + sums[1][1]};
    if constexpr (kRows > 2) *reinterpret_cast<float2*>(&s.dots[r + 2][part][j]) = {sums[0][2] + sums[1][2], sums[0][3] + sums[1][3]};
  }
}

/// A row's update and output at the lane's column.
struct UpdateAndOutput {
  __nv_bfloat16 u;
  float o;
};
/// Of two lanes one has the sum over S with q, the other that with k: `along_state`. `sums`: over the updates of earlier positions, in two
/// terms.
__device__ __forceinline__ UpdateAndOutput finish_row(const Factors& factors, float v, float along_state, const float (&sums)[4],
                                                      bool has_q, int lane) {
  const float along_updates = lane % 4 < 2 ? sums[0] + sums[1] : sums[2] + sums[3];
  const float sum = fmaf(factors.decay, along_state, along_updates), other = __shfl_xor_sync(kAllLanes, sum, 1);
  const __nv_bfloat16 u = __float2bfloat16_rn(factors.beta * (v - (has_q ? other : sum)));
  return {u, fmaf(factors.own, __bfloat162float(u), has_q ? sum : other)};
}

/// What a head's outputs are normed by. `squares`: the sums of those that each warp has.
__device__ __forceinline__ float norm_factor(const float (&squares)[kWarps], float eps) {
  float sum = 0;
#pragma unroll
  for (int w = 0; w < kWarps; ++w) sum += squares[w];
  return rsqrtf(sum / static_cast<float>(kDim) + eps);
}

/// S <- e^G64 S + sum_j e^(G64 - Gj) uj kj^T for the warp's columns: where `stored` is given there, and in shared memory if it is read
/// again; if not, the columns at `refill`, where given, are asked for in its place as soon as it is read. `factors`: e^(G64 - Gj) of the
/// positions lane and lane + 32. The chunk's updates are staged; so are its keys if they have a place of their own. If not, all warps of
/// the block do this together, and keys take the updates' place.
template <bool kKeysApart, class Memory>
__device__ void fold(Memory& s, const GdnArgs& g, const Job& job, int start, float decay, const float (&factors)[2], int own, float* stored,
                     const float* refill, bool is_read, int warp, int lane) {
  constexpr int kSteps = kChunk / 16;        // of a matrix instruction along positions
  uint32_t high[kSteps][4], low[kSteps][4];  // of 16 columns, 16 positions: two positions of a column
  const uint32_t mine = shared_address(&s.updates[warp][lane / 16 * 8 + lane % 8][update_piece(lane % 8, lane / 8 % 2) * 8]);
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    uint32_t u[4];
    load_matrices_transposed(u, mine + step * 16 * kColumns * sizeof(__nv_bfloat16));
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int j = (16 * step + 8 * half + 2 * (lane % 4)) % 32;
      const float first = __shfl_sync(kAllLanes, factors[step / 2], j), second = __shfl_sync(kAllLanes, factors[step / 2], j + 1);
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        const uint32_t pair = u[2 * half + n];
        const SplitPair parts = split(first * __uint_as_float(pair << 16), second * __uint_as_float(pair & 0xffff0000u));
        high[step][2 * half + n] = parts.high;
        low[step][2 * half + n] = parts.low;
      }
    }
  }
  const void* keys = s.keys;
  if constexpr (!kKeysApart) {
    __syncthreads();
    stage_keys(s, s.updates, g, job, start, own);
    __syncthreads();
    keys = s.updates;
  }
  const uint32_t tile = shared_address(keys);
  fold_state(s.state, decay, stored, refill, is_read, warp, lane, [&](int first_pair, float(&sum)[kPairsAtOnce][2][4]) {
#pragma unroll
    for (int step = 0; step < kSteps; ++step)
#pragma unroll
      for (int pair = 0; pair < kPairsAtOnce; ++pair) {
        uint32_t k[4];
        load_matrices_transposed(k,
                                 tile + swizzled<kDim / 8>(16 * step + lane / 8 % 2 * 8 + lane % 8, 2 * (first_pair + pair) + lane / 16));
#pragma unroll
        for (int n = 0; n < 2; ++n) {
          multiply_add(sum[pair][n], high[step], k[2 * n], k[2 * n + 1]);
          multiply_add(sum[pair][n], low[step], k[2 * n], k[2 * n + 1]);
        }
      }
  });
  if constexpr (!kKeysApart)
    __syncthreads();  // before updates are copied there again
  else
    __syncwarp();
}

}  // namespace quern::cuda
