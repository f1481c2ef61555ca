#pragma once

#include "backends/cuda/gdn_jobs.cuh"
#include "backends/cuda/gdn_state.cuh"

// What the kernels for decode rows of rings of bfloat16 have in common: how products and updates stand in shared memory, and the fold of a
// chunk. Device code only.
//
// Factors that are no bf16 (q, weights, updates of a fold) are split in two: products are those of f32 to about 2^-17. Sums over S take its
// upper half as it stands; folds join both (gdn_state.cuh).

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

/// The halves of a head's stored S.
__device__ inline Halves halves_of(const GdnArgs& g, int slot, int head) {
  auto* upper = reinterpret_cast<uint16_t*>(g.state + (slot * g.num_v_heads + head) * kDim * kDim);
  return {upper, upper + kDim * kDim};
}
inline constexpr int kPieces = kDim / 8;  // of 16 bytes of a column
/// Where piece `i` of a warp's column stands: eight columns' pieces of one number lie in different banks, and four of each of two columns.
__device__ constexpr int state_piece(int column, int i) { return i ^ (column % 2 * 4 + column / 2 % 4); }
/// The element at which the piece lane % 4 + 4 i of column lane / 4 stands, and of the one 8 further: state_piece, in few instructions.
__device__ constexpr int lane_place(int lane, int i) { return 8 * (lane % 4 ^ lane / 8 % 4) + 32 * (lane / 4 % 2 ^ i % 2) + 64 * (i / 2); }
static_assert([] {
  for (int lane = 0; lane < 32; ++lane)
    for (int i = 0; i < kPieces / 4; ++i)
      if (lane_place(lane, i) != 8 * state_piece(lane / 4, lane % 4 + 4 * i)) return false;
  return true;
}());
/// Begins to copy the warp's columns of a half of S.
__device__ inline void begin_half(uint16_t (&to)[kColumns][kDim], const uint16_t* half, int warp, int lane) {
  const uint16_t* from = half + warp * kColumns * kDim + lane * 8;
  const int is_odd = lane / kPieces % 2;  // a lane's columns are even ones, or odd ones
  uint16_t* first = &to[is_odd][0];
#pragma unroll
  for (int i = 0; i < kColumns / 2; ++i)
    copy_async(first + 2 * i * kDim + 8 * ((lane % kPieces ^ is_odd * 4) ^ i % 4), from + 2 * i * kDim);  // state_piece(2 * i + is_odd, ..)
}
/// Leaves the warp's columns of both halves of S where they are kept.
template <class Memory>
__device__ void store_state(const Memory& s, const Halves& stored, int warp, int lane) {
#pragma unroll
  for (int i = 0; i < kColumns / 2; ++i) {
    const int column = 2 * i + lane / kPieces, place = 8 * state_piece(column, lane % kPieces),
              at = (warp * kColumns + 2 * i) * kDim + lane * 8;
    *reinterpret_cast<uint4*>(stored.upper + at) = *reinterpret_cast<const uint4*>(&s.upper[warp][column][place]);
    *reinterpret_cast<uint4*>(stored.lower + at) = *reinterpret_cast<const uint4*>(&s.lower[warp][column][place]);
  }
}

/// The sum over S of the lane's column with k, or with q. `piece` (i, half): S at the 8 places 32 i + 8 (lane % 4) of the warp's column
/// lane / 4 + 8 half.
template <class Piece>
__device__ __forceinline__ float along_state(const __nv_bfloat16 (&parts)[kParts][kDim], bool has_q, int lane, const Piece& piece) {
  float sums[2][4] = {};
  const __nv_bfloat16* factors = &parts[max(lane / 4 % 4 - 1, 0)][8 * (lane % 4)];  // of four columns of a product: k twice, then q's two
#pragma unroll
  for (int i = 0; i < kDim / 32; ++i) {
    const uint4 x = piece(i, 0), further = piece(i, 1), factor = *reinterpret_cast<const uint4*>(factors + 32 * i);
    const uint32_t front[4] = {x.x, further.x, x.y, further.y}, back[4] = {x.z, further.z, x.w, further.w};
    multiply_add(sums[0], front, factor.x, factor.y);
    multiply_add(sums[1], back, factor.z, factor.w);
  }
  const bool is_further = lane % 4 >= 2;
  const float first = is_further ? sums[0][2] + sums[1][2] : sums[0][0] + sums[1][0],
              second = is_further ? sums[0][3] + sums[1][3] : sums[0][1] + sums[1][1];
  return has_q ? first + second : first;
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

/// S <- e^G64 S + sum_j e^(G64 - Gj) uj kj^T for the warp's columns in shared memory, whose halves are both there, and where it is `stored`
/// if that is given. `factors`: e^(G64 - Gj) of the positions lane and lane + 32. The chunk's updates are staged; so are its keys if they
/// have a place of their own. If not, all warps of the block do this together, and keys take the updates' place.
template <bool kKeysApart, class Memory>
__device__ void fold(Memory& s, const GdnArgs& g, const Job& job, int start, float decay, const float (&factors)[2], int own,
                     const Halves* stored, int warp, int lane) {
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
  constexpr int kAtOnce = 2;  // pairs of tiles of 8 places: four chains of products hide each other's latency
#pragma unroll 1
  for (int first_pair = 0; first_pair < kDim / 16; first_pair += kAtOnce) {
    // Sum i of tile n is of column lane / 4 + 8 (i / 2) and place 16 (first_pair + pair) + 8 n + 2 (lane % 4) + i % 2.
    float sums[kAtOnce][2][4];
    const auto each = [&](const auto& visit) {
#pragma unroll
      for (int pair = 0; pair < kAtOnce; ++pair)
#pragma unroll
        for (int n = 0; n < 2; ++n)
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            const int column = lane / 4 + 8 * half, place = 8 * state_piece(column, 2 * (first_pair + pair) + n) + 2 * (lane % 4);
            visit(*reinterpret_cast<uint32_t*>(&s.upper[warp][column][place]), *reinterpret_cast<uint32_t*>(&s.lower[warp][column][place]),
                  sums[pair][n][2 * half], sums[pair][n][2 * half + 1]);
          }
    };
    each([decay](uint32_t upper, uint32_t lower, float& first, float& second) {
      const float2 x = joined({upper, lower});
      first = decay * x.x;
      second = decay * x.y;
    });
#pragma unroll
    for (int step = 0; step < kSteps; ++step)
#pragma unroll
      for (int pair = 0; pair < kAtOnce; ++pair) {
        uint32_t k[4];
        load_matrices_transposed(k,
                                 tile + swizzled<kDim / 8>(16 * step + lane / 8 % 2 * 8 + lane % 8, 2 * (first_pair + pair) + lane / 16));
#pragma unroll
        for (int n = 0; n < 2; ++n) {
          multiply_add(sums[pair][n], high[step], k[2 * n], k[2 * n + 1]);
          multiply_add(sums[pair][n], low[step], k[2 * n], k[2 * n + 1]);
        }
      }
    each([](uint32_t& upper, uint32_t& lower, float first, float second) {
      const HalvedPair pair = halved(first, second);
      upper = pair.upper;
      lower = pair.lower;
    });
  }
  __syncwarp();
  if (stored != nullptr) {
    store_state(s, *stored, warp, lane);
    __syncwarp();
  }
  if constexpr (!kKeysApart) __syncthreads();  // before updates are copied there again
}

}  // namespace quern::cuda
