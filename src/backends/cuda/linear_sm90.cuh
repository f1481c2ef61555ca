#pragma once

// Linear layers on Hopper (sm_90a): weights stream once through shared memory and meet up to 256 rows in wgmma, weights as A.
//
// Decode rows (run_chain). The tiles of a weight, row by row along K, are one list that is cut into as many equal pieces as the device has multiprocessors: the cut
// depends on the weight's shape and the device alone, and so does the order of every sum, whatever the number of rows. A tile row that several blocks share is
// added up by the one that finishes last, in the order of K. Layers that follow each other are phases of one launch: one warp of each block keeps a deep ring of
// tiles filled across the phases, and before the predecessor in the stream has finished, since weights depend on nothing; so the memory stays busy while blocks
// wait for each other between phases. Two warpgroups multiply 64 weight rows each. Products of e4m3 are promoted to float every 128 of K with both scales.
// Up to four rows are normed and quantised by every block for itself (resident mode); of more rows every block takes a share.
// Prompt rows have loops of their own (linear_prompt_sm90.cuh).

#include "backends/cuda/ptx_sm90.cuh"
#include "backends/cuda/quantise_sm90.cuh"

namespace quern::cuda::sm90 {

constexpr int kConsumers = 256;  // two warpgroups
constexpr int kHelpers = 96;     // resident mode: three warps for side rows
constexpr int kThreads = kConsumers + 32 + kHelpers;  // the ninth warp copies; the others also leave it their registers

// ---- which tiles a block multiplies ----

/// The length of the list of tiles; times the blocks it has 32 bits (Linears::launch_chain), since divisions of 64 would take longer than a tile.
__device__ __forceinline__ uint32_t num_tiles(const LinearPhase& phase) { return static_cast<uint32_t>(phase.tiles) * static_cast<uint32_t>(phase.k_blocks); }
/// The block of `grid` that has place `unit` of the list.
__device__ __forceinline__ int block_of(const LinearPhase& phase, uint32_t unit, int grid) {
  return static_cast<int>(((unit + 1) * static_cast<uint32_t>(grid) - 1) / num_tiles(phase));
}

/// The tiles of one block in a phase of decode rows.
struct DecodeWalk {
  int grid;  // blocks that take part
  int tile = 0, k = 0, first_row = 0;
  int left = 0;

  __device__ explicit DecodeWalk(const LinearPhase& phase) {
    const uint32_t total = num_tiles(phase), blocks = min(static_cast<uint32_t>(gridDim.x), total), k_blocks = phase.k_blocks;
    grid = static_cast<int>(blocks);
    if (blockIdx.x >= blocks) return;
    const uint32_t begin = total * blockIdx.x / blocks;
    left = static_cast<int>(total * (blockIdx.x + 1) / blocks - begin);
    tile = static_cast<int>(begin / k_blocks);
    k = static_cast<int>(begin % k_blocks);
  }
  __device__ void next_tile() { k = 0, ++tile; }
};

template <class Walk>
__device__ __forceinline__ void next(Walk& walk, int k_blocks) {
  --walk.left;
  if (++walk.k == k_blocks) walk.next_tile();
}
__device__ __forceinline__ const char* tile_address(const LinearPhase& phase, int tile, int k) {
  return static_cast<const char*>(phase.weight) + (int64_t{tile} * phase.k_blocks + k) * kTileBytes;
}
__device__ __forceinline__ const float* tile_scales(const LinearPhase& phase, int tile, int k) { return phase.scale + (int64_t{tile} * phase.k_blocks + k) * kTileScales; }

// ---- shared memory of a block ----

template <int kColumns, bool kFp8, bool kResident>
struct Layout {
  static constexpr int kRowsBytes = kResident ? 0 : kColumns * kTileRowBytes;
  static constexpr int kScaleBytes = kFp8 && !kResident ? (kColumns * 4 + 127) / 128 * 128 : 0;

  uint32_t base;  // 1024-byte aligned shared address; then per stage a tile and its rows
  char* generic;
  int stages, resident_blocks, norm_floats;

  __device__ Layout(char* raw, int num_stages, int blocks, int floats) : stages(num_stages), resident_blocks(blocks), norm_floats(floats) {
    const uint32_t address = shared_address(raw), aligned = (address + 1023) / 1024 * 1024;
    base = aligned;
    generic = raw + (aligned - address);
  }
  __device__ uint32_t weight(int stage) const { return base + stage * (kTileBytes + kRowsBytes); }
  __device__ uint32_t rows(int stage) const { return weight(stage) + kTileBytes; }
  __device__ int resident_begin() const { return stages * (kTileBytes + kRowsBytes); }
  __device__ uint32_t resident(int slot) const { return base + resident_begin() + slot * 1024; }
  __device__ char* resident_at(int slot) const { return generic + resident_begin() + slot * 1024; }
  __device__ int scales_begin() const { return resident_begin() + resident_blocks * 1024; }
  __device__ float* scales(int stage_or_slot) const {
    return reinterpret_cast<float*>(generic + scales_begin() + stage_or_slot * (kResident ? kColumns * 4 : kScaleBytes));
  }
  __device__ int norm_begin() const { return scales_begin() + (kResident ? resident_blocks * kColumns * 4 : stages * kScaleBytes); }
  __device__ float* norm() const { return reinterpret_cast<float*>(generic + norm_begin()); }
  __device__ int barriers_begin() const { return norm_begin() + norm_floats * 4; }
  __device__ uint32_t full(int stage) const { return base + barriers_begin() + stage * 16; }
  __device__ uint32_t empty(int stage) const { return full(stage) + 8; }
  __device__ uint32_t tile_scale_address(int stage) const { return base + barriers_begin() + (stages + 1) * 16 + stage * 16; }
  __device__ const float* tile_scale(int stage) const { return reinterpret_cast<const float*>(generic + barriers_begin() + (stages + 1) * 16 + stage * 16); }
  __device__ uint32_t norm_full() const { return full(stages); }
  __device__ uint32_t norm_empty() const { return full(stages) + 8; }
  __device__ int* flags() const { return reinterpret_cast<int*>(generic + barriers_begin() + (2 * stages + 1) * 16); }  // one a warpgroup
  __device__ float* sums() const { return reinterpret_cast<float*>(generic + barriers_begin() + (2 * stages + 2) * 16); }  // [16][blocks of 128]

  /// `readers`: blocks whose warps say that a stage is free.
  __device__ void init_barriers(int readers = 1) const {
    for (int stage = 0; stage < stages; ++stage) {
      barrier_init(full(stage), 1);
      barrier_init(empty(stage), readers * kConsumers / 32);
    }
    barrier_init(norm_full(), 1);
    barrier_init(norm_empty(), (kConsumers + kHelpers) / 32);
    fence_barrier_init();
  }
};

/// Where a warp stands in the ring.
struct RingPlace {
  int stage = 0;
  uint32_t parity = 0;
  __device__ void advance(int stages) {
    if (++stage == stages) stage = 0, parity ^= 1;
  }
};

// ---- waiting for other blocks ----

/// One thread: waits until `target` arrivals were counted; what the arrived wrote can then be read.
__device__ __forceinline__ void await_arrivals(const int32_t* counter, int target) {
  int value;
  do {
    asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(counter) : "memory");
  } while (value < target);
}
/// A word that another block may just be writing.
__device__ __forceinline__ float load_relaxed(const float* from) {
  float value;
  asm volatile("ld.relaxed.gpu.global.f32 %0, [%1];" : "=f"(value) : "l"(from) : "memory");
  return value;
}
/// One thread, after a barrier of those whose writes it stands for.
__device__ __forceinline__ void arrive(int32_t* counter) { asm volatile("red.release.gpu.global.add.s32 [%0], 1;" ::"l"(counter) : "memory"); }

__device__ __forceinline__ void group_barrier(int group) {
  if (group == 0) named_barrier<2, 128>();
  else named_barrier<3, 128>();
}
__device__ __forceinline__ void consumer_barrier() { named_barrier<1, kConsumers>(); }

// ---- resident mode: the consumers norm and quantise up to four rows ----

/// Blocks of K in the order in which this thread block meets them.
__device__ __forceinline__ int resident_slot(int k, int first, int k_blocks) { return k >= first ? k - first : k - first + k_blocks; }

/// The groups of 128 of every row that a half-warp takes: of `rows` rounded up to 1, 2 or 4, one row each, every (16 >> log)-th block.
struct Share {
  int log, row, step, begin;
  __device__ explicit Share(int rows) {
    const int half = threadIdx.x >> 4;
    log = rows > 2 ? 2 : rows - 1;
    row = half & ((1 << log) - 1);
    step = 16 >> log;
    begin = half >> log;
  }
};

template <int kCount, class At>
__device__ __forceinline__ void fill_share(const ChainArgs& args, const LinearPhase& phase, const At& at, const Share& share, int first_block, int blocks,
                                           uint32_t norm_parity) {
  const int l = threadIdx.x & 15, k_blocks = phase.k_blocks;
  const bool real = share.row < args.rows, has_norm = phase.norm != nullptr;
  const int count = has_norm ? k_blocks : blocks;  // to look at: all, or those that this thread block meets
  const auto block_at = [&](int n) {  // -1: none
    const int i = share.begin + n * share.step;
    return i >= count ? -1 : has_norm ? i : i + first_block >= k_blocks ? i + first_block - k_blocks : i + first_block;
  };
  uint4 x[kCount];
#pragma unroll
  for (int n = 0; n < kCount; ++n) {
    const int block = block_at(n);
    x[n] = block >= 0 && real ? load_row_piece(phase.in, share.row * phase.in_stride + block * 128 + l * 8) : uint4{};
  }
  if (has_norm) {
    float* sums = at.sums() + share.row * k_blocks;
    float square[kCount];
    square_sums(x, square);
#pragma unroll
    for (int n = 0; n < kCount; ++n)
      if (const int block = block_at(n); l == 0 && block >= 0) sums[block] = square[n];
    if (phase.side.weight != nullptr) named_arrive<4, kConsumers + kHelpers>();
    consumer_barrier();
    const float inverse = inverse_rms(sums, k_blocks, phase.eps);
    barrier_wait(at.norm_full(), norm_parity);
#pragma unroll
    for (int n = 0; n < kCount; ++n) {
      const auto* factors = reinterpret_cast<const float4*>(at.norm() + max(block_at(n), 0) * 128 + l * 8);
      x[n] = normed(x[n], inverse, factors[0], factors[1]);
    }
  }
  constexpr int kChunk = kCount <= 4 ? kCount : kCount % 4 == 0 ? 4 : 3;  // in step; those that no half-warp has are left out
#pragma unroll
  for (int first = 0; first < kCount; first += kChunk) {
    if (first * share.step >= count) break;
    uint4 group[kChunk];
    uint2 bytes[kChunk];
    float scales[kChunk];
#pragma unroll
    for (int n = 0; n < kChunk; ++n) group[n] = first + n < kCount ? x[min(first + n, kCount - 1)] : uint4{};
    quantise_groups(group, bytes, scales);
#pragma unroll
    for (int n = 0; n < kChunk; ++n) {
      if (first + n >= kCount) break;
      const int block = block_at(first + n), slot = resident_slot(block, first_block, k_blocks);
      if (block < 0 || slot >= blocks) continue;
      *reinterpret_cast<uint2*>(at.resident_at(slot) + swizzled(share.row, l * 8)) = bytes[n];
      if (l == 0) at.scales(slot)[share.row] = scales[n];
    }
  }
}

/// Puts the rows of a phase into shared memory. No more than kMaxResidentBlocks blocks are looked at.
template <class At>
__device__ __forceinline__ void fill_resident(const ChainArgs& args, const LinearPhase& phase, const At& at, int first_block, int blocks, uint32_t norm_parity) {
  const Share share(args.rows);
  if (share.log == 0) fill_share<(kMaxResidentBlocks + 15) / 16>(args, phase, at, share, first_block, blocks, norm_parity);
  else if (share.log == 1) fill_share<(kMaxResidentBlocks + 7) / 8>(args, phase, at, share, first_block, blocks, norm_parity);
  else fill_share<(kMaxResidentBlocks + 3) / 4>(args, phase, at, share, first_block, blocks, norm_parity);
  fence_async_proxy();
  if (phase.norm != nullptr && (threadIdx.x & 31) == 0) barrier_arrive(at.norm_empty());
  consumer_barrier();
}

/// The helpers' part of a chain: side rows, a weight row a block, while the others multiply.
template <class At>
__device__ __forceinline__ void help_chain(const ChainArgs& args, const At& at) {
  constexpr int kHalves = kHelpers / 16, kCount = (kMaxResidentBlocks + kHalves - 1) / kHalves;
  const int helper = threadIdx.x - kConsumers - 32, half = helper >> 4, l = helper & 15;
  uint32_t norm_parity = 0;
  for (int p = 0; p < args.num_phases; ++p) {
    const LinearPhase& phase = args.phases[p];
    if (phase.side.weight != nullptr) {
      const int k_blocks = phase.k_blocks, weight_row = blockIdx.x;
      const bool has_row = weight_row < phase.side.num_b + phase.side.num_a;
      float* side_sums = at.sums() + 8 * k_blocks;
      uint4 w[kCount];
#pragma unroll
      for (int n = 0; n < kCount; ++n) {
        const int block = half + n * kHalves;
        w[n] = has_row && block < k_blocks ? side_weight(phase.side, weight_row, block, k_blocks, l) : uint4{};
      }
      if (p == 0) wait_for_predecessors();
      named_barrier<4, kConsumers + kHelpers>();  // the input is there, and its square sums
      if (has_row) {
        barrier_wait(at.norm_full(), norm_parity);
        for (int row = 0; row < args.rows; ++row) {
          const float inverse = inverse_rms(at.sums() + row * k_blocks, k_blocks, phase.eps);
          uint4 x[kCount];
#pragma unroll
          for (int n = 0; n < kCount; ++n) {
            const int block = half + n * kHalves;
            x[n] = block < k_blocks ? load_row_piece(phase.in, row * phase.in_stride + block * 128 + l * 8) : uint4{};
          }
#pragma unroll
          for (int n = 0; n < kCount; ++n) {
            const int block = half + n * kHalves;
            const auto* factors = reinterpret_cast<const float4*>(at.norm() + min(block, k_blocks - 1) * 128 + l * 8);
            const float sum = dot8(normed(x[n], inverse, factors[0], factors[1]), w[n]);
            if (l == 0 && block < k_blocks) side_sums[block] = sum;
          }
          named_barrier<5, kHelpers>();
          if (helper == 0) store_side(phase.side, weight_row, row, side_sums, k_blocks);
          named_barrier<5, kHelpers>();
        }
      }
      named_barrier<6, kConsumers + kHelpers>();  // the sums are free; a barrier of its own, since consumers without tiles come here before helpers meet the first
    }
    if (phase.norm != nullptr) {
      if (l == 0 && half % 2 == 0) barrier_arrive(at.norm_empty());
      norm_parity ^= 1;
    }
  }
}

// ---- more rows: every block norms and quantises some, for all ----

template <bool kFp8>
__device__ __forceinline__ void quantise_share(const ChainArgs& args, const LinearPhase& phase, float* sums) {
  constexpr int kPiece = 32;  // blocks of a row without norm that are taken at a time
  const int blocks = kFp8 ? phase.k_blocks : phase.k_blocks / 2;  // of 128 columns
  QuantiseArgs q;
  q.in = phase.in;
  q.in_stride = phase.in_stride;
  q.norm = phase.norm;
  q.eps = phase.eps;
  q.x_rows = args.x_rows;
  q.k_blocks = blocks;
  q.x_scale = args.x_scale;
  if (kFp8) q.x8 = args.x;
  q.x16 = kFp8 ? (phase.side.weight != nullptr ? args.x16 : nullptr) : args.x;
  if (phase.norm != nullptr) {
    for (int row = blockIdx.x; row < args.rows; row += gridDim.x) {
      norm_row<kConsumers>(q, row, sums, [] { consumer_barrier(); });
      consumer_barrier();
    }
    return;
  }
  const int pieces = (blocks + kPiece - 1) / kPiece;
  for (int item = blockIdx.x; item < args.rows * pieces; item += gridDim.x)
    quantise_row<kConsumers>(q, item / pieces, item % pieces * kPiece, min(blocks, (item % pieces + 1) * kPiece));
}

/// Side rows: two weight rows and eight activation rows at a time, 16 sums of which a lane ends up with one; each is added up in the order of dot8().
template <bool kFp8>
__device__ __forceinline__ void side_share(const ChainArgs& args, const LinearPhase& phase, float* sums) {
  const int half = threadIdx.x >> 4, l = threadIdx.x & 15, weight_rows = phase.side.num_b + phase.side.num_a;
  const int pairs = weight_rows / 2, items = pairs * ((args.rows + 7) / 8), blocks = kFp8 ? phase.k_blocks : phase.k_blocks / 2;
  const auto* rows = static_cast<const char*>(kFp8 ? args.x16 : args.x);
  for (int item = blockIdx.x; item < items; item += gridDim.x) {
    const int weight_row = item % pairs * 2, first = item / pairs * 8;
#pragma unroll 1
    for (int block = half; block - half < blocks; block += 16) {
      const bool mine = block < blocks;
      uint4 w[2]{}, x[8]{};
      if (mine) {
        w[0] = side_weight(phase.side, weight_row, block, blocks, l);
        w[1] = side_weight(phase.side, weight_row + 1, block, blocks, l);
#pragma unroll
        for (int i = 0; i < 8; ++i)
          if (first + i < args.rows)
            x[i] = __ldcg(reinterpret_cast<const uint4*>(rows + (int64_t{2 * block + (l >> 3)} * args.x_rows + first + i) * kTileRowBytes + (((l & 7) * 16) ^ (i << 4))));
      }
      float partial[16];
#pragma unroll
      for (int i = 0; i < 16; ++i) partial[i] = dot8_lane(x[i % 8], w[i / 8]);
      const float sum = sum16_scattered(partial);
      if (mine) sums[l * blocks + block] = sum;
    }
    consumer_barrier();
    if (threadIdx.x < 16 && first + static_cast<int>(threadIdx.x) % 8 < args.rows)
      store_side(phase.side, weight_row + threadIdx.x / 8, first + threadIdx.x % 8, sums + threadIdx.x * blocks, blocks);
    consumer_barrier();
  }
}

// ---- what becomes of a finished tile ----

__device__ __forceinline__ float silu(float x) { return __fdividef(x, 1.0f + __expf(-x)); }

__device__ __forceinline__ const OutputSegment& segment_of(const LinearPhase& phase, int tile) {
  int which = 0;
#pragma unroll
  for (int i = 1; i < kMaxSegments; ++i)
    if (i < phase.num_segments && tile >= phase.segments[i].first_tile) which = i;
  return phase.segments[which];
}

/// What a tile of a phase with a residual is added to, for store_tile: a thread's two features of every row.
template <int kColumns>
__device__ __forceinline__ void load_residual(const LinearPhase& phase, int tile, int rows, uint32_t (&before)[kColumns / 4]) {
  const int lane = threadIdx.x & 31, g = lane >> 2, q = lane & 3;
  const OutputSegment& segment = segment_of(phase, tile);
  const int feature = (tile - segment.first_tile) * kTileRows + (threadIdx.x >> 5) * 16 + g * 2;
  if (phase.epilogue != Epilogue::kResidual || feature >= segment.features) return;
#pragma unroll
  for (int j = 0; j < kColumns / 4; ++j)
    if (const int row = j / 2 * 8 + q * 2 + j % 2; row < rows)
      before[j] = __ldcg(reinterpret_cast<const uint32_t*>(static_cast<const __nv_bfloat16*>(segment.out) + row * segment.stride + feature));
}

/// `loaded`: what load_residual gave, or null.
template <int kColumns>
__device__ __forceinline__ void store_tile(const LinearPhase& phase, const float (&acc)[kColumns / 2], int tile, int first_row, int rows,
                                           const uint32_t* loaded = nullptr) {
  const int lane = threadIdx.x & 31, g = lane >> 2, q = lane & 3, group = threadIdx.x >> 5;  // group of 16 packed rows
  const OutputSegment& segment = segment_of(phase, tile);
  float row_scale[2] = {1.0f, 1.0f};
  if (phase.row_scale != nullptr)
    for (int i = 0; i < 2; ++i) row_scale[i] = __ldg(phase.row_scale + int64_t{tile} * kTileRows + group * 16 + i * 8 + g);
  const int local = tile - segment.first_tile;
  const Epilogue epilogue = phase.epilogue;
  if (epilogue == Epilogue::kSiluUp) {
    const int feature = local * 64 + group * 8 + g;
    if (feature >= segment.features) return;
    auto* out = static_cast<__nv_bfloat16*>(segment.out) + feature;
#pragma unroll
    for (int j = 0; j < kColumns / 8; ++j)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int row = first_row + j * 8 + q * 2 + i;
        const float gate = __bfloat162float(__float2bfloat16_rn(acc[j * 4 + i] * row_scale[0]));
        const float up = __bfloat162float(__float2bfloat16_rn(acc[j * 4 + 2 + i] * row_scale[1]));
        const float gated = __bfloat162float(__float2bfloat16_rn(silu(gate)));
        if (row < rows) out[row * segment.stride] = __float2bfloat16_rn(gated * up);
      }
    return;
  }
  const int feature = local * kTileRows + group * 16 + g * 2;
  if (feature >= segment.features) return;
  if (epilogue == Epilogue::kLogits) {
    auto* out = static_cast<float*>(segment.out) + feature;
#pragma unroll
    for (int j = 0; j < kColumns / 8; ++j)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int row = first_row + j * 8 + q * 2 + i;
        if (row < rows) *reinterpret_cast<float2*>(out + row * segment.stride) = make_float2(acc[j * 4 + i] * row_scale[0], acc[j * 4 + 2 + i] * row_scale[1]);
      }
    return;
  }
  auto* out = static_cast<__nv_bfloat16*>(segment.out) + feature;
  constexpr int kTogether = kColumns / 8 < 8 ? kColumns / 8 : 8;  // loads of the residual that are in flight before the first store
#pragma unroll
  for (int first = 0; first < kColumns / 8; first += kTogether) {
    uint32_t before[kTogether * 2];
    if (epilogue == Epilogue::kResidual)
#pragma unroll
      for (int j = 0; j < kTogether * 2; ++j) {
        const int row = first_row + (first + j / 2) * 8 + q * 2 + j % 2;
        if (loaded != nullptr) before[j] = loaded[first * 2 + j];
        else if (row < rows) before[j] = __ldcg(reinterpret_cast<const uint32_t*>(out + row * segment.stride));
      }
#pragma unroll
    for (int j = 0; j < kTogether * 2; ++j) {
      const int row = first_row + (first + j / 2) * 8 + q * 2 + j % 2, at = (first + j / 2) * 4 + j % 2;
      if (row >= rows) continue;
      uint32_t rounded = bf16_pair(acc[at] * row_scale[0], acc[at + 2] * row_scale[1]);
      if (epilogue == Epilogue::kResidual)
        rounded = bf16_pair(__uint_as_float(before[j] << 16) + __uint_as_float(rounded << 16),
                            __uint_as_float(before[j] & 0xffff0000u) + __uint_as_float(rounded & 0xffff0000u));
      *reinterpret_cast<uint32_t*>(out + row * segment.stride) = rounded;
    }
  }
}

/// Adds up a tile row that several blocks share; true for the warpgroup that finished last, whose acc then holds the sum in the order of K.
template <int kColumns>
__device__ __forceinline__ bool join_parts(const LinearPhase& phase, float* partials, float (&acc)[kColumns / 2], int tile, int grid, bool continued, int* flag) {
  constexpr int kCount = kColumns / 2, kTogether = kCount <= 8 ? 8 : kCount <= 64 ? 64 / kCount : 1;  // parts that are loaded at a time
  const int group = threadIdx.x >> 7, thread = threadIdx.x & 127;
  const auto place = [&](int block, bool later) { return partials + ((int64_t{block} * 2 + (later ? 0 : 1)) * 2 + group) * (kCount * 128) + thread; };
  float* mine = place(blockIdx.x, continued);
#pragma unroll
  for (int i = 0; i < kCount; ++i) __stcg(mine + i * 128, acc[i]);
  const uint32_t begin = static_cast<uint32_t>(tile) * static_cast<uint32_t>(phase.k_blocks);
  const int first = block_of(phase, begin, grid), last = block_of(phase, begin + phase.k_blocks - 1, grid);
  group_barrier(group);
  if (thread == 0) {
    int32_t* counter = phase.counters + tile * 2 + group;
    int before;
    asm volatile("atom.acq_rel.gpu.global.add.s32 %0, [%1], 1;" : "=r"(before) : "l"(counter) : "memory");
    *flag = before == last - first ? 1 : 0;
    if (before == last - first) *counter = 0;
  }
  group_barrier(group);
  if (*flag == 0) return false;
#pragma unroll
  for (int i = 0; i < kCount; ++i) acc[i] = __ldcg(place(first, false) + i * 128);
  for (int block = first + 1; block <= last; block += kTogether) {
    float part[kTogether][kCount];
#pragma unroll
    for (int b = 0; b < kTogether; ++b)
      if (block + b <= last)
#pragma unroll
        for (int i = 0; i < kCount; ++i) part[b][i] = __ldcg(place(block + b, true) + i * 128);
#pragma unroll
    for (int b = 0; b < kTogether; ++b)
      if (block + b <= last)
#pragma unroll
        for (int i = 0; i < kCount; ++i) acc[i] = __fadd_rn(acc[i], part[b][i]);
  }
  return true;
}

/// The same for few columns, without counting who is done: the block that has a tile row's first part adds the others, each as soon as its words are there, and marks
/// their places as empty again. Parts that continue a tile row are the first that their blocks compute, so they are seldom waited for.
template <int kColumns>
__device__ __forceinline__ bool join_left_parts(const LinearPhase& phase, float* left, float (&acc)[kColumns / 2], int tile, int grid, bool continued, int rows) {
  constexpr int kCount = kColumns / 2, kTogether = kCount <= 4 ? 4 : 2;
  const int group = threadIdx.x >> 7, thread = threadIdx.x & 127, q = threadIdx.x & 3;
  const auto place = [&](int block) { return left + (int64_t{block} * 2 + group) * (kCount * 128) + thread; };
  const auto is_real = [&](int i) { return i / 4 * 8 + q * 2 + i % 2 < rows; };
  if (continued) {
    float* mine = place(blockIdx.x);
#pragma unroll
    for (int i = 0; i < kCount; ++i)
      if (is_real(i)) __stcg(mine + i * 128, acc[i]);
    return false;
  }
  const int last = block_of(phase, static_cast<uint32_t>(tile + 1) * static_cast<uint32_t>(phase.k_blocks) - 1, grid);
  for (int block = blockIdx.x + 1; block <= last; block += kTogether) {
    float part[kTogether][kCount];
    bool there;
    do {
      there = true;
#pragma unroll
      for (int b = 0; b < kTogether; ++b)
#pragma unroll
        for (int i = 0; i < kCount; ++i)
          if (block + b <= last && is_real(i)) {
            part[b][i] = load_relaxed(place(block + b) + i * 128);
            there = there && __float_as_uint(part[b][i]) != kNothing;
          }
    } while (!there);
#pragma unroll
    for (int b = 0; b < kTogether; ++b)
#pragma unroll
      for (int i = 0; i < kCount; ++i)
        if (block + b <= last && is_real(i)) {
          acc[i] = __fadd_rn(acc[i], part[b][i]);
          __stcg(place(block + b) + i * 128, __uint_as_float(kNothing));
        }
  }
  return true;
}

// ---- the multiplying warpgroups ----

/// Tiles that are multiplied before the first of them is promoted: latencies overlap as far as registers allow.
template <int kColumns>
constexpr int kTogether = kColumns <= 32 ? 4 : kColumns <= 128 ? 2 : 1;

/// Adds the products of kCount tiles of e4m3 to acc, each promoted with its scales.
template <int kColumns, bool kResident, int kCount>
__device__ __forceinline__ void multiply_e4m3(const Layout<kColumns, true, kResident>& at, float (&acc)[kColumns / 2], int k_blocks, int& slot, RingPlace& ring) {
  constexpr int kPart = kColumns < 128 ? kColumns : 128, kParts = kColumns / kPart;
  static_assert(kCount == 1 || kParts == 1);
  const int group = threadIdx.x >> 7, lane = threadIdx.x & 31, q = lane & 3;
  float product[kCount][kPart / 2];
  int stages[kCount], slots[kCount];
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    stages[i] = ring.stage;
    slots[i] = slot;
    barrier_wait(at.full(ring.stage), ring.parity);
    if constexpr (kParts == 1) {
      const uint64_t a = operand(at.weight(ring.stage) + group * (kTileBytes / 2)), b = operand(kResident ? at.resident(slot) : at.rows(ring.stage));
      wgmma_fence();
#pragma unroll
      for (int k = 0; k < 4; ++k) wgmma<kPart, true>(product[i], a + k * 2, b + k * 2, k);
      wgmma_commit();
    }
    ring.advance(at.stages);
    if (kResident && ++slot == k_blocks) slot = 0;
  }
  const auto promote = [&](int i, int part) {
    const float2 scale = *reinterpret_cast<const float2*>(at.tile_scale(stages[i]));
    const float* x_scale = at.scales(kResident ? slots[i] : stages[i]) + part * kPart + q * 2;
#pragma unroll
    for (int j = 0; j < kPart / 8; ++j) {
      const float2 x = *reinterpret_cast<const float2*>(x_scale + j * 8);
      float* sum = acc + part * (kPart / 2) + j * 4;
      sum[0] = __fmaf_rn(product[i][j * 4], __fmul_rn(scale.x, x.x), sum[0]);
      sum[1] = __fmaf_rn(product[i][j * 4 + 1], __fmul_rn(scale.x, x.y), sum[1]);
      sum[2] = __fmaf_rn(product[i][j * 4 + 2], __fmul_rn(scale.y, x.x), sum[2]);
      sum[3] = __fmaf_rn(product[i][j * 4 + 3], __fmul_rn(scale.y, x.y), sum[3]);
    }
  };
  if constexpr (kParts == 1) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      wgmma_wait_for(kCount - 1 - i);
      settle(product[i]);
      promote(i, 0);
      if (lane == 0) barrier_arrive(at.empty(stages[i]));
    }
  } else {
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      const uint64_t a = operand(at.weight(stages[0]) + group * (kTileBytes / 2)), b = operand(at.rows(stages[0]) + part * kPart * kTileRowBytes);
      wgmma_fence();
#pragma unroll
      for (int k = 0; k < 4; ++k) wgmma<kPart, true>(product[0], a + k * 2, b + k * 2, k);
      wgmma_commit();
      wgmma_wait_for(0);
      settle(product[0]);
      promote(0, part);
    }
    if (lane == 0) barrier_arrive(at.empty(stages[0]));
  }
}

/// acc = the products of `count` tiles of one tile row, the next ones of the ring.
template <int kColumns, bool kFp8, bool kResident>
__device__ __forceinline__ void multiply(const Layout<kColumns, kFp8, kResident>& at, float (&acc)[kColumns / 2], int k_blocks, int count, int& slot, RingPlace& ring) {
#pragma unroll
  for (int i = 0; i < kColumns / 2; ++i) acc[i] = 0;
  if constexpr (kFp8) {
    int i = 0;
    if constexpr (kTogether<kColumns> > 1)
      for (; i + kTogether<kColumns> <= count; i += kTogether<kColumns>) multiply_e4m3<kColumns, kResident, kTogether<kColumns>>(at, acc, k_blocks, slot, ring);
    for (; i < count; ++i) multiply_e4m3<kColumns, kResident, 1>(at, acc, k_blocks, slot, ring);
  } else {
    constexpr int kPart = kColumns < 128 ? kColumns : 128, kParts = kColumns / kPart;
    const int group = threadIdx.x >> 7, lane = threadIdx.x & 31;
    int before = 0;
    for (int i = 0; i < count; ++i) {  // a tile is free when the next one's products are under way
      barrier_wait(at.full(ring.stage), ring.parity);
      const uint64_t a = operand(at.weight(ring.stage) + group * (kTileBytes / 2));
      wgmma_fence();
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
        float(&sum)[kPart / 2] = *reinterpret_cast<float(*)[kPart / 2]>(acc + part * (kPart / 2));
        const uint64_t b = operand(at.rows(ring.stage) + part * kPart * kTileRowBytes);
#pragma unroll
        for (int k = 0; k < 4; ++k) wgmma<kPart, false>(sum, a + k * 2, b + k * 2, 1);
      }
      wgmma_commit();
      wgmma_wait_for(1);
      if (i > 0 && lane == 0) barrier_arrive(at.empty(before));
      before = ring.stage;
      ring.advance(at.stages);
    }
    wgmma_wait_for(0);
    settle(acc);
    if (lane == 0) barrier_arrive(at.empty(before));
  }
}

// ---- a chain of phases for decode rows ----

template <int kColumns, bool kFp8, bool kResident>
__device__ __forceinline__ void copy_chain(const ChainArgs& args, const Layout<kColumns, kFp8, kResident>& at) {
  const int tile_and_rows = kTileBytes + (kFp8 ? 16 : 0) + (kResident ? 0 : args.x_rows * (kTileRowBytes + (kFp8 ? 4 : 0)));
  RingPlace ring{0, 1};  // the first round finds empty slots
  uint32_t norm_parity = 1;
  for (int p = 0; p < args.num_phases; ++p) {
    const LinearPhase& phase = args.phases[p];
    const auto copy_tile = [&](const DecodeWalk& walk, const RingPlace& to) {
      barrier_wait(at.empty(to.stage), to.parity);
      barrier_expect(at.full(to.stage), tile_and_rows);
      bulk_copy_once(at.weight(to.stage), tile_address(phase, walk.tile, walk.k), kTileBytes, at.full(to.stage));
      if constexpr (kFp8) bulk_copy(at.tile_scale_address(to.stage), tile_scales(phase, walk.tile, walk.k), 16, at.full(to.stage));
    };
    const auto copy_rows = [&](const DecodeWalk& walk, const RingPlace& to) {
      const int64_t row = int64_t{walk.k} * args.x_rows;
      bulk_copy(at.rows(to.stage), static_cast<const char*>(args.x) + row * kTileRowBytes, args.x_rows * kTileRowBytes, at.full(to.stage));
      if constexpr (kFp8) bulk_copy(shared_address(at.scales(to.stage)), args.x_scale + row, args.x_rows * 4, at.full(to.stage));
    };
    DecodeWalk walk(phase);
    if constexpr (kResident) {
      if (phase.norm != nullptr) {
        barrier_wait(at.norm_empty(), norm_parity);
        barrier_expect(at.norm_full(), phase.k_blocks * 512);
        bulk_copy(shared_address(at.norm()), phase.norm, phase.k_blocks * 512, at.norm_full());
        norm_parity ^= 1;
      }
    } else {
      DecodeWalk behind = walk;
      RingPlace behind_ring = ring;
      const int first = min(at.stages, walk.left);
      for (int i = 0; i < first; ++i) {
        copy_tile(walk, ring);
        ring.advance(at.stages);
        next(walk, phase.k_blocks);
      }
      if (p == 0) wait_for_predecessors();
      // A block without tiles must not wait: the last of the others clears the counters.
      if (phase.in != nullptr && first > 0) await_arrivals(args.arrivals + kMaxPhases + p, static_cast<int>(gridDim.x));
      fence_async_proxy_all();
      for (int i = 0; i < first; ++i) {
        copy_rows(behind, behind_ring);
        behind_ring.advance(at.stages);
        next(behind, phase.k_blocks);
      }
    }
    while (walk.left > 0) {
      copy_tile(walk, ring);
      if constexpr (!kResident) copy_rows(walk, ring);
      ring.advance(at.stages);
      next(walk, phase.k_blocks);
    }
  }
  launch_dependents();
}

template <int kColumns, bool kFp8, bool kResident>
__device__ __forceinline__ void multiply_chain(const ChainArgs& args, const Layout<kColumns, kFp8, kResident>& at) {
  const int group = threadIdx.x >> 7, thread = threadIdx.x & 127;
  RingPlace ring;
  uint32_t norm_parity = 0;
  for (int p = 0; p < args.num_phases; ++p) {
    const LinearPhase& phase = args.phases[p];
    DecodeWalk walk(phase);
    if (p == 0) {
      wait_for_predecessors();
    } else {
      if (threadIdx.x == 0) await_arrivals(args.arrivals + p - 1, 2 * static_cast<int>(gridDim.x));
      consumer_barrier();
    }
    if constexpr (kResident) {
      fill_resident(args, phase, at, walk.k, resident_blocks(phase.tiles, phase.k_blocks, walk.grid), norm_parity);
      if (phase.norm != nullptr) norm_parity ^= 1;
    } else {
      if (phase.in != nullptr) {
        quantise_share<kFp8>(args, phase, at.sums());
        fence_async_proxy_all();  // bulk copies read what was written here
        consumer_barrier();
        if (threadIdx.x == 0) arrive(args.arrivals + kMaxPhases + p);
        if (phase.side.weight != nullptr) {
          if (threadIdx.x == 0) await_arrivals(args.arrivals + kMaxPhases + p, static_cast<int>(gridDim.x));
          consumer_barrier();
          side_share<kFp8>(args, phase, at.sums());
        }
      }
    }
    int slot = 0;
    while (walk.left > 0) {
      float acc[kColumns / 2];
      const int begin = walk.k, count = min(phase.k_blocks - begin, walk.left);
      if constexpr (kColumns <= kDirectColumns) {
        uint32_t before[kColumns / 4] = {};
        if (begin == 0) load_residual<kColumns>(phase, walk.tile, args.rows, before);
        multiply<kColumns, kFp8, kResident>(at, acc, phase.k_blocks, count, slot, ring);
        if (count == phase.k_blocks || join_left_parts<kColumns>(phase, args.left, acc, walk.tile, walk.grid, begin > 0, args.rows))
          store_tile<kColumns>(phase, acc, walk.tile, 0, args.rows, before);
      } else {
        multiply<kColumns, kFp8, kResident>(at, acc, phase.k_blocks, count, slot, ring);
        if (count == phase.k_blocks || join_parts<kColumns>(phase, args.partials, acc, walk.tile, walk.grid, begin > 0, at.flags() + group))
          store_tile<kColumns>(phase, acc, walk.tile, 0, args.rows);
      }
      walk.left -= count;
      walk.next_tile();
    }
    if (kResident && phase.side.weight != nullptr) named_barrier<6, kConsumers + kHelpers>();
    if (p + 1 < args.num_phases) {
      group_barrier(group);
      if (thread == 0) arrive(args.arrivals + p);
    }
  }
  if (args.num_phases > 1 || !kResident) {  // the last block leaves the counters as it found them
    consumer_barrier();
    if (threadIdx.x == 0 && atomicAdd(args.arrivals + 2 * kMaxPhases, 1) == static_cast<int>(gridDim.x) - 1)
      for (int i = 0; i <= 2 * kMaxPhases; ++i) args.arrivals[i] = 0;
  }
}

template <int kColumns, bool kFp8, bool kResident>
__device__ __forceinline__ void run_chain(const ChainArgs& args) {
  extern __shared__ char raw[];
  const Layout<kColumns, kFp8, kResident> at(raw, args.stages, kResident ? args.resident_blocks : 0, kResident ? args.norm_floats : 0);
  if (threadIdx.x == kConsumers) at.init_barriers();
  __syncthreads();
  if (threadIdx.x >= kConsumers) {
    if constexpr (kColumns > 64) asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
    if (threadIdx.x == kConsumers) copy_chain(args, at);
    if constexpr (kResident)
      if (threadIdx.x >= kConsumers + 32) help_chain(args, at);
  } else {
    if constexpr (kColumns > 64) asm volatile("setmaxnreg.inc.sync.aligned.u32 240;");
    multiply_chain(args, at);
  }
}

#define QUERN_CHAIN(name, columns, fp8, resident)                                                                                    \
  extern "C" __global__ void __launch_bounds__(kThreads, 1) name(const __grid_constant__ ChainArgs args) { \
    run_chain<columns, fp8, resident>(args);                                                                                         \
  }

}  // namespace quern::cuda::sm90
