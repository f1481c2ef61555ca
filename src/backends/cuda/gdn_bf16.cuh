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
/// Where piece `i` of a warp's column stands: eight columns' two pieces of matrix instructions lie in different banks.
__device__ inline int state_piece(int column, int i) { return i ^ 2 * (column % 4); }
/// Where the weight of position j stands among 64 of a term: lane t of four has positions 2 t and the next of each eight, one after the
/// other.
__device__ inline int weight_at(int j) { return (j % 8 / 2 * 8 + j / 8) * 2 + j % 2; }

template <class Memory>
__device__ void begin_state(Memory& s, const GdnArgs& g, int slot, int head, int warp, int lane) {
  const float* stored = g.state + ((slot * g.num_v_heads + head) * kDim + warp * kColumns) * kDim + 4 * lane;
#pragma unroll
  for (int c = 0; c < kColumns; ++c) copy_async(&s.state[warp][c][4 * state_piece(c, lane)], stored + c * kDim);
}
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

/// S <- e^G64 S + sum_j e^(G64 - Gj) uj kj^T for the warp's columns: where `stored` is given there, and in shared memory if it is read
/// again; if not, the columns at `refill`, where given, are asked for in its place as soon as it is read. `factors`: e^(G64 - Gj) of the
/// positions lane and lane + 32. The chunk's updates are staged; so are its keys if they have a place of their own. If not, all warps of
/// the block do this together, and keys take the updates' place.
template <bool kKeysApart, class Memory>
__device__ void fold(Memory& s, const GdnArgs& g, const Job& job, int start, float decay, const float (&factors)[2], int own, float* stored,
                     const float* refill, bool is_read, int warp, int lane) {
  constexpr int kTiles = kDim / 16, kSteps = kChunk / 16;  // of a matrix instruction: pairs of 8 places in a column; along positions
  uint32_t high[kSteps][4], low[kSteps][4];                // of 16 columns, 16 positions: two positions of a column
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
  constexpr int kAtOnce = 2;  // pairs of tiles: four chains of products hide each other's latency
#pragma unroll 1
  for (int first_pair = 0; first_pair < kTiles; first_pair += kAtOnce) {
    // Of two tiles of 8 places in a column: those of columns lane / 4 and 8 further, places 2 (lane % 4) and the next.
    float sum[kAtOnce][2][4];
    const auto at = [&](int pair, int n, int half) {
      const int column = lane / 4 + 8 * half;
      return reinterpret_cast<float2*>(
          &s.state[warp][column][4 * state_piece(column, 4 * (first_pair + pair) + 2 * n + lane % 4 / 2) + lane % 2 * 2]);
    };
#pragma unroll
    for (int pair = 0; pair < kAtOnce; ++pair)
#pragma unroll
      for (int n = 0; n < 2; ++n)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const float2 x = *at(pair, n, half);
          sum[pair][n][2 * half] = decay * x.x;
          sum[pair][n][2 * half + 1] = decay * x.y;
        }
    if (refill != nullptr) {
      __syncwarp();
#pragma unroll
      for (int i = 0; i < 2 * kAtOnce; ++i) {
        const int column = lane / 4 + i % 2 * 8, piece = 4 * (first_pair + i / 2) + lane % 4;
        copy_async(&s.state[warp][column][4 * state_piece(column, piece)], refill + column * kDim + 4 * piece);
      }
    }
#pragma unroll
    for (int step = 0; step < kSteps; ++step)
#pragma unroll
      for (int pair = 0; pair < kAtOnce; ++pair) {
        uint32_t k[4];
        load_matrices_transposed(k,
                                 tile + swizzled<kDim / 8>(16 * step + lane / 8 % 2 * 8 + lane % 8, 2 * (first_pair + pair) + lane / 16));
#pragma unroll
        for (int n = 0; n < 2; ++n) {
          multiply_add(sum[pair][n], high[step], k[2 * n], k[2 * n + 1]);
          multiply_add(sum[pair][n], low[step], k[2 * n], k[2 * n + 1]);
        }
      }
#pragma unroll
    for (int pair = 0; pair < kAtOnce; ++pair)
#pragma unroll
      for (int n = 0; n < 2; ++n)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const float2 x{sum[pair][n][2 * half], sum[pair][n][2 * half + 1]};
          if (is_read) *at(pair, n, half) = x;
          if (stored != nullptr)
            *reinterpret_cast<float2*>(stored + (lane / 4 + 8 * half) * kDim + 16 * (first_pair + pair) + 8 * n + 2 * (lane % 4)) = x;
        }
  }
  if constexpr (!kKeysApart)
    __syncthreads();  // before updates are copied there again
  else
    __syncwarp();
}

}  // namespace quern::cuda
