#include <type_traits>

#include "backends/cuda/gdn_bf16.cuh"

// Decode and verify rows of heads of 128 x 128 whose ring is bfloat16, so that its keys and updates are operands of matrix instructions as
// they stand. Blocks and jobs are those of gdn_decode.cu: a run and the value heads of a key head one after the other, or one of them alone
// while there are few. A warp has 16 of a head's 128 columns to itself: the upper half of S there, 4 KB, and the updates are copied to
// shared memory while whatever comes before is computed, and as soon as it has been summed over either it asks for the next head's. Memory
// is busy while instructions between two requests are few, so all that does not depend on S is made once for a group of heads, by all
// warps: q, k and v behind the convolution, products of earlier keys with both, and with them the weights of updates. S is read once for up
// to 4 rows and written only when the 64 rows of a chunk are folded in. Every sum has an order fixed by positions in the chunk: a row's
// bits are the same alone, as a draft row, and recomputed.

namespace quern::cuda {

namespace {

/// kRows: taken at a time. kGroup: heads that are prepared at a time. kKeysApart: keys that are folded have a place beside the updates.
template <int kRows, int kGroup, bool kKeysApart>
struct Shared : JobsOfBlock<kRows> {
  // Halves of S; pieces of 16 bytes of a column permuted: state_piece. The lower ones are there where a chunk is folded.
  alignas(128) uint16_t upper[kWarps][kColumns][kDim], lower[kWarps][kColumns][kDim];
  __nv_bfloat16 updates[kWarps][kChunk][kColumns];    // by position, pieces of 16 bytes permuted: update_piece
  __nv_bfloat16 keys[kKeysApart ? kChunk : 0][kDim];  // swizzled
  uint32_t weights[kRows][kGroup][kTerms][4][8];      // pairs, as a matrix instruction's lanes have them: weight_at
  __nv_bfloat16 parts[kRows][kParts][kDim];
  float dots[kRows][kParts][kChunk];  // by position: kj . k, and kj . q in two
  __nv_bfloat16 v[kRows][kGroup][kDim];
  float gates[kRows][kGroup][kDim];    // silu(z) and the norm's weight
  float fold_factors[kGroup][kChunk];  // e^(G64 - Gj)
  Factors factors[kRows][kGroup];
  float squares[kKeysApart ? 4 : 2][kRows][kWarps];  // of the outputs, of heads in turns
  unsigned turn[kWarps];                             // of heads, as each warp goes
  uint64_t squared[2];                               // barriers: the squares of a head are there
};
/// Of a barrier in shared memory, which a warp passes before all others have come to it.
__device__ void arrive(uint64_t& barrier) {
  asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(shared_address(&barrier)) : "memory");
}
/// Until all have come to it as often as makes `parity` a past one: 0, 1, 0, ...
__device__ void await(uint64_t& barrier, unsigned parity) {
  uint32_t done;
  do {
    asm volatile("{\n.reg .pred done;\nmbarrier.test_wait.parity.shared.b64 done, [%1], %2;\nselp.u32 %0, 1, 0, done;\n}\n"
                 : "=r"(done)
                 : "r"(shared_address(&barrier)), "r"(parity)
                 : "memory");
  } while (done == 0);
  __syncwarp();
}

/// Begins to copy the warp's columns of what a head's rows read of S.
template <class Memory>
__device__ void begin_state(Memory& s, const GdnArgs& g, int slot, int head, int warp, int lane) {
  begin_half(s.upper[warp], halves_of(g, slot, head).upper, warp, lane);
}
/// And of what only a fold reads.
template <class Memory>
__device__ void begin_lower(Memory& s, const GdnArgs& g, int slot, int head, int warp, int lane) {
  begin_half(s.lower[warp], halves_of(g, slot, head).lower, warp, lane);
}
/// Begins to copy the warp's columns of a head's updates at the first `count` positions of the chunk at `start`, and zeros behind them as
/// far as sums over the updates before any of kRows rows go.
template <int kRows, class Memory>
__device__ void begin_updates(Memory& s, const GdnArgs& g, const Job& job, int start, int count, int head, int warp, int lane) {
  constexpr int kAtOnce = 16;  // positions of two pieces
  const int length = kChunk + g.k_max + 1, stride = g.num_v_heads * kDim, end = min((count + kRows - 1 + 15) / 16 * 16, kChunk);
  const __nv_bfloat16* updates =
      static_cast<const __nv_bfloat16*>(g.ring_u) + job.slot * length * stride + head * kDim + warp * kColumns + lane % 2 * 8;
  __nv_bfloat16* to = &s.updates[warp][lane / 2][update_piece(lane / 2, lane % 2) * 8];
  int row = start + lane / 2;
#pragma unroll 1
  for (int j = lane / 2; j < end; j += kAtOnce) {
    if (row >= length) row -= length;
    copy_async(to, updates + row * stride, j < count);
    row += kAtOnce;
    to += kAtOnce * kColumns;
  }
}
/// The same for the rows of a batch, which may end their chunk.
template <int kRows, class Memory>
__device__ void begin_batch(Memory& s, const GdnArgs& g, const Job& job, const Batch& batch, int head, int warp, int lane) {
  begin_updates<kRows>(s, g, job, batch.start, batch.first, head, warp, lane);
  if (batch.ends_chunk) begin_lower(s, g, job.slot, head, warp, lane);
}
/// Asks for what a job's first group of heads reads before S, in L2.
__device__ void prefetch_job(const GdnArgs& g, const Job& job) {
  const int thread = static_cast<int>(threadIdx.x), j = thread % kChunk;
  const Batch& batch = job.begin;
  if (thread < 2 * kChunk) {
    if (j < batch.first) {
      const int row = ring_row(g, job, batch.start, j);
      if (thread < kChunk)
        prefetch_bytes(static_cast<const __nv_bfloat16*>(g.ring_k) + (row * g.num_k_heads + job.k_head) * kDim,
                       kDim * sizeof(__nv_bfloat16));
      else
        prefetch_line(g.ring_g + row * g.num_v_heads + job.head);
    }
  } else if (const int item = thread - 2 * kChunk; item < 3 * (2 + job.end_head - job.head)) {
    const int index = job.cursor - 1 - item % 3, unit = item / 3, keys = g.num_k_heads * kDim;
    if (index >= 0)
      prefetch_bytes(job.kept_columns(g, index, unit < 2 ? unit * keys + job.k_head * kDim : 2 * keys + (job.head + unit - 2) * kDim),
                     kDim * sizeof(__nv_bfloat16));
  }
}

template <int kRows, int kGroup, bool kKeysApart>
__device__ void decode(const GdnArgs& g) {
  using Memory = Shared<kRows, kGroup, kKeysApart>;
  extern __shared__ __align__(128) unsigned char memory[];
  Memory& s = *reinterpret_cast<Memory*>(memory);
  constexpr bool kDefers = kRows == 1 && kKeysApart;
  // S of the block's own job is asked for before all of it is known.
  const int number = static_cast<int>(blockIdx.x);
  int early_slot = -1, early_head = 0;
  if (number < jobs_of(g)) {
    const bool apart = (g.phases & kGdnHeadsApart) != 0;
    const int parts = apart ? g.num_v_heads : g.num_k_heads, part = number % parts;
    const RunRecord record = g.step.runs[number / parts];
    early_head = apart ? part : g.first_head[part];
    if (has_rows(record) && (apart || early_head < g.first_head[part + 1])) {
      early_slot = record.slot;
      begin_state(s, g, early_slot, early_head, static_cast<int>(threadIdx.x) / 32, static_cast<int>(threadIdx.x) % 32);
    }
    commit_copies();
  }
  if (kDefers && threadIdx.x == 0)
    for (uint64_t& squared : s.squared)
      asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(shared_address(&squared)), "n"(kWarps) : "memory");
  find_first<kRows, true>(s, g);
  // State, ring and window are of the step before: they are read while the projections before this kernel still run.
  if (s.numbers[0] >= 0) {
    const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
    if (s.jobs[0].slot != early_slot || s.jobs[0].head != early_head) {  // a later one's
      await_copies<0>();
      __syncwarp();
      begin_state(s, g, s.jobs[0].slot, s.jobs[0].head, warp, lane);
      commit_copies();
    }
    begin_batch<kRows>(s, g, s.jobs[0], s.jobs[0].begin, s.jobs[0].head, warp, lane);
    commit_copies();
  }
  if (threadIdx.x == kFinder) prefetch_share(g.prefetch, static_cast<int>(blockIdx.x), static_cast<int>(gridDim.x));
  release_successor();
  const auto place = [&] { return s.place[threadIdx.x / 32]; };
  const auto next_place = [&] { return place() == 2 ? 0 : place() + 1; };
  s.place[threadIdx.x / 32] = 0;
  s.turn[threadIdx.x / 32] = 0;
  __syncwarp();
  // A single row's norm is waited for behind the sums of the next head, so that no warp waits for another.
  float held = 0;
  int held_at = 0;
  const auto let_go = [&](unsigned turn) {
    await(s.squared[turn % 2], turn / 2 % 2);
    float sum = 0;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) sum += s.squares[turn % (kDefers ? 4 : 2)][0][w];
    if (threadIdx.x % 2 == 1)
      static_cast<__nv_bfloat16*>(g.out)[held_at] = __float2bfloat16_rn(held * rsqrtf(sum / static_cast<float>(kDim) + g.eps));
  };
  while (s.numbers[place()] >= 0) {
    const Job& job = s.jobs[place()];
    int boundary_now = job.boundary, index = job.cursor;
    do {
      // A single row's stays where it is: registers are few.
      std::conditional_t<kRows == 1, const Batch&, const Batch> batch = [&]() -> std::conditional_t<kRows == 1, const Batch&, const Batch> {
        if constexpr (kRows == 1)
          return job.begin;
        else
          return batch_at<kRows>(g, job, index);
      }();
      const int rows = kRows == 1 ? 1 : batch.rows;
      const auto boundary = [&] { return kRows == 1 ? job.boundary : boundary_now; };
      const auto stores_fold = [&] { return boundary() + kChunk <= job.cursor; };
      const bool is_last = kRows == 1 || batch.index + rows == job.end;
      for (int first_head = job.head; first_head < job.end_head; first_head += kGroup) {
        const int heads = min(kGroup, job.end_head - first_head);
        const bool begins = first_head == job.head;  // k, q and products of keys are made
        {
          int thread = static_cast<int>(threadIdx.x);
          asm volatile("" : "+r"(thread));  // addresses are made anew: kept, they would push what is loaded out of the registers
          __builtin_assume(thread >= 0 && thread < kThreads);
          const int warp = thread / 32, lane = thread % 32, keys = g.num_k_heads * kDim, channels = 2 * keys + g.num_v_heads * kDim;
          // A lane has pieces of the key at position lane / 4 of the warp's eight, and G of position lane % 8 for head lane / 8.
          const int key_at = warp * 8 + lane / 4, mine_at = warp * 8 + lane % 8, mine = min(lane / 8, heads - 1);
          uint4 earlier[4];
          {
            const auto* at = static_cast<const __nv_bfloat16*>(g.ring_k) +
                             (ring_row(g, job, batch.start, key_at) * g.num_k_heads + job.k_head) * kDim + 8 * (lane % 4);
#pragma unroll
            for (int i = 0; i < 4; ++i)
              earlier[i] = key_at < batch.first ? __ldcg(reinterpret_cast<const uint4*>(at + 32 * i)) : make_uint4(0, 0, 0, 0);
          }
          float sum_at = 0, total = 0;
          if (mine_at < batch.first) sum_at = __ldcg(g.ring_g + ring_row(g, job, batch.start, mine_at) * g.num_v_heads + first_head + mine);
          if (batch.first > 0)
            total = __ldcg(g.ring_g + ring_row(g, job, batch.start, batch.first - 1) * g.num_v_heads + first_head + mine);
          const float decay_rate = g.decay[first_head + mine], dt_bias = g.dt_bias[first_head + mine];
          // Warps 0 and 1 have k and q, the ones behind them v of a head each; a lane has four channels. What is read without need is less
          // than a value that the compiler keeps where nothing is read.
          const bool converts = warp < 2 + heads && (begins || warp >= 2), is_common = warp < 2;
          const int v_head = first_head + max(min(warp - 2, heads - 1), 0);
          const int channel = (warp == 0 ? keys + job.k_head * kDim : warp == 1 ? job.k_head * kDim : 2 * keys + v_head * kDim) + 4 * lane;
          float4 taps[4];
          uint2 raw[kRows + 3], z[kRows];
          const int gated = kWarps - 1 - warp, z_head = first_head + min(gated, heads - 1);  // warps from the last on have a head's z each
          const auto load_raw = [&](bool given) {                                            // the step's rows, or those before them
#pragma unroll
            for (int i = 0; i < kRows + 3; ++i) {
              const int at = max(batch.index + min(i, rows + 2) - 3, 0);
              const bool is_given = kRows == 1 ? i == 3 : at >= job.cursor;
              if (is_given == given)
                raw[i] =
                    __ldcg(reinterpret_cast<const uint2*>(given ? job.given_columns(g, at, channel) : job.kept_columns(g, at, channel)));
              else if (kRows > 1 && !given)
                raw[i] = {};
            }
          };
          load_raw(false);
#pragma unroll
          for (int tap = 0; tap < 4; ++tap) taps[tap] = four(g.conv + tap * channels + channel);
          await_predecessor();
          load_raw(true);
#pragma unroll
          for (int r = 0; r < kRows; ++r)
            z[r] = __ldcg(reinterpret_cast<const uint2*>(
                static_cast<const __nv_bfloat16*>(g.z) +
                ((job.first_row + batch.index - job.cursor + min(r, rows - 1)) * g.num_v_heads + z_head) * kDim + 4 * lane));
          // Behind an odd number of heads they lie at 8 bytes.
          const float2 front_weights = *reinterpret_cast<const float2*>(g.norm + 4 * lane),
                       back_weights = *reinterpret_cast<const float2*>(g.norm + 4 * lane + 2);
          __nv_bfloat16 gates[2][kRows];
#pragma unroll
          for (int r = 0; r < kRows; ++r) {
            const int at = gate_at(g, job, batch, first_head + mine, r);
            gates[0][r] = static_cast<const __nv_bfloat16*>(g.b)[at];
            gates[1][r] = static_cast<const __nv_bfloat16*>(g.a)[at];
          }
          if constexpr (kDefers) __syncthreads();  // some may still read what is made anew
          if (gated < heads)
#pragma unroll
            for (int r = 0; r < kRows; ++r) {
              const float4 x = widened_four(z[r]);
              *reinterpret_cast<float4*>(&s.gates[r][gated][4 * lane]) = {front_weights.x * fast_silu(x.x),
                                                                          front_weights.y * fast_silu(x.y), back_weights.x * fast_silu(x.z),
                                                                          back_weights.y * fast_silu(x.w)};
            }
          if (converts) {
#pragma unroll
            for (int r = 0; r < kRows; ++r) {
              if (r >= rows) continue;
              float4 y{0, 0, 0, 0};
#pragma unroll
              for (int tap = 0; tap < 4; ++tap) {
                const float4 x = widened_four(batch.index + r - 3 + tap >= 0 ? raw[r + tap] : make_uint2(0, 0)), w = taps[tap];
                y = {fmaf(w.x, x.x, y.x), fmaf(w.y, x.y, y.y), fmaf(w.z, x.z, y.z), fmaf(w.w, x.w, y.w)};
              }
              y = {silu_as_bf16(y.x), silu_as_bf16(y.y), silu_as_bf16(y.z), silu_as_bf16(y.w)};
              if (is_common) {
                const float factor = rsqrtf(warp_sum(dot(y, y, 0.0f)) + 1e-6f) * (warp == 0 ? 1.0f : rsqrtf(static_cast<float>(kDim)));
                y = {y.x * factor, y.y * factor, y.z * factor, y.w * factor};
                if (warp == 0)
                  y = {round_to(DType::kBF16, y.x), round_to(DType::kBF16, y.y), round_to(DType::kBF16, y.z), round_to(DType::kBF16, y.w)};
                const SplitPair front = split(y.x, y.y), back = split(y.z, y.w);
                *reinterpret_cast<uint2*>(&s.parts[r][warp][4 * lane]) = {front.high, back.high};
                if (warp == 1) *reinterpret_cast<uint2*>(&s.parts[r][2][4 * lane]) = {front.low, back.low};
              } else {
                *reinterpret_cast<uint2*>(&s.v[r][warp - 2][4 * lane]) = {split(y.x, y.y).high, split(y.z, y.w).high};
              }
              if (job.keeps_at_once && (!is_common || job.keeps_keys))
                *reinterpret_cast<uint2*>(window_at(g, job, batch.index + r, channel)) = raw[r + 3];
            }
          }
          __syncthreads();

          // Keys of the rows themselves, and products of all with k and q.
          if (begins) {
            if (const int r = key_at - batch.first; r >= 0 && r < rows)
#pragma unroll
              for (int i = 0; i < 4; ++i) earlier[i] = *reinterpret_cast<const uint4*>(&s.parts[r][0][8 * (lane % 4) + 32 * i]);
            put_dots<kRows>(s, earlier, warp, lane);
            if (kKeysApart && batch.ends_chunk) {
#pragma unroll
              for (int i = 0; i < 4; ++i)
                *reinterpret_cast<uint4*>(reinterpret_cast<unsigned char*>(s.keys) + swizzled<kDim / 8>(key_at, lane % 4 + 4 * i)) =
                    earlier[i];
            }
            __syncwarp();
          }
          // Weights of updates, a position and head a lane.
          if (lane / 8 < heads) {
#pragma unroll
            for (int r = 0; r < kRows; ++r) {
              if (r >= rows) continue;
              const float beta = round_to(DType::kBF16, __fdividef(1.0f, 1.0f + expf(-__bfloat162float(gates[0][r]))));
              const float step = __fmul_rn(decay_rate, softplus(__bfloat162float(gates[1][r]) + dt_bias));
              total = batch.first + r > 0 ? __fadd_rn(total, step) : step;
              const float decay = mine_at < batch.first + r ? expf(total - sum_at) : 0.0f;
              const float dot_q = s.dots[r][1][mine_at] + s.dots[r][2][mine_at];
              if (mine_at == batch.first + r) {
                s.factors[r][mine] = {beta, expf(total), total, dot_q};
                sum_at = total;
              }
              const SplitPair both = split(decay == 0.0f ? 0.0f : decay * s.dots[r][0][mine_at], decay == 0.0f ? 0.0f : decay * dot_q);
              auto* to = reinterpret_cast<uint16_t*>(&s.weights[r][mine]) + weight_at(mine_at);
              to[0] = static_cast<uint16_t>(both.high);
              to[kChunk] = static_cast<uint16_t>(both.low);
              to[2 * kChunk] = static_cast<uint16_t>(both.high >> 16);
              to[3 * kChunk] = static_cast<uint16_t>(both.low >> 16);
            }
            if (batch.ends_chunk) s.fold_factors[mine][mine_at] = expf(total - sum_at);
          }
          __syncthreads();
        }

        for (int head = first_head; head < first_head + heads; ++head) {
          int thread = static_cast<int>(threadIdx.x);
          asm volatile("" : "+r"(thread));  // as above
          __builtin_assume(thread >= 0 && thread < kThreads);
          const int warp = thread / 32, lane = thread % 32, h = head - first_head;
          // Of sums over a head's 16 columns a lane keeps that of one: with k, or with q.
          const int my_column = lane / 4 + lane % 4 / 2 * 8, column = warp * kColumns + my_column;
          const bool has_q = lane % 2 == 1;
          // The next job is looked for beside the first head, and known to all at the last one's start. What is dealt takes a while to be
          // known.
          const bool dealt = (g.phases & kGdnDealt) != 0, looks = is_last && head == job.head && threadIdx.x == kFinder;
          int before = 0;
          if (looks && dealt) before = deal_one(g);
          if (looks && !dealt && jobs_of(g) > static_cast<int>(gridDim.x))
            find_next<kRows>(s.jobs[next_place()], s.numbers[next_place()], g, s.numbers[place()] + static_cast<int>(gridDim.x), false);
          if (job.end_head == job.head + 1 && is_last && jobs_of(g) > static_cast<int>(gridDim.x)) {
            if (looks && dealt) take_job(s, s.jobs[next_place()], s.numbers[next_place()], g, before, false);
            __syncthreads();
          }
          if (batch.base > boundary()) {  // rows that also end a chunk would be 60 or more behind: more than a verify may hold
            const int old_start = boundary() % (kChunk + g.k_max + 1);
            float old_sums[2];
#pragma unroll
            for (int half = 0; half < 2; ++half)
              old_sums[half] = g.ring_g[ring_row(g, job, old_start, lane + 32 * half) * g.num_v_heads + head];
            await_copies<0>();
            __syncwarp();
            begin_updates<kRows>(s, g, job, old_start, kChunk, head, warp, lane);  // in place of the new chunk's
            begin_lower(s, g, job.slot, head, warp, lane);
            commit_copies();
            if constexpr (kKeysApart) {
              __syncthreads();
              stage_keys(s, s.keys, g, job, old_start, kChunk);
            }
            await_copies<0>();
            __syncthreads();
            const float total = __shfl_sync(kAllLanes, old_sums[1], 31);
            const float factors[2] = {expf(total - old_sums[0]), expf(total - old_sums[1])};
            const Halves stored = halves_of(g, job.slot, head);
            fold<kKeysApart>(s, g, job, old_start, expf(total), factors, kChunk, stores_fold() ? &stored : nullptr, warp, lane);
            begin_updates<kRows>(s, g, job, batch.start, batch.first, head, warp, lane);
            commit_copies();
          }
          // Who looks for the next job has found it before the squares of that head were there.
          if (kDefers && head + 1 == job.end_head && head > job.head) await(s.squared[(s.turn[warp] - 1) % 2], (s.turn[warp] - 1) / 2 % 2);
          // What is copied next: of this job's next head, or of the next job's first.
          const bool goes_on = head + 1 < job.end_head, copies_next = goes_on || (is_last && s.numbers[next_place()] >= 0);
          const Job& next_job = goes_on ? job : s.jobs[next_place()];
          const int next_head = goes_on ? head + 1 : next_job.head;
          if (kRows > 1 && !goes_on && copies_next) prefetch_job(g, next_job);
          await_copies<1>();  // S; updates were begun after it
          __syncwarp();
          float y[kRows];
#pragma unroll 1
          for (int r = 0; r < rows; ++r) {
            const int position = batch.first + r;
            const bool ends_batch = kRows == 1 || r + 1 == rows;
            // Along the state.
            const float of_state = along_state(s.parts[r], has_q, lane, [&](int i, int half) {
              return *reinterpret_cast<const uint4*>(&s.upper[warp][lane / 4 + 8 * half][lane_place(lane, i)]);
            });
            if (ends_batch) {
              __syncwarp();
              if (copies_next && !batch.ends_chunk) begin_state(s, g, next_job.slot, next_head, warp, lane);
              commit_copies();
            }
            const Factors factors = s.factors[r][h];
            const float v = __bfloat162float(s.v[r][h][column]), gate = s.gates[r][h][column];
            if (r == 0) {
              if (ends_batch)
                await_copies<1>();
              else
                await_copies<0>();
              __syncwarp();
            }
            // Along the updates of earlier positions: a lane has the sums of its column in two terms.
            float sums[4] = {};
            const uint4 front = *reinterpret_cast<const uint4*>(&s.weights[r][h][lane / 4 % kTerms][lane % 4][0]),
                        back = *reinterpret_cast<const uint4*>(&s.weights[r][h][lane / 4 % kTerms][lane % 4][4]);
            const uint32_t weights[8] = {front.x, front.y, front.z, front.w, back.x, back.y, back.z, back.w};
            const uint32_t updates = shared_address(&s.updates[warp][lane / 16 * 8 + lane % 8][update_piece(lane % 8, lane / 8 % 2) * 8]);
#pragma unroll
            for (int step = 0; step < kChunk / 16; ++step) {
              if (16 * step >= position) continue;
              uint32_t u[4];
              load_matrices_transposed(u, updates + step * 16 * kColumns * sizeof(__nv_bfloat16));
              multiply_add(sums, u, weights[2 * step], weights[2 * step + 1]);
            }
            const auto [u, o] = finish_row(factors, v, of_state, sums, has_q, lane);
            if (!has_q) {
              static_cast<__nv_bfloat16*>(g.ring_u)[(ring_row(g, job, batch.start, position) * g.num_v_heads + head) * kDim + column] = u;
              if (kRows > 1 || batch.ends_chunk)  // for later rows and the fold
                s.updates[warp][position][update_piece(position, my_column / 8) * 8 + my_column % 8] = u;
            }
#pragma unroll
            for (int i = 0; i < kRows; ++i)
              if (i == r) y[i] = o * gate;
            float square = __fmul_rn(o, o);
#pragma unroll
            for (int distance = 2; distance <= 16; distance *= 2) square += __shfl_xor_sync(kAllLanes, square, distance);
            if (lane == 0) s.squares[kDefers ? s.turn[warp] % 4 : head % 2][r][warp] = square;
            __syncwarp();
          }
          if (batch.ends_chunk) {
            const float factors[2] = {s.fold_factors[h][lane], s.fold_factors[h][lane + 32]};
            const Halves stored = halves_of(g, job.slot, head);
            fold<kKeysApart>(s, g, job, batch.start, s.factors[rows - 1][h].decay, factors, batch.first, &stored, warp, lane);
            if (copies_next) begin_state(s, g, next_job.slot, next_head, warp, lane);
            commit_copies();
          }
          if (looks && dealt && goes_on) take_job(s, s.jobs[next_place()], s.numbers[next_place()], g, before, false);
          if (copies_next) {
            if (goes_on)
              begin_batch<kRows>(s, g, job, batch, next_head, warp, lane);
            else
              begin_batch<kRows>(s, g, next_job, next_job.begin, next_head, warp, lane);
          }
          commit_copies();
          const int row = job.first_row + batch.index - job.cursor;
          if constexpr (kDefers) {
            const unsigned turn = s.turn[warp];
            __syncwarp();
            if (lane == 0) {
              arrive(s.squared[turn % 2]);
              s.turn[warp] = turn + 1;
            }
            __syncwarp();
            if (turn > 0) let_go(turn - 1);
            held = y[0];
            held_at = (row * g.num_v_heads + head) * kDim + column;
            if (threadIdx.x == 0) g.ring_g[ring_row(g, job, batch.start, batch.first) * g.num_v_heads + head] = s.factors[0][h].total;
            continue;
          }
          __syncthreads();
#pragma unroll
          for (int r = 0; r < kRows; ++r) {
            if (r >= rows) continue;
            const float scale = norm_factor(s.squares[head % 2][r], g.eps);
            if (has_q)
              static_cast<__nv_bfloat16*>(g.out)[((row + r) * g.num_v_heads + head) * kDim + column] = __float2bfloat16_rn(y[r] * scale);
          }
          if (const int r = static_cast<int>(threadIdx.x); r < rows)
            g.ring_g[ring_row(g, job, batch.start, batch.first + r) * g.num_v_heads + head] = s.factors[r][h].total;
        }
      }
      // No head reads what these overwrite any more, and warp 0 makes the next k.
      if (const int lane = static_cast<int>(threadIdx.x); lane < 32 && job.keeps_keys)
        for (int r = 0; r < rows; ++r)
          *reinterpret_cast<uint2*>(static_cast<__nv_bfloat16*>(g.ring_k) +
                                    (ring_row(g, job, batch.start, batch.first + r) * g.num_k_heads + job.k_head) * kDim + 4 * lane) =
              *reinterpret_cast<const uint2*>(&s.parts[r][0][4 * lane]);
      if constexpr (kRows > 1) {
        if (batch.base > boundary_now && stores_fold()) boundary_now = batch.base;
        if (batch.ends_chunk) boundary_now = batch.base + kChunk;
        index += rows;
        if (index < job.end) {
          __threadfence();
          __syncthreads();
          const Batch next = batch_at<kRows>(g, job, index);
          const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
          begin_state(s, g, job.slot, job.head, warp, lane);
          commit_copies();
          begin_batch<kRows>(s, g, job, next, job.head, warp, lane);
          commit_copies();
        }
      }
    } while (kRows > 1 && index < job.end);
    if (!job.keeps_at_once) keep_columns(g, job);
    const int next = next_place();
    __syncwarp();
    s.place[threadIdx.x / 32] = next;
    __syncwarp();
  }
  if constexpr (kDefers)
    if (s.turn[threadIdx.x / 32] > 0) let_go(s.turn[threadIdx.x / 32] - 1);
  await_copies<0>();
  await_predecessor();
  leave_counts<true>(g);
}

}  // namespace

// Rows at a time, heads prepared at a time, keys apart.
#define QUERN_GDN_DECODE(name, shared_bytes, rows, heads, apart)     \
  static_assert(sizeof(Shared<rows, heads, apart>) <= shared_bytes); \
  extern "C" __global__ void __launch_bounds__(kThreads, 2) name(const __grid_constant__ GdnArgs g) { decode<rows, heads, apart>(g); }
QUERN_GDN_DECODE(gdn_decode_1_bf16, kGdnDecodeSharedBytesBF16, 1, 4, true)
QUERN_GDN_DECODE(gdn_decode_4_bf16, kGdnDecodeSharedBytesBF16, 4, 4, false)
QUERN_GDN_DECODE(gdn_decode_1_bf16_small, kGdnDecodeSharedBytesBF16Small, 1, 4, false)
QUERN_GDN_DECODE(gdn_decode_4_bf16_small, kGdnDecodeSharedBytesBF16Small, 4, 1, false)

}  // namespace quern::cuda
