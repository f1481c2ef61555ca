#include "backends/cuda/gdn_prompt_sm90.cuh"

// The scan of gdn_prompt.cu on Hopper, with the conv of v before it and the gated norm behind it. A cluster of two blocks has a value head of a run, a block 64 columns of it. In a block
// - a warpgroup (Chain) has S of its columns in registers, transposed, and walks along the chunks with wgmma;
// - one (produce) brings what gdn_prepare_sm90.cu made of a chunk, of which each block of the cluster copies half to both, and convolves its columns of v;
// - one (finish) norms the outputs, for which the blocks exchange sums of squares, and gates them.
// S is split into two bf16 where it meets keys; all else is one bf16 where it meets the matrix units: T, what is left of v, u and the decayed u, for outputs also S and P (decision 0044).

namespace quern::cuda {

namespace {

namespace hopper = sm90;

constexpr int kThreads = 384, kColumns = kGdnPromptColumns, kStages = 3, kSums = 4;

struct Stage90 {
  unsigned char keys[kGdnPromptRowBytes], queries[kGdnPromptRowBytes];
  unsigned char t[kGdnPromptImageBytes], p[kGdnPromptImageBytes];
  unsigned char values[kGdnPromptImageBytes];  // of the block's columns; all else is copied
  float4 scalars[kChunk];
};
static_assert(sizeof(Stage90) % 1024 == 0);
constexpr uint32_t kCopiedBytes = sizeof(Stage90) - kGdnPromptImageBytes;

struct Shared {
  Stage90 stages[kStages];
  unsigned char out[2][kGdnPromptImageBytes];
  float sums[kSums][kChunk];  // of the squares of the other block's columns
  uint64_t full[kStages], empty[kStages], out_full[2], out_empty[2], sums_full[kSums];
};
static_assert(sizeof(Shared) == kGdnScanSharedBytes90);

__device__ __forceinline__ void prefetch(const void* address) { asm volatile("prefetch.global.L2 [%0];" ::"l"(address)); }

#define QUERN_GDN_LOWER(n, regs, ra, rb, rc, rd, rdesc, rp, ...)                                                                       \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " rp ", 0;\nwgmma.mma_async.sync.aligned.m64n" #n "k16.f32.bf16.bf16 {" regs "}, {" ra ", " rb ", " rc ", " rd \
               "}, " rdesc ", p, 1, 1, 0;\n}\n"                                                                              \
               : __VA_ARGS__                                                                                                 \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate))

/// d [64, 0 .. 16 kStep + 16) (or +)= A [64, 16] B^T
template <int kStep>
__device__ __forceinline__ void multiply_block(float (&d)[32], const uint32_t (&a)[4], uint64_t b, int accumulate) {
  if constexpr (kStep == 3) {
    QUERN_GDN_LOWER(64, QUERN_R32, "%32", "%33", "%34", "%35", "%36", "%37", QUERN_D32(0));
  } else if constexpr (kStep == 2) {
    QUERN_GDN_LOWER(48, QUERN_R16 ", %16, %17, %18, %19, %20, %21, %22, %23", "%24", "%25", "%26", "%27", "%28", "%29", QUERN_D16(0), QUERN_D8(16));
  } else if constexpr (kStep == 1) {
    QUERN_GDN_LOWER(32, QUERN_R16, "%16", "%17", "%18", "%19", "%20", "%21", QUERN_D16(0));
  } else {
    QUERN_GDN_LOWER(16, QUERN_R8, "%8", "%9", "%10", "%11", "%12", "%13", QUERN_D8(0));
  }
}
/// d (or +)= x M^T, M lower triangular [64, 64]; x in sums' place as four operands
template <int kStep = 3>
__device__ __forceinline__ void lower_product(float (&d)[32], const uint32_t (&a)[4][4], uint32_t matrix, int accumulate) {
  multiply_block<kStep>(d, a[kStep], hopper::operand(matrix) + kStep * 2, kStep < 3 ? 1 : accumulate);
  if constexpr (kStep > 0) lower_product<kStep - 1>(d, a, matrix, accumulate);
}

/// A float to the same place of block `rank` of the cluster; the barrier at that place there counts its bytes.
__device__ __forceinline__ void send(uint32_t at, float x, uint32_t barrier, uint32_t rank) {
  asm volatile(
      "{\n.reg .b32 to, counter;\n"
      "mapa.shared::cluster.u32 to, %0, %3;\n"
      "mapa.shared::cluster.u32 counter, %2, %3;\n"
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [to], %1, [counter];\n}\n" ::"r"(at),
      "r"(__float_as_uint(x)), "r"(barrier), "r"(rank)
      : "memory");
}

/// A run's chunks of the launch.
struct Walk {
  RunRecord record;
  int first, begin, end;       // the run's first tile, possibly before the launch's; what is to be done
  int cursor, base0, stop;  // indices: of the run's first row, of its first chunk, behind its last row
  __device__ Walk(const GdnPromptArgs& args, int run) : record(args.gdn.step.runs[run]), first(-args.first_tile) {
    for (int before = args.gdn.first_run; before < run; ++before) first += tiles_of(args.gdn.step.runs[before]);
    begin = max(0, first);
    end = min(args.num_tiles, first + tiles_of(record));
    if (begin >= end) return;
    cursor = args.gdn.step.cursor[record.slot];
    base0 = (cursor + kChunk - 1) / kChunk * kChunk;
    stop = (record.flags & kIsCommitted) != 0 ? cursor + record.num_rows : 0;
    while (end > begin && rows(end - 1) <= 0) --end;
  }
  __device__ int base(int tile) const { return base0 + (tile - first) * kChunk; }
  __device__ int rows(int tile) const { return min(kChunk, stop - base(tile)); }
  __device__ Tile at(int tile) const { return {record.slot, cursor, record.first_row, base(tile), max(0, rows(tile))}; }
};

/// The walk: S [128, 64] of the block's columns, transposed, from chunk to chunk. As in gdn_prompt.cu, all [64 columns, 64 rows of the chunk] here.
struct Chain {
  const GdnPromptArgs& args;
  Shared& s;
  const Walk& walk;
  int head, part;
  uint32_t rank;
  float state[2][32];

  /// Outputs to the warpgroup that norms them.
  __device__ __forceinline__ void hand_over(int turn, const float (&o)[32]) {
    const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32, place = turn % 2, matrix = lane / 8;
    if (turn >= 2) hopper::barrier_wait(hopper::shared_address(&s.out_empty[place]), static_cast<uint32_t>((turn / 2 - 1) % 2));
    const uint32_t image = hopper::shared_address(s.out[place]);
#pragma unroll
    for (int n = 0; n < 8; n += 2)
      store_matrices_transposed(image + swizzled<8>((n + matrix / 2) * 8 + lane % 8, warp * 2 + matrix % 2), bf16_pair(o[4 * n], o[4 * n + 1]), bf16_pair(o[4 * n + 2], o[4 * n + 3]),
                      bf16_pair(o[4 * n + 4], o[4 * n + 5]), bf16_pair(o[4 * n + 6], o[4 * n + 7]));
    __syncwarp();
    if (lane == 0) hopper::barrier_arrive(hopper::shared_address(&s.out_full[place]));
  }
  /// The chunk's stage is free in this block; both blocks copy to both.
  __device__ __forceinline__ void release(int turn) {
    if (threadIdx.x % 32 == 0) {
      hopper::barrier_arrive(hopper::shared_address(&s.empty[turn % kStages]));
      hopper::barrier_arrive_at(hopper::shared_address(&s.empty[turn % kStages]), rank ^ 1);
    }
  }

  template <bool kPartial>
  __device__ __forceinline__ void chunk(int tile) {
    const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
    const int turn = tile - walk.begin;
    Stage90& st = s.stages[turn % kStages];
    hopper::barrier_wait(hopper::shared_address(&s.full[turn % kStages]), static_cast<uint32_t>(turn / kStages % 2));
    uint32_t sh[8][4], sl[8][4];  // S in two parts
#pragma unroll
    for (int step = 0; step < 8; ++step)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float low = state[step / 4][8 * (step % 4) + 2 * i], high = state[step / 4][8 * (step % 4) + 2 * i + 1];
        split(low, high, sh[step][i], sl[step][i]);
      }
    if constexpr (!kPartial) {
      const float total = expf(st.scalars[reversed(kChunk - 1)].w);
#pragma unroll
      for (int side = 0; side < 2; ++side)
#pragma unroll
        for (int i = 0; i < 32; ++i) state[side][i] *= total;
    }
    const uint32_t keys = hopper::shared_address(st.keys), queries = hopper::shared_address(st.queries);
    float known[32], o[32];
    hopper::wgmma_fence();
#pragma unroll
    for (int step = 0; step < 8; ++step) {
      const uint64_t k = hopper::operand(keys + step / 4 * kGdnPromptImageBytes) + step % 4 * 2;
      hopper::wgmma_from_registers(known, sh[step], k, step);
      hopper::wgmma_from_registers(known, sl[step], k, 1);
    }
    hopper::wgmma_commit();
#pragma unroll
    for (int step = 0; step < 8; ++step) {  // while what is known is taken from v
      const uint64_t q = hopper::operand(queries + step / 4 * kGdnPromptImageBytes) + step % 4 * 2;
      hopper::wgmma_from_registers(o, sh[step], q, step);
    }
    hopper::wgmma_commit();
    uint32_t v[4][4];
#pragma unroll
    for (int n = 0; n < 4; ++n) load_matrices_transposed(v[n], hopper::shared_address(st.values) + image_at(16 * n + lane / 16 * 8 + lane % 8, warp * 2 + lane / 8 % 2));
    hopper::wgmma_wait_for(1);
    hopper::settle(known);
    uint32_t left[4][4];  // of v
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      const float even = st.scalars[8 * n + lane % 4 * 2].x, odd = st.scalars[8 * n + lane % 4 * 2 + 1].x;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const uint32_t value = v[n / 2][n % 2 * 2 + half];
        left[n / 2][n % 2 * 2 + half] = bf16_pair(low_of(value) - even * known[4 * n + 2 * half], high_of(value) - odd * known[4 * n + 2 * half + 1]);
      }
    }
    float u[32];
    hopper::wgmma_fence();
    lower_product(u, left, hopper::shared_address(st.t), 0);
    hopper::wgmma_commit();
    hopper::wgmma_wait_for(1);
    hopper::settle(o);
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      const float even = st.scalars[8 * n + lane % 4 * 2].y, odd = st.scalars[8 * n + lane % 4 * 2 + 1].y;
#pragma unroll
      for (int e = 0; e < 4; ++e) o[4 * n + e] *= e % 2 == 0 ? even : odd;
    }
    hopper::wgmma_wait_for(0);
    hopper::settle(u);
    uint32_t uh[4][4];
#pragma unroll
    for (int n = 0; n < 8; ++n)
#pragma unroll
      for (int half = 0; half < 2; ++half) uh[n / 2][n % 2 * 2 + half] = bf16_pair(u[4 * n + 2 * half], u[4 * n + 2 * half + 1]);
    hopper::wgmma_fence();
    lower_product(o, uh, hopper::shared_address(st.p), 1);
    hopper::wgmma_commit();
    if constexpr (kPartial) {
      const Tile t = walk.at(tile);
      const GdnArgs& g = args.gdn;
#pragma unroll
      for (int n = 0; n < 8; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const int j = reversed(n * 8 + lane % 4 * 2 + e % 2);
          if (j < t.rows) store(g.ring_u, g.ring, (ring_place(g, t, j) * g.num_v_heads + head) * kDim + part * kColumns + warp * 16 + lane / 4 + e / 2 * 8, u[4 * n + e]);
        }
    } else {
      uint32_t decayed[4][4];
#pragma unroll
      for (int n = 0; n < 8; ++n) {
        const float even = st.scalars[8 * n + lane % 4 * 2].z, odd = st.scalars[8 * n + lane % 4 * 2 + 1].z;
#pragma unroll
        for (int half = 0; half < 2; ++half) decayed[n / 2][n % 2 * 2 + half] = bf16_pair(u[4 * n + 2 * half] * even, u[4 * n + 2 * half + 1] * odd);
      }
      hopper::wgmma_fence();
#pragma unroll
      for (int step = 0; step < 4; ++step)
#pragma unroll
        for (int side = 0; side < 2; ++side) hopper::wgmma_from_registers<1>(state[side], decayed[step], hopper::operand(keys + side * kGdnPromptImageBytes + step * 16 * 128), 1);
      hopper::wgmma_commit();
      hopper::wgmma_wait_for(1);
    }
    if constexpr (kPartial) hopper::wgmma_wait_for(0);
    hopper::settle(o);
    hand_over(turn, o);
    if constexpr (!kPartial) {
      hopper::wgmma_wait_for(0);
      hopper::settle(state[0]);
      hopper::settle(state[1]);
    }
    release(turn);
  }

  __device__ __forceinline__ void run() {
    const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32, column = part * kColumns + warp * 16;
    const StoredState stored(args.gdn, walk.record.slot, head);
    const auto each_pair = [&](const auto& visit) {
#pragma unroll
      for (int side = 0; side < 2; ++side)
#pragma unroll
        for (int i = 0; i < 32; i += 2)
          visit((column + lane / 4 + i / 2 % 2 * 8) * kDim + lane % 4 * 2 + side * 64 + i / 4 * 8, state[side][i], state[side][i + 1]);
    };
    stored.read_pairs(each_pair);
    const int whole = walk.rows(walk.end - 1) < kChunk ? walk.end - 1 : walk.end;
    for (int tile = walk.begin; tile < whole; ++tile) chunk<false>(tile);
    if (whole > walk.begin) stored.write_pairs(each_pair);
    if (whole < walk.end) chunk<true>(whole);
  }
};

/// Copies of a stage, and half a head's values after their conv.
__device__ __forceinline__ void produce(const GdnPromptArgs& args, Shared& s, const Walk& walk, int head, int part, uint32_t rank) {
  const GdnArgs& g = args.gdn;
  const int thread = static_cast<int>(threadIdx.x) % 128, lane = thread % 32, piece = thread % 8, first = thread / 8 * 4, k_head = g.k_head[head];
  const int channels = (2 * g.num_k_heads + g.num_v_heads) * kDim, channel = 2 * g.num_k_heads * kDim + head * kDim + part * kColumns + piece * 8;
  float weight[4][8];
  load_taps(weight, g, channel, channels);
  uint4 raw[7];
  load_raw(raw, g, walk.at(walk.begin), first - 3, channel, channels);
  for (int tile = walk.begin; tile < walk.end; ++tile) {
    const int turn = tile - walk.begin, place = turn % kStages;
    Stage90& st = s.stages[place];
    const uint32_t full = hopper::shared_address(&s.full[place]);
    if (turn >= kStages) hopper::barrier_wait(hopper::shared_address(&s.empty[place]), static_cast<uint32_t>((turn / kStages - 1) % 2));
    if (thread == 0) {
      hopper::barrier_expect(full, kCopiedBytes);
      const unsigned char* rows = args.rows + int64_t{tile} * 2 * g.num_k_heads * kGdnPromptRowBytes;
      const int64_t index = int64_t{tile} * g.num_v_heads + head;
      const unsigned char *t = args.matrices + index * kGdnMatrices90 * kGdnPromptImageBytes, *p = t + kGdnPromptImageBytes;
      if (rank == 0) {
        hopper::bulk_copy_to_pair(hopper::shared_address(st.keys), rows + int64_t{g.num_k_heads + k_head} * kGdnPromptRowBytes, kGdnPromptRowBytes, full);
        hopper::bulk_copy_to_pair(hopper::shared_address(st.t), t, kGdnPromptImageBytes, full);
      } else {
        hopper::bulk_copy_to_pair(hopper::shared_address(st.scalars), reinterpret_cast<const unsigned char*>(args.scalars) + index * kGdnPromptScalarBytes, kGdnPromptScalarBytes, full);
        hopper::bulk_copy_to_pair(hopper::shared_address(st.queries), rows + int64_t{k_head} * kGdnPromptRowBytes, kGdnPromptRowBytes, full);
        hopper::bulk_copy_to_pair(hopper::shared_address(st.p), p, kGdnPromptImageBytes, full);
      }
    }
    const int rows = walk.rows(tile);
    float x[4][8];
#pragma unroll
    for (int tap = 0; tap < 3; ++tap) unpack8(raw[tap], x[tap + 1]);
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      unpack8(raw[r + 3], x[r % 4]);
      float y[8];
      convolve(y, weight, x, r + 1);
      *reinterpret_cast<uint4*>(st.values + swizzled<8>(reversed(first + r), piece)) = first + r < rows ? pack_eight(y) : make_uint4(0, 0, 0, 0);
    }
    __syncwarp();
    if (lane == 0) hopper::barrier_arrive(full);
    if (tile + 1 < walk.end) load_raw(raw, g, walk.at(tile + 1), first - 3, channel, channels);
    if (const int ahead = tile + 3, row = thread; ahead < walk.end && row < 64 && row < walk.rows(ahead))
      prefetch(static_cast<const uint16_t*>(g.qkv) + (int64_t{walk.record.first_row} + walk.base(ahead) + row - walk.cursor) * channels + channel - piece * 8);
  }
}

/// Norm and gate of the outputs. Sums of a chunk's squares are on their way to the other block while the chunk before is finished.
__device__ __forceinline__ void finish(const GdnPromptArgs& args, Shared& s, const Walk& walk, int head, int part, uint32_t rank) {
  const GdnArgs& g = args.gdn;
  const int thread = static_cast<int>(threadIdx.x) % 128, warp = thread / 32, lane = thread % 32, piece = lane % 8, first = warp * 16 + lane / 8;
  float weight[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) weight[i] = g.norm[part * kColumns + piece * 8 + i];
  const int64_t stride = int64_t{g.num_v_heads} * kDim;
  const auto place_of = [&](int tile) { return (int64_t{walk.record.first_row} + walk.base(tile) + first - walk.cursor) * stride + head * kDim + part * kColumns + piece * 8; };
  struct Held {
    uint4 o[4], z[4];
    float sum[4];
  } held[2];
  const auto complete = [&](int tile, const Held& h) {
    const int turn = tile - walk.begin, rows = walk.rows(tile);
    const int64_t at = place_of(tile);
    hopper::barrier_wait(hopper::shared_address(&s.sums_full[turn % kSums]), static_cast<uint32_t>(turn / kSums % 2));
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float scale = rsqrtf((h.sum[i] + s.sums[turn % kSums][first + i * 4]) / static_cast<float>(kDim) + g.eps);
      float x[8], gate[8];
      unpack8(h.o[i], x);
      unpack8(h.z[i], gate);
#pragma unroll
      for (int e = 0; e < 8; ++e) x[e] = x[e] * scale * weight[e] * silu_of(gate[e]);
      if (first + i * 4 < rows)
        *reinterpret_cast<uint4*>(static_cast<uint16_t*>(g.out) + at + i * 4 * stride) = pack_eight(x);
    }
  };
  const auto begin = [&](int tile, Held& h) {
    const int turn = tile - walk.begin, place = turn % 2, rows = walk.rows(tile);
    const int64_t at = place_of(tile);
    const uint32_t counter = hopper::shared_address(&s.sums_full[turn % kSums]);
    if (thread == 0) hopper::barrier_expect(counter, kChunk * 4);
#pragma unroll
    for (int i = 0; i < 4; ++i)
      h.z[i] = first + i * 4 < rows ? *reinterpret_cast<const uint4*>(static_cast<const uint16_t*>(g.z) + at + i * 4 * stride) : make_uint4(0, 0, 0, 0);
    if (const int ahead = tile + 2, row = thread % 64; ahead < walk.end && thread < 64 && row < walk.rows(ahead))
      prefetch(static_cast<const uint16_t*>(g.z) + (int64_t{walk.record.first_row} + walk.base(ahead) + row - walk.cursor) * stride + head * kDim + part * kColumns);
    hopper::barrier_wait(hopper::shared_address(&s.out_full[place]), static_cast<uint32_t>(turn / 2 % 2));
#pragma unroll
    for (int i = 0; i < 4; ++i) h.o[i] = *reinterpret_cast<const uint4*>(s.out[place] + swizzled<8>(reversed(first + i * 4), piece));
    __syncwarp();
    if (lane == 0) hopper::barrier_arrive(hopper::shared_address(&s.out_empty[place]));
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float x[8];
      unpack8(h.o[i], x);
      h.sum[i] = 0;
#pragma unroll
      for (int e = 0; e < 8; ++e) h.sum[i] = fmaf(x[e], x[e], h.sum[i]);
#pragma unroll
      for (int distance = 1; distance < 8; distance *= 2) h.sum[i] += __shfl_xor_sync(kAllLanes, h.sum[i], distance);
    }
    if (piece == 0) {
#pragma unroll
      for (int i = 0; i < 4; ++i) send(hopper::shared_address(&s.sums[turn % kSums][first + i * 4]), h.sum[i], counter, rank ^ 1);
    }
  };
  begin(walk.begin, held[0]);
  int tile = walk.begin + 1;
  for (; tile + 1 < walk.end; tile += 2) {
    begin(tile, held[1]);
    complete(tile - 1, held[0]);
    begin(tile + 1, held[0]);
    complete(tile, held[1]);
  }
  if (tile < walk.end) {
    begin(tile, held[1]);
    complete(tile - 1, held[0]);
    complete(tile, held[1]);
  } else {
    complete(tile - 1, held[0]);
  }
}

}  // namespace

/// blockIdx: (half of a value head's columns, run), in clusters of the two halves.
extern "C" __global__ void __launch_bounds__(kThreads, 1) gdn_prompt_scan_sm90(const __grid_constant__ GdnPromptArgs args) {
  extern __shared__ __align__(1024) unsigned char memory[];
  Shared& s = *reinterpret_cast<Shared*>(memory);
  const int head = static_cast<int>(blockIdx.x) / 2, part = static_cast<int>(blockIdx.x) % 2, thread = static_cast<int>(threadIdx.x);
  const uint32_t rank = hopper::cluster_rank();
  const Walk walk(args, args.gdn.first_run + static_cast<int>(blockIdx.y));
  if (walk.begin >= walk.end) return;  // both blocks of the cluster
  if (thread == 0) {
    for (int i = 0; i < kStages; ++i) {
      hopper::barrier_init(hopper::shared_address(&s.full[i]), 1 + 4);
      hopper::barrier_init(hopper::shared_address(&s.empty[i]), 2 * 4);
    }
    for (int i = 0; i < 2; ++i) {
      hopper::barrier_init(hopper::shared_address(&s.out_full[i]), 4);
      hopper::barrier_init(hopper::shared_address(&s.out_empty[i]), 4);
    }
    for (uint64_t& sums : s.sums_full) hopper::barrier_init(hopper::shared_address(&sums), 1);
    hopper::fence_barrier_init();
  }
  hopper::meet_cluster();
  if (thread < 128) {
    hopper::more_registers<240>();
    Chain{args, s, walk, head, part, rank}.run();
  } else if (thread < 256) {
    hopper::fewer_registers<128>();
    finish(args, s, walk, head, part, rank);
  } else {
    hopper::fewer_registers<136>();
    produce(args, s, walk, head, part, rank);
  }
  hopper::meet_cluster();
}

}  // namespace quern::cuda
