#include "backends/cuda/gdn_prompt_sm90.cuh"

// What the scan on Hopper takes of every chunk, as in gdn_prompt.cu: q and k after the conv as images of bf16, T and P rounded to bf16, scalars. A block has a chunk of a k head and
// up to kGdnPrepareHeads90 of the value heads that share it. Rows of images, and columns of T and P, in the order of reversed(). Above their blocks of 16 on the diagonal T and P are not written.
//
// T = (I + L)^-1 diag(beta) by blocks of 16: D_i = (I + L_ii)^-1 by substitution, in f32; below the diagonal T_ij = -D_i sum_{j <= m < i} L_im T_mj on the matrix units, operands rounded to bf16.

namespace quern::cuda {

namespace {

namespace hopper = sm90;

constexpr int kThreads = 256, kPadded = 16 * 16 + 4;
constexpr float kLog2OfE = 1.4426950408889634f;

struct Shared {
  unsigned char queries[kGdnPromptRowBytes], keys[kGdnPromptRowBytes];  // afterwards T of the heads
  unsigned char p[kGdnPrepareHeads90][kGdnPromptImageBytes];
  unsigned char lower[kGdnPrepareHeads90][6][512];       // blocks of L below the diagonal, [16, 16] in bf16
  float diagonal[kGdnPrepareHeads90][4][kPadded];        // those on it, by columns; afterwards their inverses in bf16
  float2 decays[kGdnPrepareHeads90][kChunk];             // G log2(e), f of k
  float beta[kGdnPrepareHeads90][kChunk];
  float query_factor[kChunk], key_factor[kChunk];
};
static_assert(sizeof(Shared) == kGdnPrepareSharedBytes90);

__device__ __forceinline__ float power_of_two(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

/// Offset of 16 bytes in a block [16, 16] of bf16.
__device__ __forceinline__ uint32_t small_at(int row, int piece) { return static_cast<uint32_t>(row * 32 + (piece ^ (row >> 2 & 1)) * 16); }

/// A block [16, 16] as fragments: rows 0 .. 7 and 8 .. 15 of its first 8 columns, then of the others.
using Block = uint32_t[4];
__device__ __forceinline__ void round_block(const float (&x)[2][4], Block& out) {
#pragma unroll
  for (int i = 0; i < 4; ++i) out[i] = bf16_pair(x[i / 2][i % 2 * 2], x[i / 2][i % 2 * 2 + 1]);
}
__device__ __forceinline__ void transpose_block(Block& x) {
#pragma unroll
  for (int i = 0; i < 4; ++i) x[i] = transposed(x[i]);
}
/// sum += A B; A as load_matrices leaves it, B: [tile of 8 columns, half of the rows]
__device__ __forceinline__ void block_product(float (&sum)[2][4], const Block& a, const Block& b) {
#pragma unroll
  for (int n = 0; n < 2; ++n) multiply_add(sum[n], a, b[2 * n], b[2 * n + 1]);
}
__device__ __forceinline__ void load_block(Block& a, const void* at, int lane) { load_matrices(a, hopper::shared_address(at) + small_at(lane % 16, lane / 16)); }

}  // namespace

/// blockIdx: (tile, k head, which of its value heads, by kGdnPrepareHeads90)
extern "C" __global__ void __launch_bounds__(kThreads, 2) gdn_prompt_prepare_sm90(const __grid_constant__ GdnPromptArgs args) {
  extern __shared__ __align__(1024) unsigned char memory[];
  Shared& s = *reinterpret_cast<Shared*>(memory);
  const GdnArgs& g = args.gdn;
  const Tile t = tile_of(g, args.first_tile + static_cast<int>(blockIdx.x));
  if (t.rows == 0) return;
  const int k_head = static_cast<int>(blockIdx.y), thread = static_cast<int>(threadIdx.x), warp = thread / 32, lane = thread % 32;
  const int channels = (2 * g.num_k_heads + g.num_v_heads) * kDim;
  int head[kGdnPrepareHeads90], count = 0;
  {
    int skip = static_cast<int>(blockIdx.z) * kGdnPrepareHeads90;
#pragma unroll
    for (int h = 0; h < kGdnPrepareHeads90; ++h) head[h] = 0;
    for (int word = 0; word < g.num_v_heads && count < kGdnPrepareHeads90; word += 32) {
      uint32_t mine = __ballot_sync(kAllLanes, word + lane < g.num_v_heads && g.k_head[min(word + lane, g.num_v_heads - 1)] == k_head);
      for (; mine != 0 && count < kGdnPrepareHeads90; mine &= mine - 1) {
        if (skip-- > 0) continue;
#pragma unroll
        for (int h = 0; h < kGdnPrepareHeads90; ++h)
          if (h == count) head[h] = word + __ffs(static_cast<int>(mine)) - 1;
        ++count;
      }
    }
  }
  if (count == 0 && blockIdx.z > 0) return;
  const auto head_of = [&](int h) { return h == 0 ? head[0] : h == 1 ? head[1] : head[2]; };
  {  // the conv: half of the threads have q, half k; sixteen lanes a row's 128 channels, and eight rows after one another
    constexpr int kRowsEach = 8, kHalf = kRowsEach / 2;
    const int side = thread / 128, piece = thread % 16, first = thread % 128 / 16 * kRowsEach;
    const int channel = (side * g.num_k_heads + k_head) * kDim + piece * 8;
    unsigned char* image = side == 0 ? s.queries : s.keys;
    float* factor = side == 0 ? s.query_factor : s.key_factor;
    const float scale = side == 0 ? rsqrtf(static_cast<float>(kDim)) : 1.0f;
    uint4 raw[3 + kHalf], later[kHalf];
    load_raw(raw, g, t, first - 3, channel, channels);
    load_raw(later, g, t, first + kHalf, channel, channels);
    float weight[4][8], x[4][8];
    load_taps(weight, g, channel, channels);
#pragma unroll
    for (int tap = 0; tap < 3; ++tap) unpack8(raw[tap], x[tap + 1]);
#pragma unroll
    for (int r = 0; r < kRowsEach; ++r) {
      const int row = first + r;
      unpack8(r < kHalf ? raw[r % kHalf + 3] : later[r % kHalf], x[r % 4]);
      float y[8], square = 0;
      convolve(y, weight, x, r + 1);
      uint4 words = pack_eight(y);
      if (row >= t.rows) words = make_uint4(0, 0, 0, 0);
      unpack8(words, y);
#pragma unroll
      for (int i = 0; i < 8; ++i) square = fmaf(y[i], y[i], square);
      *reinterpret_cast<uint4*>(image + image_at(reversed(row), piece)) = words;
#pragma unroll
      for (int distance = 8; distance > 0; distance /= 2) square += __shfl_xor_sync(kAllLanes, square, distance);
      if (piece == 0) factor[row] = row < t.rows ? rsqrtf(square + 1e-6f) * scale : 0.0f;
    }
  }
  hopper::fence_async_proxy();
  __syncthreads();
  if (thread == 0 && blockIdx.z == 0) {
    unsigned char* rows = args.rows + int64_t{blockIdx.x} * 2 * g.num_k_heads * kGdnPromptRowBytes;
    hopper::bulk_store(rows + int64_t{k_head} * kGdnPromptRowBytes, hopper::shared_address(s.queries), kGdnPromptRowBytes);
    hopper::bulk_store(rows + int64_t{g.num_k_heads + k_head} * kGdnPromptRowBytes, hopper::shared_address(s.keys), kGdnPromptRowBytes);
    hopper::bulk_commit();
  }
  const int strip = warp % 4;
  const bool partial = t.rows < kChunk;
  float product[kChunk / 8][4] = {};  // warps 0 .. 3: 16 rows of K K^T, the others of Q K^T
  {
    const uint32_t left = hopper::shared_address(warp < 4 ? s.keys : s.queries), keys_at = hopper::shared_address(s.keys);
#pragma unroll
    for (int step = 0; step < kDim / 16; ++step) {
      uint32_t a[4];
      load_matrices(a, left + image_at(strip * 16 + lane % 16, step * 2 + lane / 16));
#pragma unroll
      for (int n = 0; n < kChunk / 8; n += 2) {
        if (n < 2 * strip) continue;  // above the diagonal
        uint32_t b[4];
        load_matrices(b, keys_at + image_at(8 * n + lane / 16 * 8 + lane % 8, step * 2 + lane / 8 % 2));
        multiply_add(product[n], a, b[0], b[1]);
        multiply_add(product[n + 1], a, b[2], b[3]);
      }
    }
  }
  if (partial && blockIdx.z == 0)
    for (int item = thread; item < t.rows * kDim; item += kThreads) {
      const int j = item / kDim, i = item % kDim;
      const float y = __bfloat162float(*reinterpret_cast<const __nv_bfloat16*>(s.keys + image_at(reversed(j), i / 8) + i % 8 * 2));
      store(g.ring_k, g.ring, (ring_place(g, t, j) * g.num_k_heads + k_head) * kDim + i, y * s.key_factor[j]);
    }
  if (warp < count) {  // a warp has a head's gates, a lane two rows
    const int mine = head_of(warp);
    float decay[2], beta[2];
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int row = 2 * lane + e;
      const bool there = row < t.rows;
      const int64_t at = (int64_t{t.first_row} + t.base + row - t.cursor) * g.num_v_heads + mine;
      beta[e] = there ? round_to(g.activation, sigmoid(load(g.b, g.activation, at))) : 0.0f;
      decay[e] = there ? g.decay[mine] * softplus(load(g.a, g.activation, at) + g.dt_bias[mine]) : 0.0f;
    }
    float pair = decay[0] + decay[1];
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
      const float before = __shfl_up_sync(kAllLanes, pair, distance);
      if (lane >= distance) pair += before;
    }
    float before = __shfl_up_sync(kAllLanes, pair, 1);
    if (lane == 0) before = 0;
    const float g0 = before + decay[0], g1 = pair, last = __shfl_sync(kAllLanes, pair, 31);
    float4* scalars = reinterpret_cast<float4*>(args.scalars) + (int64_t{blockIdx.x} * g.num_v_heads + mine) * kChunk;
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int row = 2 * lane + e;
      const float sum = e == 0 ? g0 : g1, decayed = expf(sum), rest = expf(last - sum), fk = s.key_factor[row];
      s.decays[warp][row] = make_float2(sum * kLog2OfE, fk);
      s.beta[warp][row] = beta[e];
      scalars[reversed(row)] = make_float4(decayed * fk, decayed * s.query_factor[row], rest * fk, sum);
      if (partial && row < t.rows) g.ring_g[ring_place(g, t, row) * g.num_v_heads + mine] = sum;
    }
  }
  __syncthreads();
  {
    const int i_block = strip ^ 3, row0 = i_block * 16 + lane / 4, matrix = lane / 8;
#pragma unroll 1
    for (int h = 0; h < count; ++h) {
      const float2* decays = s.decays[h];
      const float total[2] = {decays[row0].x, decays[row0 + 8].x};
      float own[2];
#pragma unroll
      for (int half = 0; half < 2; ++half) own[half] = warp < 4 ? s.beta[h][row0 + 8 * half] * decays[row0 + 8 * half].y : s.query_factor[row0 + 8 * half];
#pragma unroll
      for (int n = 0; n < kChunk / 8; n += 2) {
        if (n < 2 * strip) continue;
        const int j_block = (n / 2) ^ 3;
        float x[2][4];
#pragma unroll
        for (int m = 0; m < 2; ++m)
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            const float2 other = decays[j_block * 16 + m * 8 + lane % 4 * 2 + e % 2];
            x[m][e] = own[e / 2] * other.y * power_of_two(total[e / 2] - other.x) * product[n + m][e];
          }
        if (n == 2 * strip) {  // on the diagonal
#pragma unroll
          for (int m = 0; m < 2; ++m)
#pragma unroll
            for (int e = 0; e < 4; ++e) {
              const int i = lane / 4 + e / 2 * 8, j = m * 8 + lane % 4 * 2 + e % 2;
              if (warp < 4 ? j >= i : j > i) x[m][e] = 0;
              if (warp < 4) s.diagonal[h][i_block][j * 16 + i] = x[m][e];
            }
        }
        if (warp >= 4)
          store_matrices(hopper::shared_address(s.p[h]) + swizzled<8>(strip * 16 + matrix % 2 * 8 + lane % 8, n + matrix / 2), bf16_pair(x[0][0], x[0][1]), bf16_pair(x[0][2], x[0][3]),
                    bf16_pair(x[1][0], x[1][1]), bf16_pair(x[1][2], x[1][3]));
        else if (n > 2 * strip) {
          Block block;
          round_block(x, block);
          store_matrices(hopper::shared_address(s.lower[h][i_block * (i_block - 1) / 2 + j_block]) + small_at(matrix % 2 * 8 + lane % 8, matrix / 2), block[0], block[1], block[2], block[3]);
        }
      }
    }
  }
  if (thread == 0) hopper::await_bulk_reads();  // of q and k, where T will stand
  __syncthreads();
  const auto inverse_of = [&](int h) { return h == 2 ? s.keys : s.queries + h * kGdnPromptImageBytes; };
  if (const int h = warp / 2; h < count) {  // (I + L)^-1 of the blocks on the diagonal, a column a lane
    const int block = warp % 2 * 2 + lane / 16, column = lane % 16;
    float* lower = s.diagonal[h][block];
    float x[16];
#pragma unroll
    for (int i = 0; i < 16; ++i) x[i] = i == column ? 1.0f : 0.0f;
#pragma unroll
    for (int j = 0; j < 16; ++j)
#pragma unroll
      for (int i = (j + 1) / 4 * 4; i < 16; i += 4) {
        const float4 l = *reinterpret_cast<const float4*>(lower + j * 16 + i);
        x[i] = fmaf(-l.x, x[j], x[i]);
        x[i + 1] = fmaf(-l.y, x[j], x[i + 1]);
        x[i + 2] = fmaf(-l.z, x[j], x[i + 2]);
        x[i + 3] = fmaf(-l.w, x[j], x[i + 3]);
      }
    const float beta = s.beta[h][block * 16 + column];
    unsigned char *plain = reinterpret_cast<unsigned char*>(lower), *image = inverse_of(h);
    __syncwarp();
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      const uint32_t at = small_at(i, column / 8) + column % 8 * 2, image_place = image_at((block ^ 3) * 16 + i, (block ^ 3) * 2 + column / 8) + column % 8 * 2;
      *reinterpret_cast<__nv_bfloat16*>(plain + at) = __float2bfloat16_rn(x[i]);
      *reinterpret_cast<__nv_bfloat16*>(image + image_place) = __float2bfloat16_rn(x[i] * beta);
    }
  }
  __syncthreads();
  // Blocks below the diagonal of T: with those above them in their column, X_ij = -D_i sum_m L_im X_mj.
  const auto column_of_blocks = [&]<int kColumn>(int h) {
    unsigned char* image = inverse_of(h);
    Block x[3 - kColumn];
    load_matrices_transposed(x[0], hopper::shared_address(image) + image_at((kColumn ^ 3) * 16 + lane % 16, (kColumn ^ 3) * 2 + lane / 16));
#pragma unroll
    for (int i = kColumn + 1; i < 4; ++i) {
      float sum[2][4] = {}, result[2][4] = {};
      Block a;
#pragma unroll
      for (int m = kColumn; m < i; ++m) {
        load_block(a, s.lower[h][i * (i - 1) / 2 + m], lane);
        block_product(sum, a, x[m - kColumn]);
      }
      Block y;
      round_block(sum, y);
      transpose_block(y);
      load_block(a, s.diagonal[h][i], lane);
      block_product(result, a, y);
#pragma unroll
      for (int n = 0; n < 2; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) result[n][e] = -result[n][e];
      round_block(result, y);
      store_matrices(hopper::shared_address(image) + image_at((i ^ 3) * 16 + lane % 16, (kColumn ^ 3) * 2 + lane / 16), y[0], y[1], y[2], y[3]);
      if (i < 3) {
        transpose_block(y);
#pragma unroll
        for (int e = 0; e < 4; ++e) x[i < 3 ? i - kColumn : 0][e] = y[e];
      }
    }
  };
  if (warp < count) column_of_blocks.template operator()<0>(warp);
  else if (warp >= 4 && warp - 4 < count) {
    column_of_blocks.template operator()<1>(warp - 4);
    column_of_blocks.template operator()<2>(warp - 4);
  }
  hopper::fence_async_proxy();
  __syncthreads();
  if (thread == 0) {
    for (int h = 0; h < count; ++h) {
      unsigned char* to = args.matrices + (int64_t{blockIdx.x} * g.num_v_heads + head_of(h)) * kGdnMatrices90 * kGdnPromptImageBytes;
      hopper::bulk_store(to, hopper::shared_address(inverse_of(h)), kGdnPromptImageBytes);
      hopper::bulk_store(to + kGdnPromptImageBytes, hopper::shared_address(s.p[h]), kGdnPromptImageBytes);
    }
    hopper::bulk_commit();
    hopper::await_bulk_reads();
  }
}

}  // namespace quern::cuda
