#pragma once

// Linear layers on Hopper (sm_90a): weights stream once through shared memory and meet up to 256 rows in wgmma, weights as A.
//
// Decode rows (run_decode). The tiles of a weight, row by row along K, are one list that is cut into as many equal pieces as the device has multiprocessors, or a few less (decode_blocks): the cut
// depends on the weight's shape and the device alone, and so does the order of every sum, whatever the number of rows. A tile row that several blocks share is
// added up by the one that has its first part, in the order of K. One thread of each block fills a deep ring with tiles, from its first instructions on and before the predecessor in the
// stream has finished, since weights depend on nothing; so memory is busy while rows are normed and quantised. It has few tiles under way at a time: what the others of the block read and
// write waits behind them (decision 0037). Two warpgroups multiply 64 weight rows each. Products of e4m3 are promoted to float every 128 of K with both scales.
// Up to four rows are normed and quantised by every block for itself (resident mode); of more rows every block takes a share.
// Prompt rows have loops of their own (linear_prompt_sm90.cuh).

#include "backends/cuda/ptx_sm90.cuh"
#include "backends/cuda/side_rows_sm90.cuh"

namespace quern::cuda::sm90 {

constexpr int kConsumers = 256;  // two warpgroups
constexpr int kHelpers = 96;     // three warps for side rows
constexpr int kSideHelpers = 64; // of up to 64 rows that are not resident two warps: a thread of the third brings rows
constexpr int kThreads = kConsumers + 32 + kHelpers;  // the ninth warp copies
/// Where products need most registers the consumers multiply side rows, when they have nothing else to do.
template <int kColumns>
constexpr bool kHasHelpers = kColumns <= 64;

// ---- which tiles a block multiplies ----

/// The length of the list of tiles; times the blocks it has 32 bits (Linears::launch_decode), since divisions of 64 would take longer than a tile.
__device__ __forceinline__ uint32_t num_tiles(const LinearLayer& linear) { return static_cast<uint32_t>(linear.tiles) * static_cast<uint32_t>(linear.k_blocks); }
/// The block of `grid` that has place `unit` of the list.
__device__ __forceinline__ int block_of(const LinearLayer& linear, uint32_t unit, int grid) {
  return static_cast<int>(((unit + 1) * static_cast<uint32_t>(grid) - 1) / num_tiles(linear));
}

/// The tiles of one block in a launch for decode rows.
struct DecodeWalk {
  int grid;  // blocks that take part
  int tile = 0, k = 0;
  int left = 0;

  __device__ explicit DecodeWalk(const LinearLayer& linear) {
    const uint32_t total = num_tiles(linear), blocks = linear.blocks, k_blocks = linear.k_blocks;
    grid = linear.blocks;
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
__device__ __forceinline__ const char* tile_address(const LinearLayer& linear, int tile, int k) {
  return static_cast<const char*>(linear.weight) + (int64_t{tile} * linear.k_blocks + k) * kTileBytes;
}
__device__ __forceinline__ const float* tile_scales(const LinearLayer& linear, int tile, int k) { return linear.scale + (int64_t{tile} * linear.k_blocks + k) * kTileScales; }

// ---- shared memory of a block ----

template <int kColumns, bool kFp8, int kResident>
struct Layout {
  static constexpr int kRowsBytes = kResident > 0 ? 0 : kColumns * kTileRowBytes;
  static constexpr bool kSplit = is_split(kColumns, kFp8, kResident > 0);  // tiles and rows have rings of their own
  static constexpr int kStageBytes = kTileBytes + (kSplit ? 0 : kRowsBytes);
  /// Whether a stage's rows have a barrier beside its tile's.
  static constexpr bool kPaced = kResident == 0 && kColumns <= kMaxPacedColumns;
  static constexpr int kScaleBytes = kFp8 && kResident == 0 ? (kColumns * 4 + 127) / 128 * 128 : 0;

  uint32_t front, base;  // 1024-byte aligned shared addresses: of barriers and scales, and of stages, each a tile and its rows, or tiles and behind them the stages of rows
  char* generic;
  int stages, resident_blocks, norm_floats;

  __device__ Layout(char* raw, int num_stages, int blocks, int floats) : stages(num_stages), resident_blocks(blocks), norm_floats(floats) {
    const uint32_t address = shared_address(raw), aligned = (address + 1023) / 1024 * 1024;
    front = aligned;
    base = front + kFrontBytes;
    generic = raw + (base - address);
  }
  /// The same with addresses that the compiler has from a register: it would find out again and again, between products too, where shared memory begins.
  __device__ Layout settled() const {
    Layout at = *this;
    at.base = __shfl_sync(0xffffffffu, base, 0) / 1024 * 1024;
    at.front = at.base - kFrontBytes;
    return at;
  }
  __device__ uint32_t weight(int stage) const { return base + stage * kStageBytes; }
  __device__ uint32_t rows(int stage) const { return kSplit ? base + stages * kStageBytes + stage * kRowsBytes : weight(stage) + kTileBytes; }
  __device__ int resident_begin() const { return stages * kStageBytes + (kSplit ? kRowStages * kRowsBytes : 0); }
  __device__ uint32_t resident(int slot) const { return base + resident_begin() + slot * kResident * kTileRowBytes; }
  __device__ char* resident_at(int slot, int row, int byte) const { return generic + resident_begin() + swizzled(slot * kResident + row, byte); }
  __device__ int scales_begin() const { return resident_begin() + (kResident > 0 ? resident_bytes(resident_blocks, kResident) : 0); }
  __device__ float* scales(int stage_or_slot) const {
    return reinterpret_cast<float*>(generic + scales_begin() + stage_or_slot * (kResident > 0 ? kColumns * 4 : kScaleBytes));
  }
  __device__ uint32_t scales_address(int stage) const { return base + scales_begin() + stage * kScaleBytes; }
  __device__ int norm_begin() const { return scales_begin() + (kResident > 0 ? resident_blocks * kColumns * 4 : (kSplit ? kRowStages : stages) * kScaleBytes); }
  __device__ float* norm() const { return reinterpret_cast<float*>(generic + norm_begin()); }
  __device__ float* sums() const { return norm() + norm_floats; }  // [kResidentRows][blocks of 128], then products of side rows
  __device__ uint32_t full(int stage) const { return front + stage * 16; }
  __device__ uint32_t empty(int stage) const { return full(stage) + 8; }
  __device__ uint32_t tile_scale_address(int stage) const { return front + kMaxStages * 16 + stage * 16; }
  __device__ const float* tile_scale(int stage) const { return reinterpret_cast<const float*>(generic - kFrontBytes + kMaxStages * 16 + stage * 16); }
  __device__ uint32_t rows_full(int stage) const { return kPaced ? front + kMaxStages * 32 + stage * 8 : full(stage); }
  __device__ uint32_t norm_full() const { return front + kMaxStages * 40; }
  /// Of a ring of rows.
  __device__ uint32_t rows_empty(int stage) const { return front + kMaxStages * 40 + 16 + stage * 8; }
  /// Of up to kMaxPacedColumns rows: a word that says whether this block's consumers are quantising.
  __device__ uint32_t quantising() const { return front + kMaxStages * 40 + 8; }

  /// One thread. `readers`: blocks whose warps say that a stage is free.
  __device__ void init_stages(int begin, int end, int readers) const {
    for (int stage = begin; stage < end; ++stage) {
      barrier_init(full(stage), 1);
      barrier_init(empty(stage), readers * kConsumers / 32);
      if constexpr (kPaced && !kSplit) barrier_init(rows_full(stage), 1);
    }
    fence_barrier_init();
  }
  /// Those of the stages before `begin` are there.
  __device__ void init_barriers(int readers = 1, int begin = 0) const {
    barrier_init(norm_full(), 1);
    if constexpr (kPaced) store_shared(quantising(), 0);
    if constexpr (kSplit)
      for (int stage = 0; stage < kRowStages; ++stage) {
        barrier_init(rows_full(stage), 1);
        barrier_init(rows_empty(stage), readers * kConsumers / 32);
      }
    init_stages(begin, stages, readers);
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

/// threadIdx.x, read where it stands: what follows from it is not computed before the products and kept through them.
__device__ __forceinline__ int thread_here() {
  int thread;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
  return thread;
}

// ---- waiting for other blocks ----

/// One thread: waits until `target` arrivals were counted; what the arrived wrote can then be read.
__device__ __forceinline__ void await_arrivals(const int32_t* counter, int target) {
  int value;
  do {
    asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(counter) : "memory");
  } while (value < target);
}
/// One thread of each block, once nobody of it looks at the counters any more: the last block leaves them as it found them.
__device__ __forceinline__ void finish_with(int32_t* arrivals) {
  if (atomicAdd(arrivals + kFinishedAt, 1) == static_cast<int>(gridDim.x) - 1)
    for (int i = 0; i < kNumArrivals; ++i) arrivals[i] = 0;
}
/// One thread, after a barrier of those whose writes it stands for.
__device__ __forceinline__ void arrive(int32_t* counter) { asm volatile("red.release.gpu.global.add.s32 [%0], 1;" ::"l"(counter) : "memory"); }

__device__ __forceinline__ void group_barrier(int group) {
  if (group == 0) named_barrier<2, 128>();
  else named_barrier<3, 128>();
}
__device__ __forceinline__ void consumer_barrier() { named_barrier<1, kConsumers>(); }

// ---- resident mode: the consumers norm and quantise up to four rows ----

/// The block of K that is met as the `slot`-th.
__device__ __forceinline__ int resident_block(int slot, int first, int k_blocks) { return slot + first < k_blocks ? slot + first : slot + first - k_blocks; }

/// Norm and quantisation of rows that this thread block needs itself. A half-warp has every sixteenth of the blocks of K that are met, of all rows, so that factors are read once: of kRows, `args.rows`
/// rounded up. Of four rows the blocks of a half-warp are put into shared memory one after another, since products can begin with those that are met first.
template <int kRows>
class ResidentRows {
  static constexpr int kHalves = kConsumers / 16, kEach = (kMaxResidentBlocks + kHalves - 1) / kHalves;
  static constexpr int kAtOnce = kRows == kResidentRows ? 1 : kEach;  // blocks of a half-warp

 public:
  static constexpr bool kInTurn = kAtOnce < kEach;

  /// What takes time before the rows are there.
  __device__ ResidentRows(const DecodeArgs& args, const LinearLayer& linear, int first_block)
      : k_blocks(linear.k_blocks), blocks(args.resident_blocks), first(first_block), count(linear.norm != nullptr ? k_blocks : blocks) {
#pragma unroll
    for (int j = 0; j < kEach; ++j) {
      from[j] = static_cast<const char*>(linear.in) + (resident_block(slot_of(j), first, k_blocks) * 128 + lane() * 8) * 2;
      asm volatile("" : "+l"(from[j]));  // computed here
    }
    stride = linear.in_stride * 2;
    asm volatile("" : "+l"(stride));
  }
  ResidentRows() = default;

  /// Asks for the rows, once the predecessor has finished, and finds out how long they are where there is a norm.
  template <class At>
  __device__ __forceinline__ void load(const DecodeArgs& args, const LinearLayer& linear, const At& at) {
#pragma unroll
    for (int j = 0; j < kEach; ++j)
#pragma unroll
      for (int row = 0; row < kRows; ++row)
        x[j][row] = slot_of(j) < count && (kRows <= 2 || row < args.rows) ? __ldcg(reinterpret_cast<const uint4*>(from[j] + row * stride)) : uint4{};  // never from an L1 line older than the predecessor
    if (linear.norm == nullptr) return;
    constexpr int kGroups = kEach * kRows;
    const int l = lane();
    float* sums = at.sums();
#pragma unroll
    for (int i = 0; i < kGroups; i += 4) {
      float square[4];
#pragma unroll
      for (int n = 0; n < 4; ++n) square[n] = i + n < kGroups ? square_sum(x[(i + n) / kRows < kEach ? (i + n) / kRows : 0][(i + n) % kRows]) : 0.0f;
      const float sum = sum16_of_four(square);
      const int group = i + (l >> 2), slot = slot_of(group / kRows);
      if ((l & 3) == 0 && group < kGroups && slot < count) sums[group % kRows * k_blocks + resident_block(slot, first, k_blocks)] = sum;
    }
    if (linear.side.weight != nullptr) named_arrive<4, kConsumers + kHelpers>();
    consumer_barrier();
    inverse_rms_of_rows<kEach>(inverse, sums, k_blocks, linear.eps);
    barrier_wait(at.norm_full(), 0);
  }
  /// Puts the next blocks of every half-warp into shared memory, and says how many of those that are met can be multiplied then. All consumers.
  template <class At>
  __device__ __forceinline__ int put(const LinearLayer& linear, const At& at, int filled) {
    constexpr int kGroups = kAtOnce * kRows;
    const int half = static_cast<int>(threadIdx.x) >> 4, l = lane();
    if (filled + (half & ~1) < blocks) {
      uint4 groups[kGroups];
      uint2 bytes[kGroups];
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
        const int block = resident_block(min(filled + j * kHalves + half, blocks - 1), first, k_blocks);
        if (linear.norm != nullptr) {
          const auto* factors = reinterpret_cast<const float4*>(at.norm() + block * 128 + l * 8);
          const float4 low = factors[0], high = factors[1];
#pragma unroll
          for (int row = 0; row < kRows; ++row) groups[j * kRows + row] = normed(x[j][row], inverse[row], low, high);
        } else {
#pragma unroll
          for (int row = 0; row < kRows; ++row) groups[j * kRows + row] = x[j][row];
        }
      }
      float scale[(kGroups + 3) / 4];  // lane l: of group 4 i + l / 4
      quantise_by_fours(groups, bytes, scale);
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j)
#pragma unroll
        for (int row = 0; row < kRows; ++row)
          if (const int slot = filled + j * kHalves + half; slot < blocks) *reinterpret_cast<uint2*>(at.resident_at(slot, row, l * 8)) = bytes[j * kRows + row];
#pragma unroll
      for (int i = 0; i < (kGroups + 3) / 4; ++i) {
        const int group = i * 4 + (l >> 2), slot = filled + group / kRows * kHalves + half;
        if ((l & 3) == 0 && group < kGroups && slot < blocks) at.scales(slot)[group % kRows] = scale[i];
      }
    }
#pragma unroll
    for (int j = 0; j + kAtOnce < kEach; ++j)
#pragma unroll
      for (int row = 0; row < kRows; ++row) x[j][row] = x[j + kAtOnce][row];
    fence_async_proxy();
    consumer_barrier();
    return filled + kAtOnce * kHalves;
  }

 private:
  static __device__ __forceinline__ int lane() { return static_cast<int>(threadIdx.x) & 15; }
  static __device__ __forceinline__ int slot_of(int j) { return (static_cast<int>(threadIdx.x) >> 4) + j * kHalves; }

  int k_blocks = 0, blocks = 0, first = 0, count = 0;  // of K; that are met; the first of them; to look at: those that are met or, with a norm, all
  const char* from[kEach];
  int64_t stride = 0;
  uint4 x[kEach][kRows];
  float inverse[kRows] = {};
};

template <>
class ResidentRows<0> {
 public:
  static constexpr bool kInTurn = false;
};

/// The helpers' part of a launch: side rows, while the others multiply. They norm the columns of their slices for themselves.
template <class At>
__device__ __forceinline__ void help_resident(const DecodeArgs& args, const At& at) {
  constexpr int kWarps = kHelpers / 32, kEach = (kSideSlice + kWarps - 1) / kWarps;  // blocks of a slice that a warp takes
  const int helper = static_cast<int>(threadIdx.x) - kConsumers - 32, warp = helper >> 5, lane = helper & 31, g = lane >> 2;
  const LinearLayer& linear = args.linear;
  if (linear.side.weight == nullptr) return;
  const int blocks = linear.k_blocks, units = side_units(linear.side, blocks);
  float* products = at.sums() + kResidentRows * blocks;  // [kSideSlice][32]
  SideWeights w[kEach];
  const auto load = [&](int at_unit) {
    const SideUnit unit(linear.side, at_unit, blocks);
#pragma unroll
    for (int n = 0; n < kEach; ++n)
      if (const int block = warp + n * kWarps; block < unit.count(blocks)) w[n] = SideWeights(linear.side, unit, unit.first_block() + block, blocks);
  };
  const int first = static_cast<int>(blockIdx.x);
  if (first < units) load(first);
  wait_for_predecessors();
  named_barrier<4, kConsumers + kHelpers>();  // the input is there, and its square sums
  barrier_wait(at.norm_full(), 0);
  float inverse = 0;
  for (int row = 0; row < args.rows; ++row) {
    const float of_row = inverse_rms(at.sums() + row * blocks, blocks, linear.eps);
    if (row == g) inverse = of_row;
  }
  for (int at_unit = first; at_unit < units; at_unit += static_cast<int>(gridDim.x)) {
    if (at_unit != first) load(at_unit);
    const SideUnit unit(linear.side, at_unit, blocks);
#pragma unroll
    for (int n = 0; n < kEach; ++n) {
      const int block = warp + n * kWarps;
      if (block >= unit.count(blocks)) continue;
      float product[4];
      w[n].multiply(product,
                    [&](int half, int piece) {
                      if (g >= args.rows) return uint4{};
                      const int column = (unit.first_block() + block) * 128 + half * 64 + piece * 8;
                      const auto* factors = reinterpret_cast<const float4*>(at.norm() + column);
                      return normed(load_row_piece(linear.in, g * linear.in_stride + column), inverse, factors[0], factors[1]);
                    },
                    [](int, int) { return uint4{}; });
      if (g < kResidentRows) *reinterpret_cast<float2*>(products + block * 32 + g * 8 + (lane & 3) * 2) = make_float2(product[0], product[1]);
    }
    named_barrier<5, kHelpers>();
    if (warp == 0) {
      float sum = 0;
      for (int block = 0; block < unit.count(blocks); ++block) sum = __fadd_rn(sum, products[block * 32 + lane]);
      if (lane / 8 < args.rows) __stcg(side_part(linear.side.parts, at_unit, lane / 8) + lane % 8, sum);
    }
    named_barrier<5, kHelpers>();
  }
  if (warp == 0) join_side(linear.side, args.rows, blocks, lane, 32);
  named_barrier<6, kConsumers + kHelpers>();  // the sums are free; a barrier of its own, since consumers without tiles come here before helpers meet the first
}

// ---- more rows: every block norms and quantises some, for all ----

template <bool kFp8>
__device__ __forceinline__ QuantiseArgs rows_to_quantise(const DecodeArgs& args, const LinearLayer& linear) {
  QuantiseArgs q;
  q.in = linear.in;
  q.in_stride = linear.in_stride;
  q.norm = linear.norm;
  q.eps = linear.eps;
  q.x_rows = args.x_rows;
  q.k_blocks = kFp8 ? linear.k_blocks : linear.k_blocks / 2;  // of 128 columns
  q.x_scale = args.x_scale;
  if (kFp8) q.x8 = args.x;
  q.x16 = kFp8 ? (linear.side.weight != nullptr ? args.x16 : nullptr) : args.x;
  return q;
}
/// Groups of 128 of rows without a norm that a block takes at a time, a half-warp each.
constexpr int kGroupsAtOnce = kConsumers / 16;

/// What quantise_few needs besides rows.
template <bool kFp8>
__device__ __forceinline__ RowsAhead<kConsumers> ahead_of_rows(const DecodeArgs& args, const LinearLayer& linear) {
  if (linear.in == nullptr) return {};
  const QuantiseArgs q = rows_to_quantise<kFp8>(args, linear);
  const int thread = static_cast<int>(threadIdx.x), block = static_cast<int>(blockIdx.x);
  if (linear.norm == nullptr) return RowsAhead<kConsumers>::of_groups(q, args.rows, block * kGroupsAtOnce + (thread >> 4), static_cast<int>(gridDim.x) * kGroupsAtOnce, thread);
  if (block >= args.rows) return {};
  return RowsAhead<kConsumers>::of_norm(q, block, thread);
}

/// Threads that norm a row: a block's, or where there are more rows than blocks a warpgroup's.
template <int kColumns>
constexpr int kNormThreads = kColumns > 128 ? 128 : kConsumers;
/// What quantise_share needs besides rows.
template <int kColumns>
using FactorsOf = RowFactors<kNormThreads<kColumns>>;
template <int kColumns, bool kFp8>
__device__ __forceinline__ FactorsOf<kColumns> factors_for(const DecodeArgs& args, const LinearLayer& linear) {
  if (linear.in == nullptr || linear.norm == nullptr || static_cast<int>(blockIdx.x) >= args.rows) return {};
  return {linear.norm, kFp8 ? linear.k_blocks : linear.k_blocks / 2, static_cast<int>(threadIdx.x) % kNormThreads<kColumns>};
}

/// Of either, what rows of so many columns need.
template <int kColumns, bool kFp8>
__device__ __forceinline__ auto ahead_for(const DecodeArgs& args, const LinearLayer& linear) {
  if constexpr (kColumns <= kMaxPacedColumns) return ahead_of_rows<kFp8>(args, linear);
  else return factors_for<kColumns, kFp8>(args, linear);
}

/// A block takes a row with a norm; a half-warp groups of 128 of rows without.
template <bool kFp8>
__device__ __forceinline__ void quantise_few(const DecodeArgs& args, const LinearLayer& linear, float* sums, const RowsAhead<kConsumers>& ahead) {
  const int thread = static_cast<int>(threadIdx.x), grid = static_cast<int>(gridDim.x);
  const QuantiseArgs q = rows_to_quantise<kFp8>(args, linear);
  if (linear.norm == nullptr) {
    const int step = grid * kGroupsAtOnce;
    quantise_groups_ahead(q, thread, ahead);
    quantise_groups_of_rows(q, args.rows, static_cast<int>(blockIdx.x) * kGroupsAtOnce + (thread >> 4) + RowsAhead<kConsumers>::kGroups * step, step);
    return;
  }
  const char* from = ahead.from[0];
  for (int row = static_cast<int>(blockIdx.x); row < args.rows; row += grid) {
    norm_row<kConsumers>(q, row, from, thread, sums, ahead, [] { consumer_barrier(); });
    from += grid * q.in_stride * 2;
    consumer_barrier();
  }
}
/// The same for more rows than kMaxPacedColumns; where there are more than blocks a warpgroup takes one.
template <int kColumns, bool kFp8>
__device__ __forceinline__ void quantise_many(const DecodeArgs& args, const LinearLayer& linear, const Layout<kColumns, kFp8, 0>& at, const FactorsOf<kColumns>& factors) {
  float* sums = at.sums();
  const int thread = static_cast<int>(threadIdx.x), group = thread >> 7, grid = static_cast<int>(gridDim.x);
  const QuantiseArgs q = rows_to_quantise<kFp8>(args, linear);
  if (linear.norm == nullptr) {
    const int first = static_cast<int>(blockIdx.x) * kGroupsAtOnce + (thread >> 4), step = grid * kGroupsAtOnce;
    if constexpr (kColumns > 128) {  // where the rows of stages will be
      constexpr int kStageBytes = kTileBytes + Layout<kColumns, kFp8, false>::kRowsBytes, kSlots = Layout<kColumns, kFp8, false>::kRowsBytes / (kConsumers * 16);  // of a stage
      quantise_many_groups_of_rows<kConsumers>(q, args.rows, static_cast<int>(blockIdx.x), grid, kSlots * at.stages, [&](int i) {
        return reinterpret_cast<uint4*>(at.generic + i / kSlots * kStageBytes + kTileBytes + (i % kSlots * kConsumers + thread) * 16);
      });
    } else {
      quantise_groups_of_rows(q, args.rows, first, step);
    }
  } else if constexpr (kColumns > 128) {
#pragma unroll 1
    for (int row = static_cast<int>(blockIdx.x) + group * grid; row < args.rows; row += 2 * grid) {  // seldom more than one: nothing is to be computed before it
      norm_row<128>(q, row, thread_here() & 127, sums + group * q.k_blocks, factors, [group] { group_barrier(group); });
      group_barrier(group);
    }
  } else {
    for (int row = static_cast<int>(blockIdx.x); row < args.rows; row += grid) {
      norm_row<kConsumers>(q, row, thread, sums, factors, [] { consumer_barrier(); });
      consumer_barrier();
    }
  }
}

/// How many blocks, the first ones, have something to quantise.
template <int kColumns, bool kFp8>
__device__ __forceinline__ int quantisers_of(const DecodeArgs& args, const LinearLayer& linear) {
  const int grid = static_cast<int>(gridDim.x), groups = args.rows * (kFp8 ? linear.k_blocks : linear.k_blocks / 2);
  return kColumns > kMaxPacedColumns ? grid : min(grid, linear.norm != nullptr ? args.rows : (groups + kConsumers / 16 - 1) / (kConsumers / 16));
}

/// All consumers, once the predecessor has finished: this block's share, and that it is there. Bulk copies read what is written here; whoever begins them fences once it has seen all arrive.
template <int kColumns, bool kFp8>
__device__ __forceinline__ void quantise_and_arrive(const DecodeArgs& args, const LinearLayer& linear, const Layout<kColumns, kFp8, 0>& at, const auto& ahead) {
  if (linear.in == nullptr || static_cast<int>(blockIdx.x) >= quantisers_of<kColumns, kFp8>(args, linear)) return;
  constexpr bool kPaced = Layout<kColumns, kFp8, 0>::kPaced;
  if constexpr (kPaced) {
    if (threadIdx.x == 0) store_shared(at.quantising(), 1);
    quantise_few<kFp8>(args, linear, at.sums(), ahead);
  } else {
    quantise_many(args, linear, at, ahead);
  }
  consumer_barrier();
  if (threadIdx.x == 0) {
    arrive(args.arrivals + kQuantisedAt);
    if constexpr (kPaced) store_shared(at.quantising(), 0);
  }
}

/// Side rows by `warps` warps of every block, once all rows are quantised; and their sums over all of K by `warps` warps, once the block's own are left.
template <bool kFp8, int kGroups, bool kAhead>
__device__ __forceinline__ void multiply_side_rows(const DecodeArgs& args, const LinearLayer& linear, int warp, int warps) {
  multiply_side<kGroups, kAhead>(linear.side, kFp8 ? args.x16 : args.x, args.rows, args.x_rows, kFp8 ? linear.k_blocks : linear.k_blocks / 2, warp, warps);
}
template <bool kFp8>
__device__ __forceinline__ void join_side_rows(const DecodeArgs& args, const LinearLayer& linear, int thread, int threads) {
  join_side(linear.side, args.rows, kFp8 ? linear.k_blocks : linear.k_blocks / 2, thread, threads);
}

/// The helpers' part of a launch: side rows, while the others multiply, once `quantisers` blocks have quantised rows.
template <bool kFp8, int kWarps = kHelpers / 32>
__device__ __forceinline__ void help_with_side_rows(const DecodeArgs& args, int quantisers = static_cast<int>(gridDim.x)) {
  const int helper = static_cast<int>(threadIdx.x) - kConsumers - 32;
  const LinearLayer& linear = args.linear;
  if (linear.side.weight == nullptr) return;
  wait_for_predecessors();
  if ((helper & 31) == 0) await_arrivals(args.arrivals + kQuantisedAt, quantisers);
  __syncwarp();
  multiply_side_rows<kFp8, 1, false>(args, linear, helper >> 5, kWarps);
  join_side_rows<kFp8>(args, linear, helper, kWarps * 32);
  named_barrier<6, kConsumers + kWarps * 32>();  // the counters may be cleared
}
/// Where a block multiplies side rows alone it has stages of its own, two of the ring's each, by the barriers of the first.
template <int kColumns, bool kFp8>
struct SideStages {
  using At = Layout<kColumns, kFp8, false>;
  static_assert((2 * kColumns + 2 * kSideGroups * 8) * kTileRowBytes <= 2 * (kTileBytes + At::kRowsBytes));
  const At& at;

  __device__ int count() const { return at.stages / 2; }
  __device__ uint32_t full(int stage) const { return at.full(2 * stage); }
  __device__ uint32_t empty(int stage) const { return at.empty(2 * stage); }
  __device__ uint32_t address(int stage) const { return at.weight(2 * stage); }
  __device__ const char* generic(int stage) const { return at.generic + 2 * stage * (kTileBytes + At::kRowsBytes); }
};
/// All of them, by the consumers of a block that has no tiles.
template <int kColumns, bool kFp8>
__device__ __forceinline__ void side_rows_alone(const DecodeArgs& args, const LinearLayer& linear, const SideShare& share, const SideStages<kColumns, kFp8>& at) {
  RingPlace ring;
  multiply_side_share<kColumns / 128>(
      linear.side, share, args.rows, args.x_rows, kFp8 ? linear.k_blocks : linear.k_blocks / 2, static_cast<int>(threadIdx.x) >> 5, kConsumers / 32,
      [&] {
        barrier_wait(at.full(ring.stage), ring.parity);
        return at.generic(ring.stage);
      },
      [&] {
        __syncwarp();
        if ((threadIdx.x & 31) == 0) barrier_arrive(at.empty(ring.stage));
        ring.advance(at.count());
      });
  join_side_share(linear.side, share, args.rows, static_cast<int>(threadIdx.x), kConsumers);
}
/// Some of them, by the consumers of every block when its tiles are done.
template <int kColumns, bool kFp8>
__device__ __forceinline__ void side_rows_of_consumers(const DecodeArgs& args, const LinearLayer& linear) {
  if (linear.side.weight == nullptr || linear.side.blocks > 0) return;
  if (threadIdx.x == 0) await_arrivals(args.arrivals + kQuantisedAt, static_cast<int>(gridDim.x));
  consumer_barrier();
  multiply_side_rows<kFp8, kColumns / 128, true>(args, linear, static_cast<int>(threadIdx.x) >> 5, kConsumers / 32);
  join_side_rows<kFp8>(args, linear, static_cast<int>(threadIdx.x), kConsumers);
}

// ---- what becomes of a finished tile ----

__device__ __forceinline__ float silu(float x) {
  float e;  // of -x, as __expf gives it but for what is lost beside 1
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(e) : "f"(__fmul_rn(x, -1.4426950216293335f)));
  return __fdividef(x, 1.0f + e);
}

__device__ __forceinline__ const OutputSegment& segment_of(const LinearLayer& linear, int tile) {
  int which = 0;
#pragma unroll
  for (int i = 1; i < kMaxSegments; ++i)
    if (i < linear.num_segments && tile >= linear.segments[i].first_tile) which = i;
  return linear.segments[which];
}

/// What a tile of a layer with a residual is added to, for store_tile: a thread's two features of every row.
template <int kColumns>
__device__ __forceinline__ void load_residual(const LinearLayer& linear, int tile, int rows, uint32_t (&before)[kColumns / 4]) {
  const int lane = threadIdx.x & 31, g = lane >> 2, q = lane & 3;
  const OutputSegment& segment = segment_of(linear, tile);
  const int feature = (tile - segment.first_tile) * kTileRows + (threadIdx.x >> 5) * 16 + g * 2;
  if (linear.epilogue != Epilogue::kResidual || feature >= segment.features) return;
#pragma unroll
  for (int j = 0; j < kColumns / 4; ++j)
    if (const int row = j / 2 * 8 + q * 2 + j % 2; row < rows)
      before[j] = __ldcg(reinterpret_cast<const uint32_t*>(static_cast<const __nv_bfloat16*>(segment.out) + row * segment.stride + feature));
}

/// `loaded`: what load_residual gave, or null.
template <int kColumns>
__device__ __forceinline__ void store_tile(const LinearLayer& linear, const float (&acc)[kColumns / 2], int tile, int first_row, int rows,
                                           const uint32_t* loaded = nullptr) {
  const int lane = threadIdx.x & 31, g = lane >> 2, q = lane & 3, group = threadIdx.x >> 5;  // group of 16 packed rows
  const OutputSegment& segment = segment_of(linear, tile);
  float row_scale[2] = {1.0f, 1.0f};
  if (linear.row_scale != nullptr)
    for (int i = 0; i < 2; ++i) row_scale[i] = __ldg(linear.row_scale + int64_t{tile} * kTileRows + group * 16 + i * 8 + g);
  const int local = tile - segment.first_tile;
  const Epilogue epilogue = linear.epilogue;
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

/// Parts of tile rows that several blocks share. The block that has the first adds the others, in the order of K, each as soon as its words are there, and marks their places as empty again.
/// Parts that continue a tile row are the first that their blocks compute, so they are seldom waited for.
template <int kColumns>
struct Parts {
  static constexpr int kCount = kColumns / 2, kWords = kCount / 4, kChunk = kWords < 4 ? kWords : 4, kTogether = kWords == 1 ? 4 : kWords <= 4 ? 2 : 1;  // sums of a thread; by fours; as many and blocks at a time
  float4* places;
  int rows, last, thread;

  /// `tile`: of which this block has the first part.
  __device__ Parts(const LinearLayer& linear, float* p, int num_rows, int tile, int grid)
      : places(reinterpret_cast<float4*>(p)), rows(num_rows), last(block_of(linear, static_cast<uint32_t>(tile + 1) * static_cast<uint32_t>(linear.k_blocks) - 1, grid)), thread(thread_here()) {}
  __device__ float4* place(int block, int word) const { return places + ((int64_t{block} * 2 + (thread >> 7)) * kWords + word) * 128 + (thread & 127); }
  /// Whether one of a word's rows is there. The sums of one that is not are left, too.
  __device__ bool is_real(int word) const { return word * 8 + (thread & 3) * 2 < rows; }
  __device__ void leave(const float (&acc)[kCount]) const {
#pragma unroll
    for (int word = 0; word < kWords; ++word)
      if (is_real(word)) __stcg(place(blockIdx.x, word), make_float4(acc[word * 4], acc[word * 4 + 1], acc[word * 4 + 2], acc[word * 4 + 3]));
  }
  __device__ void add_to(float (&acc)[kCount]) const {
#pragma unroll
    for (int first = 0; first < kWords; first += kChunk)
#pragma unroll 1
      for (int block = static_cast<int>(blockIdx.x) + 1; block <= last; block += kTogether) {
        float4 part[kTogether][kChunk];
        bool there;
        do {
          there = true;
#pragma unroll
          for (int b = 0; b < kTogether; ++b)
#pragma unroll
            for (int i = 0; i < kChunk; ++i)
              if (block + b <= last && is_real(first + i)) part[b][i] = load_relaxed(place(block + b, first + i));
#pragma unroll
          for (int b = 0; b < kTogether; ++b)
#pragma unroll
            for (int i = 0; i < kChunk; ++i)
              if (block + b <= last && is_real(first + i)) there = there && is_there(part[b][i]);
        } while (!there);
#pragma unroll
        for (int b = 0; b < kTogether; ++b)
#pragma unroll
          for (int i = 0; i < kChunk; ++i)
            if (block + b <= last && is_real(first + i)) {
              const float4& v = part[b][i];
              const float values[4] = {v.x, v.y, v.z, v.w}, nothing = __uint_as_float(kNothing);
#pragma unroll
              for (int j = 0; j < 4; ++j) acc[(first + i) * 4 + j] = __fadd_rn(acc[(first + i) * 4 + j], values[j]);
              __stcg(place(block + b, first + i), make_float4(nothing, nothing, nothing, nothing));
            }
      }
  }
};

// ---- the multiplying warpgroups ----

template <class At>
__device__ __forceinline__ void await_stage(const At& at, const RingPlace& ring) {
  barrier_wait(at.full(ring.stage), ring.parity);
  if constexpr (At::kPaced) barrier_wait(at.rows_full(ring.stage), ring.parity);
}

/// Tiles that are multiplied before the first of them is promoted: latencies overlap.
constexpr int kTogether = 4;

/// Adds the products of kCount tiles of e4m3 to acc, each promoted with its scales.
template <int kColumns, int kResident, int kCount>
__device__ __forceinline__ void multiply_e4m3(const Layout<kColumns, true, kResident>& at, float (&acc)[kColumns / 2], int k_blocks, int& slot, RingPlace& ring) {
  static_assert(kColumns <= 32, "linear_wide_sm90.cuh has more");
  const int group = threadIdx.x >> 7, lane = threadIdx.x & 31, q = lane & 3;
  float product[kCount][kColumns / 2];
  int stages[kCount], slots[kCount];
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    stages[i] = ring.stage;
    slots[i] = slot;
    await_stage(at, ring);
    const uint64_t a = operand(at.weight(ring.stage) + group * (kTileBytes / 2)), b = operand(kResident > 0 ? at.resident(slot) : at.rows(ring.stage));
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < 4; ++k) wgmma<kColumns, true>(product[i], a + k * 2, b + k * 2, k);
    wgmma_commit();
    ring.advance(at.stages);
    if (kResident > 0 && ++slot == k_blocks) slot = 0;
  }
  const auto promote = [&](int i) {
    const float2 scale = *reinterpret_cast<const float2*>(at.tile_scale(stages[i]));
    const float* x_scale = at.scales(kResident > 0 ? slots[i] : stages[i]) + q * 2;
#pragma unroll
    for (int j = 0; j < kColumns / 8; ++j) {
      const float2 x = *reinterpret_cast<const float2*>(x_scale + j * 8);
      float* sum = acc + j * 4;
      sum[0] = __fmaf_rn(product[i][j * 4], __fmul_rn(scale.x, x.x), sum[0]);
      sum[1] = __fmaf_rn(product[i][j * 4 + 1], __fmul_rn(scale.x, x.y), sum[1]);
      sum[2] = __fmaf_rn(product[i][j * 4 + 2], __fmul_rn(scale.y, x.x), sum[2]);
      sum[3] = __fmaf_rn(product[i][j * 4 + 3], __fmul_rn(scale.y, x.y), sum[3]);
    }
  };
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    wgmma_wait_for(kCount - 1 - i);
    settle(product[i]);
    promote(i);
    if (lane == 0) barrier_arrive(at.empty(stages[i]));
  }
}

/// Adds the products of `count` tiles of one tile row, the next ones of the ring, to acc.
template <int kColumns, bool kFp8, int kResident>
__device__ __forceinline__ void multiply(const Layout<kColumns, kFp8, kResident>& at, float (&acc)[kColumns / 2], int k_blocks, int count, int& slot, RingPlace& ring) {
  if constexpr (kFp8) {
    int i = 0;
    for (; i + kTogether <= count; i += kTogether) multiply_e4m3<kColumns, kResident, kTogether>(at, acc, k_blocks, slot, ring);
    for (; i < count; ++i) multiply_e4m3<kColumns, kResident, 1>(at, acc, k_blocks, slot, ring);
  } else {
    constexpr int kPart = kColumns < 128 ? kColumns : 128, kParts = kColumns / kPart;
    const int group = threadIdx.x >> 7, lane = threadIdx.x & 31;
    int before = 0;
    for (int i = 0; i < count; ++i) {  // a tile is free when the next one's products are under way
      await_stage(at, ring);
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

// ---- a launch for decode rows ----

/// Tiles of a block that are under way at most, where tiles have barriers of their own. Memory needs no more to run at its rate, and whatever else a block reads or writes would wait behind more.
constexpr int kUnderWay = 3;

template <bool kFp8>
__device__ __forceinline__ int rows_bytes(const DecodeArgs& args) { return args.x_rows * (kTileRowBytes + (kFp8 ? 4 : 0)); }
/// Block k of K of all rows.
template <int kColumns, bool kFp8>
__device__ __forceinline__ void copy_rows_of(const DecodeArgs& args, const Layout<kColumns, kFp8, false>& at, int k, int stage) {
  const int64_t row = int64_t{k} * args.x_rows;
  bulk_copy(at.rows(stage), static_cast<const char*>(args.x) + row * kTileRowBytes, args.x_rows * kTileRowBytes, at.rows_full(stage));
  if constexpr (kFp8) bulk_copy(shared_address(at.scales(stage)), args.x_scale + row, args.x_rows * 4, at.rows_full(stage));
}
/// What another thread does where stages have a barrier for rows: it brings the rows of every tile, once they are quantised.
template <int kColumns, bool kFp8>
__device__ __forceinline__ void copy_rows(const DecodeArgs& args, const Layout<kColumns, kFp8, false>& at) {
  const LinearLayer& linear = args.linear;
  DecodeWalk walk(linear);
  wait_for_predecessors();
  if (walk.left == 0) return;  // without waiting for more: the last of the others clears the counters
  if (linear.in != nullptr) await_arrivals(args.arrivals + kQuantisedAt, quantisers_of<kColumns, kFp8>(args, linear));
  fence_async_proxy_all();
  RingPlace ring;
  constexpr bool kSplit = Layout<kColumns, kFp8, 0>::kSplit;
  for (int copied = 0; walk.left > 0; ++copied) {
    const int row_stages = kSplit ? kRowStages : at.stages;
    if (copied >= row_stages) barrier_wait(kSplit ? at.rows_empty(ring.stage) : at.empty(ring.stage), ring.parity ^ 1);
    barrier_expect(at.rows_full(ring.stage), rows_bytes<kFp8>(args));
    copy_rows_of(args, at, walk.k, ring.stage);
    ring.advance(row_stages);
    next(walk, linear.k_blocks);
  }
}

/// What the copying thread of a block does: it keeps the ring filled with the block's piece of the list of tiles and, where nobody else brings them, the rows of each.
template <int kColumns, bool kFp8, int kResident>
class Copier {
  using At = Layout<kColumns, kFp8, kResident>;
  static constexpr bool kPaced = kResident > 0 || At::kPaced;

 public:
  __device__ Copier(const DecodeArgs& decode, const At& layout) : args(decode), linear(decode.linear), at(layout) {
    const uint32_t blocks = linear.blocks;
    if (blockIdx.x >= blocks) return;
    const uint32_t total = num_tiles(linear);
    unit = total * blockIdx.x / blocks;
    end = total * (blockIdx.x + 1) / blocks;
  }

  /// Makes the block's barriers. The first tiles are on their way before most of them are there, since memory idles while a block begins.
  __device__ void begin() {
    at.init_stages(0, kUnderWay, 1);
    copy_first();
    at.init_barriers(1, kUnderWay);
  }
  /// The first tiles, whose stages are empty.
  __device__ void copy_first() {
    for (int i = 0; i < kUnderWay && unit < end; ++i) copy_tile();
    // The next launch's blocks cannot begin before this one's leave their shared memory, all of which they have, and they leave after their predecessors have finished; so this says it at once.
    launch_dependents();
  }
  /// The others. `finishes`: once rows are on their way nobody else of the block looks at the counters, which need not be waited for in the end then.
  __device__ void copy_rest(bool finishes = false) {
    if constexpr (kResident > 0) {
      if (linear.norm != nullptr) {
        barrier_expect(at.norm_full(), linear.k_blocks * 512);
        bulk_copy(shared_address(at.norm()), linear.norm, linear.k_blocks * 512, at.norm_full());
      }
    }
    if constexpr (kPaced) {
      while (unit < end) await_and_copy_tile();
    } else {
      int k = static_cast<int>((unit - copied) % static_cast<uint32_t>(linear.k_blocks));
      RingPlace behind;
      const auto copy_rows_behind = [&] {
        copy_rows_of(args, at, k, behind.stage);
        behind.advance(at.stages);
        if (++k == linear.k_blocks) k = 0;
      };
      while (unit < end && copied < at.stages) await_and_copy_tile();
      wait_for_predecessors();
      // A block without tiles must not wait: the last of the others clears the counters.
      if (linear.in != nullptr && copied > 0) await_arrivals(args.arrivals + kQuantisedAt, static_cast<int>(gridDim.x));
      fence_async_proxy_all();
      for (int i = copied; i > 0; --i) copy_rows_behind();
      if (finishes) finish_with(args.arrivals);
      while (unit < end) {
        await_and_copy_tile();
        copy_rows_behind();
      }
    }
  }

 private:
  __device__ void copy_tile() {
    const uint32_t full = at.full(ring.stage);
    barrier_expect(full, kTileBytes + (kFp8 ? 16 : 0) + (kPaced ? 0 : rows_bytes<kFp8>(args)));
    bulk_copy_once(at.weight(ring.stage), static_cast<const char*>(linear.weight) + int64_t{unit} * kTileBytes, kTileBytes, full);
    if constexpr (kFp8) bulk_copy(at.tile_scale_address(ring.stage), linear.scale + int64_t{unit} * kTileScales, 16, full);
    ring.advance(at.stages);
    ++unit;
    ++copied;
  }
  __device__ void await_and_copy_tile() {
    if (copied >= at.stages) barrier_wait(at.empty(ring.stage), ring.parity ^ 1);
    if constexpr (kPaced) {
      barrier_wait(at.full(under_way.stage), under_way.parity);
      under_way.advance(at.stages);
    }
    if constexpr (At::kPaced)
      while (load_shared_word(at.quantising()) != 0) {}  // what the others read and write, and the fence behind it, would wait behind this tile (decision 0048)
    copy_tile();
  }

  const DecodeArgs& args;
  const LinearLayer& linear;
  const At& at;
  uint32_t unit = 0, end = 0;  // of the list of tiles
  int copied = 0;
  RingPlace ring, under_way;  // of the next tile; of the first that may not have come
};

/// Whether the copying thread of this block is the last that looks at the counters: it has rows to copy, and no consumer waits for all of them.
__device__ __forceinline__ bool copier_finishes(const LinearLayer& linear) {
  return static_cast<int>(blockIdx.x) < linear.blocks && (linear.side.weight == nullptr || linear.side.blocks > 0);
}
/// What the copying thread does where this block multiplies side rows alone.
template <int kColumns, bool kFp8>
__device__ __forceinline__ void copy_side(const DecodeArgs& args, const SideShare& share, const SideStages<kColumns, kFp8>& at) {
  launch_dependents();
  wait_for_predecessors();
  if (share.which >= share.slices) return;  // without waiting for more: the last of the others clears the counters
  await_arrivals(args.arrivals + kQuantisedAt, static_cast<int>(gridDim.x));
  fence_async_proxy_all();
  const SideRows& side = args.linear.side;
  const int blocks = kFp8 ? args.linear.k_blocks : args.linear.k_blocks / 2, of_rows = args.x_rows * kTileRowBytes, of_b = share.groups_b * 8 * kTileRowBytes, of_a = share.half_bytes() - of_b;
  const char *weight = static_cast<const char*>(side.weight), *rows = static_cast<const char*>(kFp8 ? args.x16 : args.x);
  RingPlace ring;
  int copied = 0;
  for (int slice = share.which; slice < share.slices; slice += side.blocks)
    for (int block = slice * kSideSlice; block < min((slice + 1) * kSideSlice, blocks); ++block, ++copied) {
      if (copied >= at.count()) barrier_wait(at.empty(ring.stage), ring.parity ^ 1);
      const uint32_t full = at.full(ring.stage);
      uint32_t to = at.address(ring.stage);
      const auto copy = [&](const void* from, int bytes) {
        bulk_copy(to, from, bytes, full);
        to += bytes;
      };
      barrier_expect(full, 2 * (of_rows + of_b + of_a));
      copy(rows + int64_t{2 * block} * of_rows, 2 * of_rows);
      for (int half = 0; half < 2; ++half) {
        copy(weight + int64_t{2 * block + half} * kTileBytes, of_b);
        copy(weight + int64_t{2 * blocks + 2 * block + half} * kTileBytes, of_a);
      }
      ring.advance(at.count());
    }
}

/// The copying warp's part of a launch. The others wait for the barriers that it makes, by await_barriers.
template <int kColumns, bool kFp8, int kResident>
__device__ __forceinline__ void copy_tiles(const DecodeArgs& args, const Layout<kColumns, kFp8, kResident>& at) {
  Copier<kColumns, kFp8, kResident> copier(args, at);
  if (threadIdx.x == kConsumers) copier.begin();
  __syncwarp();
  named_arrive<0, kThreads>();
  if (threadIdx.x == kConsumers) copier.copy_rest();
}
template <int kColumns, bool kFp8>
__device__ __forceinline__ void copy_tiles_and_rows(const DecodeArgs& args, const Layout<kColumns, kFp8, false>& at) {
  if (const SideShare share(args.linear.side, kFp8 ? args.linear.k_blocks : args.linear.k_blocks / 2); share.is_mine()) {
    copy_side(args, share, SideStages<kColumns, kFp8>{at});
    return;
  }
  Copier<kColumns, kFp8, false> copier(args, at);
  copier.copy_first();
  copier.copy_rest(copier_finishes(args.linear));
}
__device__ __forceinline__ void await_barriers() { named_barrier<0, kThreads>(); }
/// The warps' that neither copy tiles nor multiply them: side rows and, where stages have a barrier for them, copies of rows.
template <int kColumns, bool kFp8>
__device__ __forceinline__ void help(const DecodeArgs& args, const Layout<kColumns, kFp8, false>& at) {
  if (threadIdx.x < kConsumers + 32 + kSideHelpers) help_with_side_rows<kFp8, kSideHelpers / 32>(args, quantisers_of<kColumns, kFp8>(args, args.linear));
  else if (threadIdx.x == kConsumers + 32 + kSideHelpers) copy_rows(args, at);
}

template <int kColumns, bool kFp8, int kResident>
__device__ __forceinline__ void multiply_decode(const DecodeArgs& args, const Layout<kColumns, kFp8, kResident>& at) {
  const LinearLayer& linear = args.linear;
  DecodeWalk walk(linear);
  RingPlace ring;
  constexpr bool kInTurn = ResidentRows<kResident>::kInTurn;
  ResidentRows<kResident> rows;
  int filled = 0;  // blocks of K that are met and can be multiplied
  if constexpr (kResident > 0) {
    rows = {args, linear, walk.k};
    wait_for_predecessors();
    rows.load(args, linear, at);
    if constexpr (!kInTurn) rows.put(linear, at, 0);
  } else {
    const auto ahead = ahead_for<kColumns, kFp8>(args, linear);
    wait_for_predecessors();
    quantise_and_arrive(args, linear, at, ahead);
  }
  int slot = 0;
  while (walk.left > 0) {
    float acc[kColumns / 2] = {};
    const int begin = walk.k, count = min(linear.k_blocks - begin, walk.left);
    constexpr bool kEarly = kColumns <= 32;  // with registers to spare
    uint32_t before[kEarly ? kColumns / 4 : 1] = {};
    if constexpr (kEarly)
      if (begin == 0) load_residual<kColumns>(linear, walk.tile, args.rows, before);
    int left = count;
    do {
      int now = left;
      if constexpr (kInTurn) {
        if (slot == filled && filled < args.resident_blocks) filled = rows.put(linear, at, filled);
        if (filled < args.resident_blocks) now = min(left, filled - slot);  // a piece passes the last block of K only once all are filled
      }
      multiply<kColumns, kFp8, kResident>(at, acc, linear.k_blocks, now, slot, ring);
      left -= now;
    } while (kInTurn && left > 0);
    const Parts<kColumns> parts(linear, args.parts, args.rows, walk.tile, walk.grid);
    if (begin > 0) {
      parts.leave(acc);
    } else {
      if (count < linear.k_blocks) parts.add_to(acc);
      store_tile<kColumns>(linear, acc, walk.tile, 0, args.rows, kEarly ? before : nullptr);
    }
    walk.left -= count;
    walk.next_tile();
  }
  if constexpr (!kHasHelpers<kColumns>) side_rows_of_consumers<kColumns, kFp8>(args, linear);
  else if (linear.side.weight != nullptr) named_barrier<6, kConsumers + (kResident > 0 ? kHelpers : kSideHelpers)>();
  if constexpr (kResident == 0) {
    consumer_barrier();
    if (threadIdx.x == 0) finish_with(args.arrivals);
  }
}

template <int kColumns, bool kFp8, int kResident>
__device__ __forceinline__ void run_decode(const DecodeArgs& args) {
  extern __shared__ char raw[];
  const Layout<kColumns, kFp8, kResident> at(raw, args.stages, kResident > 0 ? args.resident_blocks : 0, kResident > 0 ? args.norm_floats : 0);
  const int warp = static_cast<int>(threadIdx.x) / 32;
  if constexpr (!kHasHelpers<kColumns>) {
    if (warp < kConsumers / 32) more_registers<240>();
    else fewer_registers<24>();
  }
  if (warp == kConsumers / 32) {
    copy_tiles(args, at);
    return;
  }
  await_barriers();
  if (warp < kConsumers / 32) multiply_decode(args, at);
  else if constexpr (kResident > 0) help_resident(args, at);
  else if constexpr (kHasHelpers<kColumns>) help(args, at);
}

#define QUERN_DECODE(name, columns, fp8, resident)                                                          \
  extern "C" __global__ void __launch_bounds__(kThreads, 1) name(const __grid_constant__ DecodeArgs args) { \
    run_decode<columns, fp8, resident>(args);                                                               \
  }

}  // namespace quern::cuda::sm90
