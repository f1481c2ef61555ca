#include "backends/cuda/attention_args.h"
#include "backends/cuda/attention_tile.cuh"

// Attention of decode rows with matrix instructions: bf16 queries, heads of 256 elements, KV in bf16 or e4m3. A job is a kv head of a few rows of a run; the tiles of 64 keys of all jobs stand in
// one line, of which a block takes an even share, so that no block has more to read than another, whatever the contexts are. A tile has a maximum of its own; tiles are merged in order to parts of
// 512 keys and parts to rows, whoever computes them: a block that begins a part merges what it has of it, one that goes on with a part leaves each tile to attention_merge, and jobs that no
// block has as a whole are finished there.
//
// Where whole jobs make the shares as even, blocks take these and nothing is left to merge. Nor is it where sequences are many, for then blocks hand on what they share (a relay): a block
// computes first what it has of its last part, with which the next block goes on, and last the end of a job that another block began, whose parts it then merges.
//
// Of a tile a warp copies 16 keys and then values through a ring of its own, and copies are under way all the time. Of bf16 these are 64 elements of all values, which it multiplies itself, so that
// copies wait for no other warp. Of codes that would be rows of 64 bytes: there it copies the values of its keys, and all warps read each other's, between barriers that are there for the weights.

namespace quern::cuda {

namespace {

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
constexpr bool kHopper = true;
#else
constexpr bool kHopper = false;
#endif
constexpr int kTilesPerPart = static_cast<int>(kKvSplit) / kKeys;
constexpr int kThreads = 128, kWarps = kThreads / 32;
constexpr int kWarpKeys = kKeys / kWarps, kWarpDims = kDim / kWarps;
constexpr int kSliceBytes = 4096;
constexpr int kRanges = 4;  // of a share, in the order in which they are computed
constexpr int kMaxHeads = static_cast<int>(kMaxDecodeHeads);

/// weight(), without a branch.
__device__ float weight_of(float x, float max) {
  float y = expf(x - max);
  asm volatile("" : "+f"(y));  // whatever x is
  return x == -INFINITY ? 0.0f : y;
}
/// What a tile, or a part, adds to what came before it: the operations and their order are the same wherever it is computed.
__device__ float merged(float before, float before_weight, float now, float now_weight) { return fmaf(now, now_weight, __fmul_rn(before, before_weight)); }

/// A run of decode rows. Its tiles are those of its groups of rows, and of a group those of kv head after kv head.
struct Run {
  int32_t number, slot, first_row, num_rows;
  int32_t index;     // of the first row
  int32_t end;       // what stands from this index on belongs to padding; known once predecessors have ended
  int32_t position;  // of its first tile among all
};

__device__ int first_tile(const AttentionArgs& args) { return args.first_index / kKeys; }
/// Tiles up to index `last`; at least one.
__device__ int tiles_up_to(const AttentionArgs& args, int last) { return max(1, last / kKeys - first_tile(args) + 1); }
/// The index of the last row of a group.
__device__ int last_of_group(const AttentionArgs& args, const Run& run, int group) { return run.index + min(run.num_rows, (group + 1) * args.rows_per_group) - 1; }

/// Whether rows stand where the cursors say before the predecessors of the launch have ended: true of the model's layers, whose step moves cursors after them; the MTP layer follows a sampler.
__device__ bool knows_positions(const AttentionArgs& args) { return args.first_index == 0; }

__device__ bool has_jobs(const RunRecord& run) { return run.slot >= 0 && (run.flags & kIsDecode) != 0 && run.num_rows > 0; }
/// Reads a run and counts its tiles, those of padding too; 0: it has nothing to do.
__device__ int read_run(const AttentionArgs& args, int number, Run& out) {
  const RunRecord run = args.step.runs[number];
  if (!has_jobs(run)) return 0;
  out = {number, run.slot, run.first_row, run.num_rows, knows_positions(args) ? args.step.cursor[run.slot] : max(0, args.step.indices[run.first_row]), 0, 0};
  int tiles = 0;
  for (int group = 0; group * args.rows_per_group < run.num_rows; ++group) tiles += tiles_up_to(args, last_of_group(args, out, group));
  return tiles * args.num_kv_heads;
}
__device__ int end_of(const AttentionArgs& args, const Run& run) {
  int rows = run.num_rows;  // padding stands at the end
  while (rows > 0 && args.step.indices[run.first_row + rows - 1] < 0) --rows;
  return rows > 0 ? run.index + rows : 0;
}

/// Where blocks may begin: at any tile, or only where a part begins, or a job. What stands between needs room for results of its own. In a relay blocks begin at any tile, and what they begin
/// in the middle of a part they take over.
enum Cuts : int32_t { kCutTiles, kCutParts, kCutJobs, kRelay };

/// How `total` tiles are cut among blocks.
struct Shares {
  int total, blocks;
  Cuts cuts;
  __device__ Shares(const AttentionArgs& args, int total, int num_blocks, bool relays = false) : total(total) {
    if (relays) {
      blocks = max(1, min(num_blocks, total / kTilesPerPart));  // a part is of two blocks at most
      cuts = total / kTilesPerPart + 2 * args.num_jobs <= args.max_slots ? kRelay : kCutJobs;
      return;
    }
    blocks = total <= num_blocks / 2 ? num_blocks / 2 : num_blocks;  // a tile a multiprocessor
    cuts = total <= args.max_slots ? kCutTiles : total / kTilesPerPart + 2 * args.num_jobs <= args.max_slots ? kCutParts : kCutJobs;
  }
  /// Where the share of a block begins; not moved to where it may.
  [[nodiscard]] __device__ int begin(int block) const { return block >= blocks ? total : static_cast<int>(int64_t{total} * block / blocks); }
  /// With kCutTiles or kRelay: whose share tile `tile` belongs to, and where that share ends.
  [[nodiscard]] __device__ int block_of(int tile) const { return static_cast<int>((static_cast<uint32_t>(tile + 1) * static_cast<uint32_t>(blocks) - 1) / static_cast<uint32_t>(total)); }
  [[nodiscard]] __device__ int end_of_share(int tile) const {
    const int block = block_of(tile) + 1;
    return block >= blocks ? total : static_cast<int>(static_cast<uint32_t>(total) * static_cast<uint32_t>(block) / static_cast<uint32_t>(blocks));
  }
};
/// Where the result of a part is left, or with kCutTiles that of a tile, of a job that begins with tile `position`.
__device__ int slot_of(const Shares& shares, int job, int position, int tile, int tile_of_job) {
  return shares.cuts == kCutTiles ? position + tile - tile_of_job : position / kTilesPerPart + 2 * job + tile / kTilesPerPart - tile_of_job / kTilesPerPart;
}

/// The table of AttentionArgs::heads.
struct Heads {
  int16_t table[2 * kMaxHeads + 1];
  __device__ void read(const AttentionArgs& args, int thread, int num_threads) {
    for (int i = thread; i <= args.num_kv_heads + args.num_q_heads; i += num_threads) table[i] = static_cast<int16_t>(args.heads[i]);
  }
  [[nodiscard]] __device__ int count(int kv_head) const { return table[kv_head + 1] - table[kv_head]; }
  [[nodiscard]] __device__ int head(int kv_head, int number) const { return table[table[kv_head] + number]; }
};

template <int kColumns, bool kCodes, bool kRelays>
struct Shared {
  static constexpr int kRingSlices = decode_ring_slices(kColumns, kCodes, kHopper);
  unsigned char ring[kWarps][kRingSlices][kSliceBytes];
  unsigned char q[kColumns * kDim * 2];
  static constexpr int kAtOnce = kRelays && !kCodes ? 2 : 1;  // tiles between the scores and the values
  unsigned char p[kAtOnce][kColumns * kKeys * 2];
  float tile_max[kAtOnce][kWarps][kColumns], tile_sum[kAtOnce][kWarps][kColumns], query_scale[kColumns];
  static constexpr int kWindow = kRelays ? 64 : 16;  // runs that a block knows at a time
  Run window[kWindow];
  int32_t sums[kWarps], counts[kWarps], num_runs, end, cuts[2], ranges[kRanges][2];
  Heads heads;
};

/// Goes through the tiles of some ranges of a share, job after job in each.
struct Walk {
  const AttentionArgs& args;
  const Run* const window;
  const int32_t (*const ranges)[2];  // [kRanges]: begin and end
  int num_runs;           // in the window
  int range, left;        // tiles of the range from this one on; 0: there are no more ranges either
  int run, group, head;   // run: in the window
  int tile, end, last;    // of the job: this tile, the one after the last of this range, the last of the job
  int position;           // of the job's first tile

  __device__ Walk(const AttentionArgs& args, const Run* window, int num_runs, const int32_t (*ranges)[2])
      : args(args), window(window), ranges(ranges), num_runs(num_runs), range(-1), left(0), run(0), group(0), head(0), tile(0), end(0), last(0), position(0) {
    next_range();
  }
  /// To a tile of the window, with `count` to go.
  __device__ Walk(const AttentionArgs& args, const Run* window, int num_runs, int at, int count)
      : args(args), window(window), ranges(nullptr), num_runs(num_runs), range(kRanges), left(count), run(0), group(0), head(0), tile(0), end(0), last(0), position(0) {
    if (left > 0) seek(at);
  }
  __device__ void next_range() {
    while (left == 0 && ++range < kRanges) left = ranges[range][1] - ranges[range][0];
    if (left > 0) seek(ranges[range][0]);
  }
  __device__ void seek(int to) {
    run = group = 0;
    while (run + 1 < num_runs && window[run + 1].position <= to) ++run;
    for (position = window[run].position;; ++group) {
      const int tiles = tiles_up_to(args, last_of_group(args, window[run], group)), at = to - position;
      if (at < tiles * args.num_kv_heads) {
        head = at / tiles;
        position += head * tiles;
        begin_job(at % tiles);
        return;
      }
      position += tiles * args.num_kv_heads;
    }
  }
  __device__ void begin_job(int at) {
    last = first_tile(args) + tiles_up_to(args, last_of_group(args, window[run], group)) - 1;
    tile = first_tile(args) + at;
    end = min(last + 1, tile + left);
  }
  [[nodiscard]] __device__ int end_of_job() const { return position + last - first_tile(args) + 1; }  // as position is
  /// To the next tile; true: of the same job and range.
  __device__ bool advance() {
    --left;
    if (++tile < end) return true;
    next_job();
    return false;
  }
  __device__ void skip_job() {
    left -= end - tile;
    next_job();
  }
  __device__ void next_job() {
    if (left == 0) return next_range();
    position = end_of_job();
    if (++head == args.num_kv_heads) {
      head = 0;
      if (++group * args.rows_per_group >= window[run].num_rows) {
        group = 0;
        ++run;
      }
    }
    begin_job(0);
  }
};

__device__ int warp_scan(int x, int lane) {
  for (int distance = 1; distance < 32; distance *= 2) {
    const int other = __shfl_up_sync(kAllLanes, x, static_cast<unsigned>(distance));
    if (lane >= distance) x += other;
  }
  return x;
}

/// Calls visit(tiles, run) for kThreads runs at a time, whose positions are known; all threads. Returns all tiles.
template <class Memory, class Visit>
__device__ int for_runs(const AttentionArgs& args, Memory& s, const Visit& visit) {
  const int thread = static_cast<int>(threadIdx.x), warp = thread / 32, lane = thread % 32;
  int before = 0;
  for (int first = 0; first < args.step.num_runs; first += kThreads) {
    Run run{};
    const int tiles = first + thread < args.step.num_runs ? read_run(args, first + thread, run) : 0;
    const int reached = warp_scan(tiles, lane);
    __syncthreads();
    if (lane == 31) s.sums[warp] = reached;
    __syncthreads();
    int position = before + reached - tiles;
    for (int w = 0; w < kWarps; ++w) {
      if (w < warp) position += s.sums[w];
      before += s.sums[w];
    }
    run.position = position;
    visit(tiles, run);
  }
  return before;
}

/// A block leaves a part and says so by a flag that the next one awaits and clears. Blocks are dealt in order, so that one that is awaited has begun, and waits for none behind it.
__device__ void hand_on(int32_t* flag) { asm volatile("st.release.gpu.global.s32 [%0], 1;" ::"l"(flag) : "memory"); }
__device__ void take_over(int32_t* flag) {
  int32_t there = 0;
  do asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(there) : "l"(flag) : "memory");
  while (there == 0);
  *flag = 0;
}

/// What another block has written in this launch.
__device__ float read_left(const float* from) {
  float x;
  asm volatile("ld.relaxed.gpu.global.f32 %0, [%1];" : "=f"(x) : "l"(from) : "memory");
  return x;
}
__device__ float4 read_left(const float4* from) {
  float4 x;
  asm volatile("ld.relaxed.gpu.global.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w) : "l"(from) : "memory");
  return x;
}
__device__ float2 read_left(const float2* from) {
  float2 x;
  asm volatile("ld.relaxed.gpu.global.v2.f32 {%0, %1}, [%2];" : "=f"(x.x), "=f"(x.y) : "l"(from) : "memory");
  return x;
}

/// Combines a number of each thread, in every thread.
template <class Memory, class Combine>
__device__ int all_threads(Memory& s, int x, const Combine& combine) {
  const int thread = static_cast<int>(threadIdx.x);
  for (int distance = 16; distance > 0; distance /= 2) x = combine(x, __shfl_xor_sync(kAllLanes, x, distance));
  __syncthreads();
  if (thread % 32 == 0) s.counts[thread / 32] = x;
  __syncthreads();
  x = s.counts[0];
  for (int w = 1; w < kWarps; ++w) x = combine(x, s.counts[w]);
  return x;
}

/// The nearest place to tile `at` of a run where a share may begin.
__device__ int nearest_cut(const AttentionArgs& args, const Run& run, Cuts cuts, int at) {
  int position = run.position;
  for (int group = 0;; ++group) {
    const int tiles = tiles_up_to(args, last_of_group(args, run, group));
    if (at >= position + tiles * args.num_kv_heads) {
      position += tiles * args.num_kv_heads;
      continue;
    }
    position += (at - position) / tiles * tiles;
    int lower = 0, upper = tiles;
    if (cuts == kCutParts) {
      const int part = (first_tile(args) + at - position) / kTilesPerPart * kTilesPerPart - first_tile(args);
      lower = max(0, part);
      upper = min(tiles, part + kTilesPerPart);
    }
    return position + (at - position - lower < upper - (at - position) ? lower : upper);
  }
}

/// Fills the window with the runs that have tiles from `begin` on, up to `end`; returns the end of what they have. All threads.
template <class Memory>
__device__ int fill_window(const AttentionArgs& args, Memory& s, int begin, int end) {
  const int thread = static_cast<int>(threadIdx.x), warp = thread / 32, lane = thread % 32;
  int known = 0;
  __syncthreads();
  if (thread == 0) s.end = end;
  for_runs(args, s, [&](int tiles, const Run& run) {
    const bool wanted = tiles > 0 && run.position < end && run.position + tiles > begin;
    const unsigned all = __ballot_sync(kAllLanes, wanted);
    if (lane == 0) s.counts[warp] = __popc(all);
    __syncthreads();
    int place = known + __popc(all & ((1u << lane) - 1));
    for (int w = 0; w < kWarps; ++w) {
      if (w < warp) place += s.counts[w];
      known += s.counts[w];
    }
    if (!wanted) return;
    if (place < Memory::kWindow) s.window[place] = run;
    if (place == Memory::kWindow) s.end = run.position;
  });
  if (thread == 0) s.num_runs = min(known, Memory::kWindow);
  __syncthreads();
  return s.end;
}

__device__ uint32_t two_half(float low, float high) {
  const __half2 two = __floats2half2_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&two);
}
/// Four codes as f16, exactly: the lower two and the upper two.
__device__ void halves_of_codes(uint32_t& low, uint32_t& high, uint32_t codes) {
#if __CUDA_ARCH__ >= 890
  asm("{\n .reg .b16 l, h;\n mov.b32 {l, h}, %2;\n cvt.rn.f16x2.e4m3x2 %0, l;\n cvt.rn.f16x2.e4m3x2 %1, h;\n}" : "=r"(low), "=r"(high) : "r"(codes));  // without shifts
#else
  const auto two = [](uint32_t pair) {
    const __half2_raw halves = __nv_cvt_fp8x2_to_halfraw2(static_cast<__nv_fp8x2_storage_t>(pair), __NV_E4M3);
    return static_cast<uint32_t>(halves.x) | static_cast<uint32_t>(halves.y) << 16;
  };
  low = two(codes & 0xffff);
  high = two(codes >> 16);
#endif
}
/// As multiply_add, of f16.
__device__ void multiply_add_half(float (&sum)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
               : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

/// A warp's slices of tiles in its ring and how they become operands: of bf16 half of its keys' elements, then the others, half of the keys with its elements of their values, then the others; of
/// codes its keys, then their values. Codes are widened to f16 in registers, exactly, and meet queries and weights in f16. Products with queries take elements in the order in which a lane finds them in a row of
/// codes: of 16 elements 4 (lane % 4) to 4 (lane % 4) + 3.
template <bool kCodes, int kRingBytes>
struct Slices {
  static constexpr int kElementBytes = kCodes ? 1 : 2, kOfKeys = kCodes ? 1 : 2;  // slices of a tile's keys, and of its values
  static constexpr int kSteps = kDim / 32 / kOfKeys, kKeySteps = kKeys / 32 / kOfKeys;  // of 32 elements or keys, in a slice
  static constexpr int kKeyPieces = 16;  // of 16 bytes, in a row of a slice of keys

  // In 128 bytes the 16-byte pieces of a row are permuted by the row, so that 8 rows of one piece lie in different banks. `lane_piece` is a lane's piece and its row's permutation, both times 16;
  // `piece`, which all lanes have in common, is added to it.
  static __device__ uint32_t place(int lane_piece, int piece) { return static_cast<uint32_t>((lane_piece ^ piece % 8 * 16) + piece / 8 * 128); }

  /// Begins to copy slice `number` of the warp's keys of a tile; rows outside [begin, end) become zero, since what stands in their place may be no number.
  static __device__ void copy_keys(unsigned char* to, const unsigned char* tile, int number, int warp, int lane, int begin, int end) {
    const int row = lane / kKeyPieces, key = warp * kWarpKeys + row;
    const unsigned char* from = tile + key * kDim * kElementBytes + (number * kKeyPieces + lane % kKeyPieces) * 16;
    if (begin == 0 && end == kKeys) {  // without a condition for every row
#pragma unroll
      for (int i = 0; i < kSliceBytes / 512; ++i) copy_async(to + i * 512 + ((lane ^ row) * 16 ^ i * 2 % 8 * 16), from + i * 2 * kDim * kElementBytes);
      return;
    }
#pragma unroll
    for (int i = 0; i < kSliceBytes / 512; ++i)
      copy_async(to + i * 512 + ((lane ^ row) * 16 ^ i * 2 % 8 * 16), from + i * 2 * kDim * kElementBytes, key + i * 2 >= begin && key + i * 2 < end);
  }
  static __device__ void copy_values(unsigned char* to, const unsigned char* tile, int number, int warp, int lane, int begin, int end) {
    if constexpr (kCodes) {
      copy_keys(to, tile, number, warp, lane, begin, end);
    } else {
      constexpr int kValuePieces = kWarpDims * kElementBytes / 16, kRows = 32 / kValuePieces;  // of a row of the slice, and rows at a time
      const int row = lane / kValuePieces, key = number * kKeySteps * 32 + row;
      const unsigned char* from = tile + key * kDim * kElementBytes + (warp * kValuePieces + lane % kValuePieces) * 16;
      if (begin == 0 && end == kKeys) {
#pragma unroll
        for (int i = 0; i < kSliceBytes / 512; ++i) copy_async(to + i * 512 + ((lane ^ row) * 16 ^ i * kRows % 8 * 16), from + i * kRows * kDim * kElementBytes);
        return;
      }
#pragma unroll
      for (int i = 0; i < kSliceBytes / 512; ++i)
        copy_async(to + i * 512 + ((lane ^ row) * 16 ^ i * kRows % 8 * 16), from + i * kRows * kDim * kElementBytes, key + i * kRows >= begin && key + i * kRows < end);
    }
  }
  /// 16 keys by 32 elements, from element 32 `step` of the slice on, as two operands.
  static __device__ void keys(uint32_t (&a)[2][4], uint32_t slice, int step, int lane) {
    const uint32_t row = slice + static_cast<uint32_t>(lane % 16 * kKeyPieces * 16);
    const int lane_piece = (lane / 16 ^ (lane & 7)) * 16;
    if constexpr (kCodes) {
      uint32_t codes[4];
      load_matrices(codes, row + place(lane_piece, 2 * step));
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        halves_of_codes(a[i / 2][i % 2], a[i / 2][i % 2 + 2], codes[i]);
      }
    } else {
#pragma unroll
      for (int i = 0; i < 2; ++i) load_matrices(a[i], row + place(lane_piece, 4 * step + 2 * i));
    }
  }
  /// 16 elements by 32 keys, from element 16 `m` of the warp's and key 32 `step` of the slice on, as two operands; rows are elements, in the order of `dim`.
  static __device__ void values(uint32_t (&a)[2][4], uint32_t slice, int m, int step, int warp, int lane) {
    if constexpr (kCodes) {
      uint32_t codes[4];
      // Of a row of 256 elements the warp has the pieces from 4 warp on; `slice` is of the first warp, another's lies kRingBytes behind it.
      load_matrices_transposed(codes, slice + static_cast<uint32_t>((step * 2 + lane / 16) * kRingBytes + lane % 16 * kDim + warp / 2 * 128 + ((lane % 8 ^ warp % 2 * 4) * 16 ^ m * 16)));
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const uint32_t pairs = __byte_perm(codes[i], 0, 0x3120);  // a lane has two elements of two keys
        halves_of_codes(a[i / 2][i % 2 * 2], a[i / 2][i % 2 * 2 + 1], pairs);
      }
    } else {
      const uint32_t row = slice + static_cast<uint32_t>((step * 32 + lane / 16 * 8 + lane % 8) * 128);
#pragma unroll
      for (int i = 0; i < 2; ++i) load_matrices_transposed(a[i], row + static_cast<uint32_t>(i * 16 * 128) + place((lane / 8 % 2 ^ lane % 8) * 16, 2 * m));
    }
  }
  /// Of 16 elements that of a lane's sums 0 and 1 (half 0) or 2 and 3.
  static __device__ int dim(int lane, int half) { return kCodes ? lane / 4 * 2 + half : lane / 4 + half * 8; }
  /// 32 elements of 8 queries, whose rows begin at row `first` (a multiple of 8), in the order of `keys`.
  static __device__ void queries(uint32_t (&b)[2][2], const unsigned char* q, int first, int step, int lane) {
    if constexpr (kCodes) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const uint2 four = *reinterpret_cast<const uint2*>(q + (first + lane / 4) * kDim * 2 + lane % 2 * 8 + place((lane % 4 / 2 ^ lane / 4) * 16, 4 * step + 2 * i));
        b[i][0] = four.x;
        b[i][1] = four.y;
      }
    } else {
      uint32_t all[4];
      load_matrices(all, shared_address(q) + static_cast<uint32_t>((first + lane % 8) * kDim * 2) + place((lane / 8 ^ lane % 8) * 16, 4 * step));
#pragma unroll
      for (int i = 0; i < 4; ++i) b[i / 2][i % 2] = all[i];
    }
  }
  /// Eight of a query's elements as they meet the keys. In f16 the largest of the query becomes 1 to 2; returns what scores are to be multiplied with. All lanes of a warp, which have the query.
  static __device__ float convert_query(uint4& bits) {
    if constexpr (kCodes) {
      uint32_t* const words = &bits.x;
      uint32_t largest = 0;
#pragma unroll
      for (int i = 0; i < 4; ++i) largest = max(largest, max(words[i] & 0x7fff, words[i] >> 16 & 0x7fff));
      largest = __reduce_max_sync(kAllLanes, largest);
      const uint32_t exponent = largest >> 7 == 0 ? 127 : min(largest >> 7, 253u);
      const float up = __uint_as_float(exponent << 23), down = __uint_as_float((254 - exponent) << 23);
#pragma unroll
      for (int i = 0; i < 4; ++i) words[i] = two_half(__uint_as_float(words[i] << 16) * down, __uint_as_float(words[i] & 0xffff0000u) * down);
      return up;
    } else {
      return 1.0f;
    }
  }
  static __device__ uint32_t two_weights(float low, float high) { return kCodes ? two_half(low, high) : bf16_pair(low, high); }
  static __device__ void multiply(float (&sum)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    if constexpr (kCodes) multiply_add_half(sum, a, b0, b1);
    else multiply_add(sum, a, b0, b1);
  }
};

/// A result in progress, of a lane's columns: values as matrix instructions leave them, by 16 elements of the warp's, and the maximum and sum that belong to them.
template <int kMatrices>
struct State {
  static constexpr int kElements = kWarpDims / 16;
  float values[kElements][kMatrices][4], max[kMatrices][2], sum[kMatrices][2];
  __device__ void clear() {
#pragma unroll
    for (int t = 0; t < kMatrices; ++t) {
#pragma unroll
      for (int m = 0; m < kElements; ++m)
#pragma unroll
        for (int e = 0; e < 4; ++e) values[m][t][e] = 0;
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        max[t][e] = -INFINITY;
        sum[t][e] = 0;
      }
    }
  }
};

/// What a merge multiplies a lane's columns with.
template <int kMatrices>
struct Factors {
  float before[kMatrices][2], now[kMatrices][2];
  /// Merges maximum and sum, and keeps the factors for the values.
  __device__ void merge(State<kMatrices>& state, const float (&max)[kMatrices][2], const float (&sum)[kMatrices][2]) {
#pragma unroll
    for (int t = 0; t < kMatrices; ++t)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const float new_max = fmaxf(state.max[t][e], max[t][e]);
        before[t][e] = weight_of(state.max[t][e], new_max);
        now[t][e] = weight_of(max[t][e], new_max);
        state.sum[t][e] = merged(state.sum[t][e], before[t][e], sum[t][e], now[t][e]);
        state.max[t][e] = new_max;
      }
  }
  __device__ void merge_values(float (&values)[4], int t, const float (&added)[4]) const {
#pragma unroll
    for (int e = 0; e < 4; ++e) values[e] = merged(values[e], before[t][e % 2], added[e], now[t][e % 2]);
  }
};

/// Merges the parts of a job in order and gates it, by all threads of a block, each of which has four elements at a time. Not inline: the loop over tiles has no registers to spare.
__device__ __noinline__ void merge_parts(const AttentionArgs& args, const Heads& heads, int slot, int num_parts, int kv_head, int first_row, int num_columns) {
  constexpr int kElements = 4, kPartsAtOnce = 4;
  const int num_heads = heads.count(kv_head);
  const float v_scale = args.kv.dtype == DType::kE4M3 && args.kv.v_scale != nullptr ? args.kv.v_scale[kv_head] : 1.0f;
  for (int item = static_cast<int>(threadIdx.x); item < num_columns * (kDim / kElements); item += kThreads) {
    const int column = item / (kDim / kElements), element = item % (kDim / kElements) * kElements;
    const int64_t at = (int64_t{first_row + column / num_heads} * args.num_q_heads + heads.head(kv_head, column % num_heads)) * kDim + element;
    const uint2 gates = *reinterpret_cast<const uint2*>(static_cast<const __nv_bfloat16*>(args.gate) + at);
    float values[kElements] = {}, max = -INFINITY, sum = 0;
    for (int first = 0; first < num_parts; first += kPartsAtOnce) {
      float4 part[kPartsAtOnce];
      float2 sums[kPartsAtOnce];
#pragma unroll
      for (int n = 0; n < kPartsAtOnce; ++n) {
        const int64_t column_of_part = int64_t{slot + min(first + n, num_parts - 1)} * args.lanes + column;
        part[n] = read_left(reinterpret_cast<const float4*>(args.slots + column_of_part * kDim + element));
        sums[n] = read_left(reinterpret_cast<const float2*>(args.slot_sums) + column_of_part);
      }
#pragma unroll
      for (int n = 0; n < kPartsAtOnce; ++n) {
        if (first + n >= num_parts) break;
        const float new_max = fmaxf(max, sums[n].x), before = weight_of(max, new_max), now = weight_of(sums[n].x, new_max);
        sum = merged(sum, before, sums[n].y, now);
        max = new_max;
        values[0] = merged(values[0], before, part[n].x, now);
        values[1] = merged(values[1], before, part[n].y, now);
        values[2] = merged(values[2], before, part[n].z, now);
        values[3] = merged(values[3], before, part[n].w, now);
      }
    }
    const float factor = sum > 0 ? v_scale / sum : sum;  // no key at all: 0; NaN stays NaN
    const auto gated = [&](int i, uint32_t bits) { return round_to(DType::kBF16, values[i] * factor) * round_to(DType::kBF16, sigmoid(__uint_as_float(bits))); };
    *reinterpret_cast<uint2*>(static_cast<__nv_bfloat16*>(args.out) + at) =
        make_uint2(bf16_pair(gated(0, gates.x << 16), gated(1, gates.x & 0xffff0000u)), bf16_pair(gated(2, gates.y << 16), gated(3, gates.y & 0xffff0000u)));
  }
}

/// kMatrices: of 8 columns, each a row and query head.
template <int kMatrices, bool kCodes, bool kRelays>
__device__ void decode(const AttentionArgs& args) {
  using Memory = Shared<8 * kMatrices, kCodes, kRelays>;
  constexpr int kColumns = 8 * kMatrices, kElements = kWarpDims / 16, kRingSlices = Memory::kRingSlices;
  using S = Slices<kCodes, kRingSlices * kSliceBytes>;
  constexpr bool kShared = kCodes;  // all warps read each other's values
  extern __shared__ __align__(128) unsigned char memory[];
  Memory& s = *reinterpret_cast<Memory*>(memory);
  const int thread = static_cast<int>(threadIdx.x), warp = thread / 32, lane = thread % 32, block = static_cast<int>(blockIdx.x), num_blocks = static_cast<int>(gridDim.x);
  s.heads.read(args, thread, kThreads);
  release_successor();
  if (!knows_positions(args)) await_predecessor();
  const bool few_jobs = args.num_jobs <= num_blocks;
  int longest = 0, jobs = 0, fewest = INT32_MAX;
  const int total = for_runs(args, s, [&](int tiles, const Run& run) {
    if (tiles == 0) return;
    longest = max(longest, tiles_up_to(args, run.index + run.num_rows - 1));
    fewest = min(fewest, tiles);
    jobs += (run.num_rows + args.rows_per_group - 1) / args.rows_per_group * args.num_kv_heads;
  });
  longest = all_threads(s, longest, [](int a, int b) { return max(a, b); });
  jobs = all_threads(s, jobs, [](int a, int b) { return a + b; });
  /// Nothing is written before this, and of the cache only what earlier steps have left is read.
  const auto arrive = [&] {
    if (knows_positions(args)) await_predecessor();
    if (kRelays) return;
    if (!few_jobs && thread == 0) args.split_jobs[block].job = -1;
    for (int number = block; few_jobs && number < args.step.num_runs; number += num_blocks) {
      const RunRecord run = args.step.runs[number];
      const int groups = has_jobs(run) ? (run.num_rows + args.rows_per_group - 1) / args.rows_per_group : 0;
      for (int i = groups * args.num_kv_heads + thread; i < args.max_groups * args.num_kv_heads; i += kThreads) args.split_jobs[number * args.max_groups * args.num_kv_heads + i].job = -1;
    }
  };
  if (total == 0) return arrive();
  Shares shares(args, total, num_blocks, kRelays);
  if (kRelays && shares.cuts == kRelay) {  // the window must have all runs of a share
    fewest = all_threads(s, fewest, [](int a, int b) { return min(a, b); });
    if (total / shares.blocks + 1 > (Memory::kWindow - 2) * fewest) shares.cuts = kCutJobs;
  }
  // Whole jobs, where they make the shares nearly as even (to a sixteenth), leave nothing to merge.
  if (const int share = (jobs + num_blocks - 1) / num_blocks * longest; int64_t{share} * shares.blocks <= int64_t{total} * 17 / 16) shares.cuts = kCutJobs;
  if (kRelays && shares.cuts == kCutJobs) shares.blocks = num_blocks;
  int begin = shares.begin(block), end = shares.begin(block + 1);
  if (shares.cuts == kCutParts || shares.cuts == kCutJobs) {
    if (thread == 0) {
      s.cuts[0] = begin;
      s.cuts[1] = end;
    }
    for_runs(args, s, [&](int tiles, const Run& run) {
      if (begin >= run.position && begin < run.position + tiles) s.cuts[0] = nearest_cut(args, run, shares.cuts, begin);
      if (end >= run.position && end < run.position + tiles) s.cuts[1] = nearest_cut(args, run, shares.cuts, end);
    });
    __syncthreads();
    begin = s.cuts[0];
    end = s.cuts[1];
  }

  if (begin >= end) {
    arrive();
    // While there is less to read than blocks could, those without a tile ask for the weights of the projection behind this kernel.
    if (thread == 0 && block >= shares.blocks) prefetch_share(args.next, block - shares.blocks, num_blocks - shares.blocks);
    return;
  }
  bool arrived = false;
  while (begin < end) {
    const int window_end = fill_window(args, s, begin, end);
    // In a relay: first the beginning of a part that the next block goes on with; then all other jobs; then that which another block began, and of it last the rest of a part, which is taken over.
    bool continues = false, stays = false;   // a job of the block before; which does not end here either
    int last_range = -1, last_position = 0;  // of what is left last of a job that begins here and does not end here
    if (kRelays && shares.cuts == kRelay) {
      const Walk first(args, s.window, s.num_runs, begin, 1), last(args, s.window, s.num_runs, end - 1, 1);
      continues = first.position < begin;
      stays = continues && end < first.end_of_job();
      const bool hands_on = end < last.end_of_job();
      const int to_part = first.tile > first_tile(args) ? (kTilesPerPart - first.tile % kTilesPerPart) % kTilesPerPart : 0,
                behind_part = hands_on ? min((last.tile + 1) % kTilesPerPart, last.tile + 1 - first_tile(args)) : 0;
      const int of_part = min(begin + to_part, first.end_of_job()), cut = end - behind_part, of_job = continues ? min(first.end_of_job(), cut) : begin;
      if (hands_on && !stays) {
        last_range = last.position < cut ? 1 : 0;
        last_position = last.position;
      }
      if (thread == 0) {
        const int places[] = {cut, end, of_job, cut, of_part, of_job, begin, of_part};
#pragma unroll
        for (int i = 0; i < 2 * kRanges; ++i) s.ranges[i / 2][i % 2] = places[i];
      }
      __syncthreads();
    }
    Walk ahead = kRelays && shares.cuts == kRelay ? Walk(args, s.window, s.num_runs, s.ranges) : Walk(args, s.window, s.num_runs, begin, window_end - begin),
         here = ahead;
    begin = window_end;

    // Copies: the slices of tile after tile, keys and then values; where kAtOnce tiles are under way, values behind the keys of the next one.
    unsigned char(*const ring)[kSliceBytes] = s.ring[warp];
    int pages = 0, first_page = 0, slice_of_unit = 0;  // unit: keys or values of a tile
    int from = 0, owed = kRingSlices;  // the slice to be read next; how many before it have been read and not asked for again
    bool new_job = true, whole_job = false;                     // whole_job: all its keys were asked for
    // Tiles whose keys were asked for, and not their values: where they are in the cache, and which rows are to be read, the first and (<< 8) the one behind the last.
    int waiting = 0, wait_tile[2] = {0, 0}, wait_rows[2] = {0, 0};
    const auto before_rows = [&] { return (ahead.tile + 1) * kKeys <= s.window[ahead.run].index; };  // the tile is of earlier steps
    const auto values_next = [&] { return waiting > Memory::kAtOnce - 1 || (waiting > 0 && whole_job); };
    int key_tile = 0, key_rows = 0;
    const auto fetch = [&] {
      if (ahead.left > 0 || waiting > 0) {
        unsigned char* const slice = ring[from < owed ? from - owed + kRingSlices : from - owed];
        if (!values_next()) {
          if (slice_of_unit == 0) {
            const Run& run = s.window[ahead.run];
            if (new_job || ahead.tile - first_page == 32) {
              first_page = ahead.tile;
              pages = first_page + lane < min(ahead.end, args.step.block_tables_stride)
                          ? args.step.block_tables[int64_t{run.slot} * args.step.block_tables_stride + first_page + lane]
                          : 0;
            }
            key_tile = __shfl_sync(kAllLanes, pages, ahead.tile - first_page) * args.num_kv_heads + ahead.head;
            const int rows_end = before_rows() ? kKeys : min(last_of_group(args, run, ahead.group) + 1, run.end) - ahead.tile * kKeys;
            key_rows = max(0, min(kKeys, args.first_index - ahead.tile * kKeys)) | max(0, min(kKeys, rows_end)) << 8;
          }
          S::copy_keys(slice, static_cast<const unsigned char*>(args.kv.k) + int64_t{key_tile} * (kKeys * kDim * S::kElementBytes), slice_of_unit,
                       warp, lane, key_rows & 255, key_rows >> 8);
          if (++slice_of_unit == S::kOfKeys) {
            slice_of_unit = 0;
            wait_tile[1] = key_tile;
            wait_rows[1] = key_rows;
            if (waiting++ == 0) {
              wait_tile[0] = key_tile;
              wait_rows[0] = key_rows;
            }
            new_job = whole_job = !ahead.advance();
          }
        } else {
          S::copy_values(slice, static_cast<const unsigned char*>(args.kv.v) + int64_t{wait_tile[0]} * (kKeys * kDim * S::kElementBytes), slice_of_unit,
                         warp, lane, wait_rows[0] & 255, wait_rows[0] >> 8);
          if (++slice_of_unit == S::kOfKeys) {
            slice_of_unit = 0;
            wait_tile[0] = wait_tile[1];
            wait_rows[0] = wait_rows[1];
            if (--waiting == 0) whole_job = false;
          }
        }
      }
      --owed;
      commit_copies();
    };
    /// Queries of a job to shared memory.
    const auto load_queries = [&](const Run& run, int group, int kv_head, const auto& meanwhile) {
      constexpr int kItems = kColumns * kPieces / kThreads;
      const int group_row = group * args.rows_per_group, num_heads = s.heads.count(kv_head), used = min(args.rows_per_group, run.num_rows - group_row) * num_heads;
      uint4 bits[kItems];
#pragma unroll
      for (int n = 0; n < kItems; ++n) {
        const int i = (thread + n * kThreads) / kPieces, piece = lane;
        bits[n] = make_uint4(0, 0, 0, 0);
        if (i < used)
          bits[n] = *reinterpret_cast<const uint4*>(static_cast<const __nv_bfloat16*>(args.query) +
                                                    (int64_t{run.first_row + group_row + i / num_heads} * args.num_q_heads + s.heads.head(kv_head, i % num_heads)) * kDim + piece * 8);
      }
      meanwhile();
#pragma unroll
      for (int n = 0; n < kItems; ++n) {
        const int i = (thread + n * kThreads) / kPieces, piece = lane;
        const float query_scale = S::convert_query(bits[n]);
        if (lane == 0) s.query_scale[i] = query_scale;
        *reinterpret_cast<uint4*>(s.q + swizzled<kPieces>(i, piece)) = bits[n];
      }
    };
    if (!arrived) {
      while (owed > 0 && (values_next() || (ahead.left > 0 && before_rows()))) fetch();
      // What is read first once the predecessor has ended comes to the L2 cache meanwhile: where rows end, and the tile that they lie in.
      if (thread < s.num_runs) prefetch_line(args.step.indices + s.window[thread].first_row + s.window[thread].num_rows - 1);
      if (thread == 0 && owed > 0 && ahead.left > 0 && ahead.tile < args.step.block_tables_stride) {
        constexpr int kBytes = kKeys * kDim * S::kElementBytes;
        const int64_t at = (int64_t{args.step.block_tables[int64_t{s.window[ahead.run].slot} * args.step.block_tables_stride + ahead.tile]} * args.num_kv_heads + ahead.head) * kBytes;
        for (const void* cache : {args.kv.k, args.kv.v}) prefetch_bytes(static_cast<const unsigned char*>(cache) + at, kBytes);
      }
      arrive();
      arrived = true;
    }
    load_queries(s.window[here.run], here.group, here.head, [&] {
      if (thread < s.num_runs) s.window[thread].end = end_of(args, s.window[thread]);
    });
    bool has_queries = true;
    __syncthreads();
    while (owed > 0) fetch();
    const auto next_slice = [&] {  // it has been read
      from = from + 1 == kRingSlices ? 0 : from + 1;
      ++owed;
    };
    const auto await_slice = [&] {
      await_copies<kRingSlices - 1>();
      __syncwarp();
      return shared_address(ring[from]);
    };
    const auto free_slice = [&] {  // another takes its place
      __syncwarp();
      next_slice();
      fetch();
    };

    while (here.left > 0) {
      // A job, or what this block has of it.
      const Run& run = s.window[here.run];
      const int range = here.range, kv_head = here.head, first_of_job = first_tile(args), last_of_job = here.last, position = here.position;
      const int group_row = here.group * args.rows_per_group, group_rows = min(args.rows_per_group, run.num_rows - group_row), first_row = run.first_row + group_row;
      const int num_heads = s.heads.count(kv_head), used = group_rows * num_heads;
      const int job = (run.number * args.max_groups + here.group) * args.num_kv_heads + kv_head;
      const bool begins = here.tile == first_of_job, whole = begins && here.end == last_of_job + 1;
      if (thread == 0 && !kRelays && begins && (few_jobs || !whole))
        args.split_jobs[few_jobs ? job : block] = {whole ? -1 : job, position, total, kv_head, first_row, group_rows, first_of_job, last_of_job};
      if (!has_queries) load_queries(run, here.group, kv_head, [] {});
      has_queries = false;
      int index[kMatrices][2];
#pragma unroll
      for (int t = 0; t < kMatrices; ++t)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const int i = t * 8 + lane % 4 * 2 + e;
          index[t][e] = i < used ? run.index + group_row + i / num_heads : -1;
          if (index[t][e] >= run.end) index[t][e] = -1;
        }
      const float k_scale = kCodes && args.kv.k_scale != nullptr ? args.kv.k_scale[kv_head] : 1.0f, v_scale = kCodes && args.kv.v_scale != nullptr ? args.kv.v_scale[kv_head] : 1.0f;
      __syncthreads();
      float scale[kMatrices][2];
#pragma unroll
      for (int t = 0; t < kMatrices; ++t)
#pragma unroll
        for (int e = 0; e < 2; ++e) scale[t][e] = k_scale / sqrtf(static_cast<float>(kDim)) * (kCodes ? s.query_scale[t * 8 + lane % 4 * 2 + e] : 1.0f);
      constexpr bool kKeepsQuery = kMatrices == 1 && !(kCodes && kRelays);
      uint32_t query[kKeepsQuery ? kDim / 32 : 1][2][2];  // of the only columns
      if constexpr (kKeepsQuery) {
#pragma unroll
        for (int step = 0; step < kDim / 32; ++step) S::queries(query[step], s.q, 0, step, lane);
      }
      const auto for_columns = [&](const auto& visit) {  // visit(matrix, e, column) of the lane's
#pragma unroll
        for (int t = 0; t < kMatrices; ++t)
#pragma unroll
          for (int e = 0; e < 2; ++e)
            if (const int i = t * 8 + lane % 4 * 2 + e; i < used) visit(t, e, i);
      };
      /// Leaves values, maximum and sum of a part, or of a tile, to attention_merge.
      const auto leave_values = [&](int slot, int m, int t, const float (&values)[4]) {
#pragma unroll
        for (int e = 0; e < 4; ++e)
          if (const int i = t * 8 + lane % 4 * 2 + e % 2; i < used) args.slots[(int64_t{slot} * args.lanes + i) * kDim + warp * kWarpDims + m * 16 + S::dim(lane, e / 2)] = values[e];
      };
      const auto leave_sums = [&](int slot, const float (&max)[kMatrices][2], const float (&sum)[kMatrices][2]) {
        if (warp == 0 && lane < 4) for_columns([&](int t, int e, int i) { reinterpret_cast<float2*>(args.slot_sums)[int64_t{slot} * args.lanes + i] = make_float2(max[t][e], sum[t][e]); });
      };

      const auto take_part = [&](int slot, State<kMatrices>& part) {
        part.clear();
        const int64_t at_slot = int64_t{slot} * args.lanes;
        const float* const from = args.slots + at_slot * kDim + warp * kWarpDims;
        for_columns([&](int t, int e, int i) {
          const int64_t at = at_slot + i;
          const float2 sums = read_left(reinterpret_cast<const float2*>(args.slot_sums) + at);
          part.max[t][e] = sums.x;
          part.sum[t][e] = sums.y;
#pragma unroll
          for (int m = 0; m < kElements; ++m)
#pragma unroll
            for (int half = 0; half < 2; ++half) part.values[m][t][2 * half + e] = read_left(from + i * kDim + m * 16 + S::dim(lane, half));
        });
      };

      State<kMatrices> part, row;
      part.clear();
      row.clear();
      // Scores of a tile: of the warp's 16 keys, with sums over even and odd steps apart. Of a matrix a lane has two keys of two columns.
      float score[kMatrices][4], tile_max[kMatrices][2];
      const auto scores = [&](int tile, int at) {
        float sums[kMatrices][2][4] = {};
#pragma unroll
        for (int part_of_keys = 0; part_of_keys < S::kOfKeys; ++part_of_keys) {
          if constexpr (kShared) {  // the values before these keys are not asked for again yet
            await_copies<kRingSlices - 2>();
            __syncwarp();
          }
          const uint32_t slice = kShared ? shared_address(ring[from]) : await_slice();
#pragma unroll
          for (int i = 0; i < S::kSteps; ++i) {
            const int step = part_of_keys * S::kSteps + i;
            uint32_t a[2][4];
            S::keys(a, slice, i, lane);
#pragma unroll
            for (int t = 0; t < kMatrices; ++t) {
              uint32_t b[2][2];
              if constexpr (kKeepsQuery) {
#pragma unroll
                for (int n = 0; n < 4; ++n) b[n / 2][n % 2] = query[step][n / 2][n % 2];
              } else {
                S::queries(b, s.q, t * 8, step, lane);
              }
#pragma unroll
              for (int n = 0; n < 2; ++n) S::multiply(sums[t][n], a[n], b[n][0], b[n][1]);
            }
          }
          if constexpr (kShared) next_slice();
          else free_slice();
        }
        const int key = tile * kKeys + warp * kWarpKeys + lane / 4;
#pragma unroll
        for (int t = 0; t < kMatrices; ++t) {
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const int k = key + i / 2 * 8;
            score[t][i] = k <= index[t][i % 2] && k >= args.first_index ? __fmul_rn(sums[t][0][i] + sums[t][1][i], scale[t][i % 2]) : -INFINITY;
          }
          float most[2];
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            most[e] = fmaxf(score[t][e], score[t][e + 2]);
#pragma unroll
            for (int distance = 4; distance < 32; distance *= 2) most[e] = fmaxf(most[e], __shfl_xor_sync(kAllLanes, most[e], distance));
          }
          if (lane < 4) *reinterpret_cast<float2*>(&s.tile_max[at][warp][t * 8 + lane * 2]) = make_float2(most[0], most[1]);
        }
      };
      /// Behind a barrier: weights and their sums, of what the last scores are.
      const auto weigh = [&](int at) {
#pragma unroll
        for (int t = 0; t < kMatrices; ++t) {
          const int i = t * 8 + lane % 4 * 2;
          float2 most = *reinterpret_cast<const float2*>(&s.tile_max[at][0][i]);
#pragma unroll
          for (int w = 1; w < kWarps; ++w) {
            const float2 other = *reinterpret_cast<const float2*>(&s.tile_max[at][w][i]);
            most = make_float2(fmaxf(most.x, other.x), fmaxf(most.y, other.y));
          }
          tile_max[t][0] = most.x;
          tile_max[t][1] = most.y;
#pragma unroll
          for (int n = 0; n < 4; ++n) score[t][n] = weight_of(score[t][n], tile_max[t][n % 2]);
#pragma unroll
          for (int half = 0; half < 2; ++half)  // to rows of keys
            *reinterpret_cast<uint32_t*>(s.p[at] + swizzled<kKeys / 8>(t * 8 + lane / 4, warp * 2 + half) + lane % 4 * 4) = transposed(S::two_weights(score[t][2 * half], score[t][2 * half + 1]));
          float sums[2];
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            sums[e] = score[t][e] + score[t][e + 2];
#pragma unroll
            for (int distance = 4; distance < 32; distance *= 2) sums[e] += __shfl_xor_sync(kAllLanes, sums[e], distance);
          }
          if (lane < 4) *reinterpret_cast<float2*>(&s.tile_sum[at][warp][i]) = make_float2(sums[0], sums[1]);
        }
      };
      // Values. What this block has not from the first tile of a part on is a part for every tile.
      bool begun = true;
      int first_of_part = here.tile;
      const int first_here = here.tile, end_here = here.end;
      const auto begin_tile = [&](int tile) {
        if (tile > first_here && tile % kTilesPerPart != 0 && begun) return;
        begun = tile == first_of_job || tile % kTilesPerPart == 0;
        first_of_part = tile;
        if (kRelays && !begun && shares.cuts == kRelay) {
          if (thread == 0) take_over(args.relay + 2 * (block - 1));
          __syncthreads();
          take_part(slot_of(shares, job, position, tile, first_of_job), part);
          begun = true;
        } else {
          part.clear();
        }
      };
      /// Behind a barrier: the warp's 64 elements of all keys.
      const auto add_values = [&](int at, const float (&tile_max)[kMatrices][2]) {
        float tile_sum[kMatrices][2];
#pragma unroll
        for (int t = 0; t < kMatrices; ++t)
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            const int i = t * 8 + lane % 4 * 2 + e;
            tile_sum[t][e] = (s.tile_sum[at][0][i] + s.tile_sum[at][1][i]) + (s.tile_sum[at][2][i] + s.tile_sum[at][3][i]);
          }
        Factors<kMatrices> factors;
        factors.merge(part, tile_max, tile_sum);
        uint32_t weights[kMatrices][kKeys / 32][4];
        const uint32_t p = shared_address(s.p[at]);
#pragma unroll
        for (int t = 0; t < kMatrices; ++t)
#pragma unroll
          for (int step = 0; step < kKeys / 32; ++step) load_matrices(weights[t][step], p + swizzled<kKeys / 8>(t * 8 + lane % 8, step * 4 + lane / 8));
        float added[kElements][kMatrices][4] = {};
#pragma unroll
        for (int part_of_values = 0; part_of_values < S::kOfKeys; ++part_of_values) {
          const uint32_t slice = kShared ? shared_address(s.ring[0][from]) : await_slice();
#pragma unroll
          for (int m = 0; m < kElements; ++m) {
#pragma unroll
            for (int i = 0; i < S::kKeySteps; ++i) {
              const int step = part_of_values * S::kKeySteps + i;
              uint32_t a[2][4];
              S::values(a, slice, m, i, warp, lane);
#pragma unroll
              for (int t = 0; t < kMatrices; ++t)
#pragma unroll
                for (int n = 0; n < 2; ++n) S::multiply(added[m][t], a[n], weights[t][step][2 * n], weights[t][step][2 * n + 1]);
            }
            if (part_of_values + 1 < S::kOfKeys) continue;
#pragma unroll
            for (int t = 0; t < kMatrices; ++t) factors.merge_values(part.values[m][t], t, added[m][t]);
          }
          if constexpr (kShared) next_slice();
          else free_slice();
        }
      };
      const auto end_tile = [&](int tile) {
        if (begun && tile + 1 < end_here && tile != last_of_job && tile % kTilesPerPart != kTilesPerPart - 1) return;
        if (whole) {
          Factors<kMatrices> factors;
          factors.merge(row, part.max, part.sum);
#pragma unroll
          for (int m = 0; m < kElements; ++m)
#pragma unroll
            for (int t = 0; t < kMatrices; ++t) factors.merge_values(row.values[m][t], t, part.values[m][t]);
        } else {
          const int slot = slot_of(shares, job, position, first_of_part, first_of_job);
          leave_sums(slot, part.max, part.sum);
#pragma unroll
          for (int m = 0; m < kElements; ++m)
#pragma unroll
            for (int t = 0; t < kMatrices; ++t) leave_values(slot, m, t, part.values[m][t]);
        }
      };
      if constexpr (Memory::kAtOnce == 1) {
        for (int tile = first_here; tile < end_here; ++tile) {
          begin_tile(tile);
          scores(tile, 0);
          __syncthreads();
          if constexpr (kShared) {  // all warps have read the values of the tile before
#pragma unroll 1
            while (owed > 0) fetch();
          }
          weigh(0);
          if constexpr (kShared) await_copies<kRingSlices - 1>();
          __syncthreads();
          add_values(0, tile_max);
          end_tile(tile);
        }
      } else {
        // Values of a tile meet their weights while those of the next one are computed: one barrier a tile.
        scores(first_here, 0);
        __syncthreads();
        weigh(0);
        int at = 0;
        for (int tile = first_here; tile + 1 < end_here; ++tile) {
          begin_tile(tile);
          scores(tile + 1, at ^ 1);
          __syncthreads();
          float before[kMatrices][2];
#pragma unroll
          for (int t = 0; t < kMatrices; ++t)
#pragma unroll
            for (int e = 0; e < 2; ++e) before[t][e] = tile_max[t][e];
          weigh(at ^ 1);
          add_values(at, before);
          end_tile(tile);
          at ^= 1;
        }
        begin_tile(end_here - 1);
        __syncthreads();
        add_values(at, tile_max);
        end_tile(end_here - 1);
      }
      here.skip_job();
      if (kRelays && shares.cuts == kRelay && !whole) {
        const bool last = here.left == 0;
        __syncthreads();
        if (thread == 0) {
          if (range == 0) hand_on(args.relay + 2 * block);
          if (stays ? last : range == last_range && position == last_position) hand_on(args.relay + 2 * block + 1);
        }
        if (continues && last && !stays) {
          for (int other = shares.block_of(position) + thread; other < block; other += kThreads) take_over(args.relay + 2 * other + 1);
          __syncthreads();
          merge_parts(args, s.heads, slot_of(shares, job, position, first_of_job, first_of_job),
                      last_of_job / kTilesPerPart - first_of_job / kTilesPerPart + 1, kv_head, first_row, used);
        }
      }
      if (!whole) continue;
      if constexpr (kMatrices == 1) {
        // All gates are on their way before the first is used.
        float gates[2][kElements][2];
        int64_t to_row[2];
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const int i = lane % 4 * 2 + e;
          if (i >= used) continue;
          to_row[e] = (int64_t{first_row + i / num_heads} * args.num_q_heads + s.heads.head(kv_head, i % num_heads)) * kDim + warp * kWarpDims;
#pragma unroll
          for (int m = 0; m < kElements; ++m) {
            if constexpr (kCodes) {
              const uint32_t two = *reinterpret_cast<const uint32_t*>(static_cast<const __nv_bfloat16*>(args.gate) + to_row[e] + m * 16 + S::dim(lane, 0));
              gates[e][m][0] = __uint_as_float(two << 16);
              gates[e][m][1] = __uint_as_float(two & 0xffff0000u);
            } else {
#pragma unroll
              for (int half = 0; half < 2; ++half) gates[e][m][half] = load(args.gate, DType::kBF16, to_row[e] + m * 16 + S::dim(lane, half));
            }
          }
        }
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          if (lane % 4 * 2 + e >= used) continue;
          const float factor = row.sum[0][e] > 0 ? v_scale / row.sum[0][e] : row.sum[0][e];  // no key at all: 0; NaN stays NaN
#pragma unroll
          for (int m = 0; m < kElements; ++m) {
            const auto gated = [&](int half) { return round_to(DType::kBF16, row.values[m][0][2 * half + e] * factor) * round_to(DType::kBF16, sigmoid(gates[e][m][half])); };
            if constexpr (kCodes) {
              *reinterpret_cast<uint32_t*>(static_cast<__nv_bfloat16*>(args.out) + to_row[e] + m * 16 + S::dim(lane, 0)) = bf16_pair(gated(0), gated(1));
            } else {
#pragma unroll
              for (int half = 0; half < 2; ++half) store(args.out, DType::kBF16, to_row[e] + m * 16 + S::dim(lane, half), gated(half));
            }
          }
        }
      } else {
        for_columns([&](int t, int e, int i) {
          const float factor = row.sum[t][e] > 0 ? v_scale / row.sum[t][e] : row.sum[t][e];  // no key at all: 0; NaN stays NaN
          const int64_t to_row = (int64_t{first_row + i / num_heads} * args.num_q_heads + s.heads.head(kv_head, i % num_heads)) * kDim + warp * kWarpDims;
#pragma unroll
          for (int m = 0; m < kElements; ++m)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
              const int64_t at = to_row + m * 16 + S::dim(lane, half);
              const float gate = load(args.gate, DType::kBF16, at);
              store(args.out, DType::kBF16, at, round_to(DType::kBF16, row.values[m][t][2 * half + e] * factor) * round_to(DType::kBF16, sigmoid(gate)));
            }
        });
      }
    }
  }
}

constexpr int kMergeThreads = 256, kMergeWarps = kMergeThreads / 32;

/// Where the results of a job are that several blocks have.
struct Left {
  const AttentionArgs& args;
  const SplitJob& job;
  const Shares shares;
  int column;  // row and head among those of the job

  struct Part {
    int tile, begun, tiles;  // the first tile; how many stand in the part's result, and how many there are
  };
  [[nodiscard]] __device__ Part part(int number) const {
    const int aligned = (job.first / kTilesPerPart + number) * kTilesPerPart, tile = max(job.first, aligned), tiles = min(job.last + 1, aligned + kTilesPerPart) - tile;
    if (shares.cuts != kCutTiles) return {tile, tiles, tiles};
    const int at = job.position + tile - job.first;
    return {tile, min(tiles, shares.end_of_share(at) - at), tiles};
  }
  [[nodiscard]] __device__ int slot(int tile) const { return slot_of(shares, job.job, job.position, tile, job.first) * args.lanes + column; }
  [[nodiscard]] __device__ int num_parts() const { return job.last / kTilesPerPart - job.first / kTilesPerPart + 1; }
};

/// Up to 32 parts of a job, of which each lane knows one: where its results are, its maximum and sum.
struct LeftParts {
  static constexpr int kMore = kTilesPerPart - 1;
  int slot, slot_of_more = 0, more = 0;  // of the part, of the first tile beside it, and how many tiles there are
  float max = -INFINITY, sum = 0;
  float before[kMore], now[kMore];       // what the part, and what a tile beside it, are multiplied with

  __device__ LeftParts(const Left& left, int first, int count, int lane) : slot(0) {
#pragma unroll
    for (int i = 0; i < kMore; ++i) before[i] = now[i] = 0;
    if (lane >= count) return;
    const Left::Part part = left.part(first + lane);
    slot = left.slot(part.tile);
    slot_of_more = left.slot(part.tile + part.begun);
    more = part.tiles - part.begun;
  }
  __device__ void read_sums(const Left& left, int count, int lane) {
    if (lane >= count) return;
    const float2* const sums = reinterpret_cast<const float2*>(left.args.slot_sums);
    const float2 own = sums[slot];
    float2 tiles[kMore];
#pragma unroll
    for (int i = 0; i < kMore; ++i)
      if (i < more) tiles[i] = sums[slot_of_more + i * left.args.lanes];
    max = own.x;
    sum = own.y;
#pragma unroll
    for (int i = 0; i < kMore; ++i)
      if (i < more) {
        const float new_max = fmaxf(max, tiles[i].x);
        before[i] = weight_of(max, new_max);
        now[i] = weight_of(tiles[i].x, new_max);
        sum = merged(sum, before[i], tiles[i].y, now[i]);
        max = new_max;
      }
  }
};

/// Merges parts in order, 32 at a time, of which each lane knows maximum and sum; a lane has an element of all.
struct Merge {
  float total = 0, max = -INFINITY, sum = 0;
  /// What the lane's part is merged with: the factors, and its sum.
  __device__ float4 factors(float part_max, float part_sum, int lane) {
    float reached = part_max;  // what a merge multiplies with depends on the largest maximum up to it
    for (int distance = 1; distance < 32; distance *= 2) {
      const float other = __shfl_up_sync(kAllLanes, reached, static_cast<unsigned>(distance));
      if (lane >= distance) reached = fmaxf(reached, other);
    }
    float earlier = __shfl_up_sync(kAllLanes, reached, 1);
    earlier = lane == 0 ? max : fmaxf(earlier, max);
    reached = fmaxf(reached, max);
    max = __shfl_sync(kAllLanes, reached, 31);
    return make_float4(weight_of(earlier, reached), weight_of(part_max, reached), part_sum, 0);
  }
  __device__ void add(const float4& factors, float value) {
    total = merged(total, factors.x, value, factors.y);
    sum = merged(sum, factors.x, factors.z, factors.y);
  }
};

/// Shared memory of a merge.
template <bool kMany>
struct MergeShared {
  static constexpr int kParts = kMany ? 8 : 32;  // of a warp at a time
  float values[kMergeWarps][kParts][32];
  float4 factors[kMergeWarps][32];
  float2 sums[kMergeWarps][32];
};

/// Merges what several blocks have left of a job, and gates it. kMany: a warp has 32 elements of all parts, else all warps have 32 elements by blockIdx.z, and parts of their own.
template <bool kMany>
__device__ void merge(const AttentionArgs& args, const Left& left, const Heads& heads, MergeShared<kMany>& s) {
  constexpr int kParts = MergeShared<kMany>::kParts, kAtOnce = 4;  // of those with tiles beside them
  const SplitJob& job = left.job;
  const int thread = static_cast<int>(threadIdx.x), warp = thread / 32, lane = thread % 32, num_heads = heads.count(job.kv_head);
  const int element = (kMany ? warp : static_cast<int>(blockIdx.z)) * 32 + lane, num_parts = left.num_parts();
  const int64_t at = (int64_t{job.first_row + left.column / num_heads} * args.num_q_heads + heads.head(job.kv_head, left.column % num_heads)) * kDim + element;
  const float gate = load(args.gate, DType::kBF16, at);
  Merge row;
  for (int first = 0; first < num_parts; first += kMany ? kParts : kMergeThreads) {
    const int first_of_warp = first + (kMany ? 0 : warp * kParts), count = max(0, min(kParts, num_parts - first_of_warp));
    LeftParts parts(left, first_of_warp, count, lane);
    const auto read = [&](int slot) { return args.slots[int64_t{slot} * kDim + element]; };
    // All reads of a kind are on their way before the first is used.
    float begun[kParts];
#pragma unroll
    for (int i = 0; i < kParts; ++i)
      if (i < count) begun[i] = read(__shfl_sync(kAllLanes, parts.slot, i));
    unsigned with_more = __ballot_sync(kAllLanes, parts.more > 0);
    float tiles[kAtOnce][LeftParts::kMore];
    const auto read_tiles = [&] {
      unsigned rest = with_more;
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        if (rest == 0) continue;
        const int part = __ffs(static_cast<int>(rest)) - 1, more = __shfl_sync(kAllLanes, parts.more, part), slot = __shfl_sync(kAllLanes, parts.slot_of_more, part);
        rest &= rest - 1;
#pragma unroll
        for (int n = 0; n < LeftParts::kMore; ++n)
          if (n < more) tiles[i][n] = read(slot + n * args.lanes);
      }
    };
    read_tiles();
    parts.read_sums(left, count, lane);
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kParts; ++i)
      if (i < count) s.values[warp][i][lane] = begun[i];
    while (with_more != 0) {
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        if (with_more == 0) continue;
        const int part = __ffs(static_cast<int>(with_more)) - 1, more = __shfl_sync(kAllLanes, parts.more, part);
        with_more &= with_more - 1;
        float value = s.values[warp][part][lane];
#pragma unroll
        for (int n = 0; n < LeftParts::kMore; ++n) {
          const float before = __shfl_sync(kAllLanes, parts.before[n], part), now = __shfl_sync(kAllLanes, parts.now[n], part);
          if (n < more) value = merged(value, before, tiles[i][n], now);
        }
        s.values[warp][part][lane] = value;
      }
      if (with_more != 0) read_tiles();
    }
    if constexpr (kMany) {
      s.factors[warp][lane] = row.factors(parts.max, parts.sum, lane);
      __syncwarp();
#pragma unroll 4
      for (int part = 0; part < count; ++part) row.add(s.factors[warp][part], s.values[warp][part][lane]);
      __syncwarp();
    } else {
      s.sums[warp][lane] = make_float2(parts.max, parts.sum);
      __syncthreads();
      for (int w = 0; warp == 0 && w < kMergeWarps && first + w * 32 < num_parts; ++w) {
        s.factors[w][lane] = row.factors(s.sums[w][lane].x, s.sums[w][lane].y, lane);
        __syncwarp();
#pragma unroll 8
        for (int part = 0; part < min(32, num_parts - first - w * 32); ++part) row.add(s.factors[w][part], s.values[w][part][lane]);
      }
    }
  }
  if (!kMany && warp > 0) return;
  const bool scaled = args.kv.dtype == DType::kE4M3 && args.kv.v_scale != nullptr;
  const float factor = row.sum > 0 ? (scaled ? args.kv.v_scale[job.kv_head] : 1.0f) / row.sum : row.sum;
  store(args.out, DType::kBF16, at, round_to(DType::kBF16, row.total * factor) * round_to(DType::kBF16, sigmoid(gate)));
}

/// What a block merges, once the predecessor has ended: `number` is a job of few, or the block that began one and did not finish it; `column` a row and head of the job.
__device__ SplitJob job_to_merge(const AttentionArgs& args, const Heads& heads, int number, int column) {
  __syncthreads();
  await_predecessor();
  SplitJob job = args.split_jobs[number];
  if (job.job < 0) return job;
  const int num_heads = heads.count(job.kv_head);
  if (num_heads == 0 || column / num_heads >= job.num_rows) job.job = -1;
  return job;
}

}  // namespace

template <int kColumns, bool kCodes, bool kRelays>
constexpr bool fits = sizeof(Shared<kColumns, kCodes, kRelays>) <= decode_shared_bytes(kColumns, kCodes, kHopper);
static_assert(fits<8, false, false> && fits<8, true, false> && fits<24, false, false> && fits<24, true, false> && fits<8, false, true> && fits<8, true, true>);

#define QUERN_DECODE(name, matrices, codes, relays) \
  extern "C" __global__ void __launch_bounds__(kThreads, decode_blocks(8 * matrices, codes, kHopper)) name(const __grid_constant__ AttentionArgs args) { decode<matrices, codes, relays>(args); }
QUERN_DECODE(attention_decode_1_bf16, 1, false, false)
QUERN_DECODE(attention_decode_3_bf16, 3, false, false)
QUERN_DECODE(attention_decode_1_e4m3, 1, true, false)
QUERN_DECODE(attention_decode_3_e4m3, 3, true, false)
QUERN_DECODE(attention_decode_many_bf16, 1, false, true)
QUERN_DECODE(attention_decode_many_e4m3, 1, true, true)
#undef QUERN_DECODE

/// Where rows and heads are few; blockIdx.z: 32 elements. Of few parts the first block merges all elements: the others would be in the way of the kernel behind this one.
__device__ void merge_few(const AttentionArgs& args, int number, int column) {
  __shared__ union {
    MergeShared<true> many;
    MergeShared<false> few;
  } s;
  __shared__ Heads heads;
  release_successor();
  const bool may_be_idle = blockIdx.z > 0 && args.num_jobs <= args.num_blocks && knows_positions(args);
  RunRecord run{};
  if (may_be_idle) run = args.step.runs[number / (args.max_groups * args.num_kv_heads)];
  heads.read(args, static_cast<int>(threadIdx.x), kMergeThreads);
  if (may_be_idle && (!has_jobs(run) || (args.step.cursor[run.slot] + run.num_rows - 1) / kKeys / kTilesPerPart < MergeShared<true>::kParts)) return;
  const SplitJob job = job_to_merge(args, heads, number, column);
  if (job.job < 0) return;
  const Left left{args, job, Shares(args, job.total, args.num_blocks), column};
  if (left.num_parts() > MergeShared<true>::kParts) merge<false>(args, left, heads, s.few);
  else if (blockIdx.z == 0) merge<true>(args, left, heads, s.many);
}
extern "C" __global__ void __launch_bounds__(kMergeThreads, 2) attention_merge_few(const __grid_constant__ AttentionArgs args) {
  merge_few(args, static_cast<int>(blockIdx.x), static_cast<int>(blockIdx.y));
}
extern "C" __global__ void __launch_bounds__(kMergeThreads, 3) attention_merge_many(const __grid_constant__ AttentionArgs args) {
  __shared__ MergeShared<true> s;
  __shared__ Heads heads;
  release_successor();
  heads.read(args, static_cast<int>(threadIdx.x), kMergeThreads);
  const int column = static_cast<int>(blockIdx.y);
  const SplitJob job = job_to_merge(args, heads, static_cast<int>(blockIdx.x), column);
  if (job.job >= 0) merge<true>(args, {args, job, Shares(args, job.total, args.num_blocks), column}, heads, s);
}

/// Verifies of few runs, whose rows may be taken together or each by itself, as if it were alone: of a short context a block has a tile or two of either, and what takes long is a tile's rows.
__device__ bool takes_rows_apart(const AttentionArgs& apart) {
  int tiles = 0;
  for (int number = 0; number < apart.step.num_runs; ++number) {
    Run run{};
    tiles += read_run(apart, number, run);
  }
  return tiles <= 2 * apart.num_blocks;
}
#define QUERN_DECODE_EITHER(name, codes)                                                                                                                          \
  extern "C" __global__ void __launch_bounds__(kThreads, decode_blocks(24, codes, kHopper)) name(const __grid_constant__ AttentionEitherArgs args) {             \
    if (takes_rows_apart(args.apart)) decode<1, codes, false>(args.apart);                                                                                               \
    else decode<3, codes, false>(args.together);                                                                                                                         \
  }
QUERN_DECODE_EITHER(attention_decode_either_bf16, false)
QUERN_DECODE_EITHER(attention_decode_either_e4m3, true)
#undef QUERN_DECODE_EITHER
/// As attention_merge_few; blockIdx.x: a row and head of a job.
extern "C" __global__ void __launch_bounds__(kMergeThreads, 2) attention_merge_either(const __grid_constant__ AttentionEitherArgs args) {
  const AttentionArgs& chosen = takes_rows_apart(args.apart) ? args.apart : args.together;
  const int number = static_cast<int>(blockIdx.x) / chosen.lanes;
  if (number < min(chosen.num_jobs, chosen.num_blocks)) merge_few(chosen, number, static_cast<int>(blockIdx.x) % chosen.lanes);
}

}  // namespace quern::cuda
