#include "backends/cuda/gdn_decode.cuh"
#include "backends/cuda/ptx_sm90.cuh"

// Single decode rows of many sequences on Hopper. A block stays on its multiprocessor and takes the heads of runs one after the other; a warp of its own brings what
// the next ones need: two states ahead, the chunk's keys and values as soon as those of the head before are done with (and to L2 before that), all else one ahead.
// So the memory is busy while a head is computed. What is computed, and every bit of it, is gdn_decode.cu's.

namespace quern::cuda {

namespace {

using namespace gdn;
namespace hopper = sm90;

/// A head of a run.
struct Item {
  int slot, first_row, cursor, boundary, head, k_head;  // slot < 0: there is no more
  int committed, first_of_key;
  float beta, decay_log;

  [[nodiscard]] __device__ Place place(const GdnArgs& g) const {
    return {slot, first_row, cursor, cursor + 1, head, k_head, (2 * g.num_k_heads + g.num_v_heads) * kDim, static_cast<int>(kGrid) + g.k_max + 1, 3 + g.k_max + 1};
  }
  /// Rows of the ring that are brought.
  [[nodiscard]] __device__ int ring_rows() const { return min(static_cast<int>(kGrid), cursor - boundary); }
};
struct alignas(16) Inputs {
  float taps[4][3 * kDim];
  __nv_bfloat16 columns[4][3 * kDim];
  __nv_bfloat16 z[1][kDim];
  Item item;
};
template <class Ring>
struct alignas(16) Memory {
  float state[2][kDim * kDim];
  Ring k[kGrid][kKeyStride<Ring>];
  Ring u[kGrid][kValueStride<Ring>];
  Inputs inputs[2];
  float sums[kGrid];
  float factors[kGrid];
  float q[1][kDim];
  float along_k[1][kGrid];
  float along_q[1][kGrid];
  float squares[1][kWarps];
  float beta[1];
  uint64_t state_full[2], state_empty[2], inputs_full[2], inputs_empty[2], ring_full, ring_empty;
};

__device__ inline uint32_t at(const void* place) { return hopper::shared_address(place); }

/// Goes along the heads that this block takes. All lanes of a warp.
struct Walk {
  const GdnArgs& g;
  int next, end, run = -1;
  RunRecord record{};
  int cursor = 0, boundary = 0;

  __device__ explicit Walk(const GdnArgs& args) : g(args) {
    const int64_t total = int64_t{g.step.num_runs} * g.num_v_heads;
    next = static_cast<int>(total * blockIdx.x / gridDim.x);
    end = static_cast<int>(total * (blockIdx.x + 1) / gridDim.x);
  }
  /// False: there is no more.
  __device__ bool take(Item& item) {
    while (next < end) {
      const int number = next / g.num_v_heads, head = next % g.num_v_heads;
      if (number != run) {
        run = number;
        record = g.step.runs[number];
        if (record.slot >= 0) cursor = g.step.cursor[record.slot], boundary = g.step.boundary[record.slot];
      }
      if (record.slot < 0 || record.num_rows == 0 || (record.flags & kIsDecode) == 0) {
        next = (number + 1) * g.num_v_heads;
        continue;
      }
      ++next;
      const int k_head = g.k_head[head];
      bool earlier = false;
      for (int other = static_cast<int>(threadIdx.x) % 32; other < head; other += 32) earlier = earlier || g.k_head[other] == k_head;
      item = {record.slot, record.first_row, cursor, boundary, head, k_head, (record.flags & kIsCommitted) != 0, !__any_sync(kAllLanes, earlier), 0, 0};
      return true;
    }
    return false;
  }
};

/// The copying warp.
template <class Ring>
struct Copier {
  const GdnArgs& g;
  Memory<Ring>& m;
  int lane;

  static constexpr int kRowBytes = kDim * sizeof(Ring);
  [[nodiscard]] __device__ const Ring* key(const Item& item, int j) const {
    return static_cast<const Ring*>(g.ring_k) + (item.place(g).ring_row(item.boundary + j) * g.num_k_heads + item.k_head) * kDim;
  }
  [[nodiscard]] __device__ const Ring* value(const Item& item, int j) const {
    return static_cast<const Ring*>(g.ring_u) + (item.place(g).ring_row(item.boundary + j) * g.num_v_heads + item.head) * kDim;
  }

  __device__ void copy_state(const Item& item, int number) const {
    const int stage = number % 2;
    for (int j = lane; j < item.ring_rows(); j += 32) {
      hopper::prefetch_to_l2(key(item, j), kRowBytes);
      hopper::prefetch_to_l2(value(item, j), kRowBytes);
    }
    hopper::barrier_wait(at(&m.state_empty[stage]), number / 2 % 2 ^ 1);
    if (lane != 0) return;
    hopper::barrier_expect(at(&m.state_full[stage]), sizeof m.state[0]);
    hopper::bulk_copy_once(at(m.state[stage]), g.state + (int64_t{item.slot} * g.num_v_heads + item.head) * kDim * kDim, sizeof m.state[0], at(&m.state_full[stage]));
  }

  __device__ void copy_ring(const Item& item, int number) const {
    hopper::barrier_wait(at(&m.ring_empty), number % 2 ^ 1);
    const int rows = item.ring_rows();
    const uint32_t full = at(&m.ring_full);
    if (lane == 0) hopper::barrier_expect(full, 2 * rows * kRowBytes);
    __syncwarp();
    for (int j = lane; j < rows; j += 32) {
      hopper::bulk_copy(at(m.k[j]), key(item, j), kRowBytes, full);
      hopper::bulk_copy(at(m.u[j]), value(item, j), kRowBytes, full);
      copy_async_word(&m.sums[j], g.ring_g + item.place(g).ring_row(item.boundary + j) * g.num_v_heads + item.head);
    }
    hopper::arrive_after_copies(full);
  }

  __device__ void copy_inputs(Item item, int number) const {
    const int stage = number % 2;
    Inputs& to = m.inputs[stage];
    const uint32_t full = at(&m.inputs_full[stage]);
    const Place p = item.place(g);
    const int64_t gate = int64_t{item.first_row} * g.num_v_heads + item.head;
    item.beta = round_to(DType::kBF16, sigmoid(__bfloat162float(static_cast<const __nv_bfloat16*>(g.b)[gate])));
    item.decay_log = __fmul_rn(g.decay[item.head], softplus(__bfloat162float(static_cast<const __nv_bfloat16*>(g.a)[gate]) + g.dt_bias[item.head]));
    hopper::barrier_wait(at(&m.inputs_empty[stage]), number / 2 % 2 ^ 1);
    const int first = max(0, 3 - item.cursor);  // raw columns before the sequence's start are not there
    if (lane == 0) {
      to.item = item;
      hopper::barrier_expect(full, 12 * kDim * sizeof(float) + ((4 - first) * 3 + 1) * kDim * sizeof(__nv_bfloat16));
    }
    __syncwarp();
    const int part = lane % 12 % 3, i = lane % 12 / 3;
    if (lane < 12)
      hopper::bulk_copy(at(&to.taps[i][part * kDim]), g.conv + i * p.channels + p.channel(g, part), kDim * sizeof(float), full);
    else if (lane < 24 && i >= first)
      hopper::bulk_copy(at(&to.columns[i][part * kDim]), p.columns(g, item.cursor - 3 + i) + p.channel(g, part), kDim * sizeof(__nv_bfloat16), full);
    else if (lane == 24)
      hopper::bulk_copy(at(to.z), static_cast<const __nv_bfloat16*>(g.z) + gate * kDim, kDim * sizeof(__nv_bfloat16), full);
  }

  __device__ void run() const {
    Walk walk(g);
    Item item;
    bool some = walk.take(item);
    if (some) {  // state and ring are of the step before
      copy_state(item, 0);
      copy_ring(item, 0);
    }
    if (lane == 0) prefetch_share(g.prefetch, static_cast<int>(blockIdx.x), static_cast<int>(gridDim.x));
    await_predecessor();
    hopper::fence_async_proxy_all();
    int number = 0;
    for (; some; ++number) {
      Item after;
      const bool more = walk.take(after);
      if (more) copy_state(after, number + 1);
      copy_inputs(item, number);
      if (number > 0) copy_ring(item, number);
      item = after;
      some = more;
    }
    hopper::barrier_wait(at(&m.inputs_empty[number % 2]), number / 2 % 2 ^ 1);
    if (lane == 0) {
      m.inputs[number % 2].item.slot = -1;
      hopper::barrier_arrive(at(&m.inputs_full[number % 2]));
    }
  }
};

template <class Ring>
__device__ void compute(const GdnArgs& g, Memory<Ring>& m) {
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32, column = warp * kColumns;
  const auto barrier = [] { hopper::named_barrier<1, kThreads>(); };
  const float norm_weight = g.norm[column + lane / 4];
  await_predecessor();
  for (int number = 0;; ++number) {
    const int stage = number % 2, parity = number / 2 % 2;
    Inputs& inputs = m.inputs[stage];
    hopper::barrier_wait(at(&m.inputs_full[stage]), parity);
    const Item item = inputs.item;
    if (item.slot < 0) return;
    const Place p = item.place(g);
    const Chunk<Ring> s{m.k, m.u, m.sums, m.factors, inputs.taps, inputs.columns, inputs.z, m.q, m.along_k, m.along_q, m.beta, m.squares};
    float4 state[kColumns];
    hopper::barrier_wait(at(&m.state_full[stage]), parity);
#pragma unroll
    for (int c = 0; c < kColumns; ++c) state[c] = four(&m.state[stage][(column + c) * kDim + 4 * lane]);
    __syncwarp();
    if (lane == 0) hopper::barrier_arrive(at(&m.state_empty[stage]));
    const auto store_state = [&] {
      float* stored = g.state + ((int64_t{p.slot} * g.num_v_heads + p.head) * kDim + column) * kDim + 4 * lane;
#pragma unroll
      for (int c = 0; c < kColumns; ++c) put_four(stored + c * kDim, state[c]);
    };
    hopper::barrier_wait(at(&m.ring_full), number % 2);
    int boundary = item.boundary;
    if (boundary + kGrid <= p.cursor) {
      fold(s, state, warp, lane, barrier);
      store_state();
      boundary += static_cast<int>(kGrid);
      read_ring(g, p, s, boundary, p.cursor - boundary);
      await_copies<0>();
      barrier();
    }
    const int first = p.cursor - boundary;
    if (threadIdx.x == 0) {
      s.sums[first] = first > 0 ? __fadd_rn(s.sums[first - 1], item.decay_log) : item.decay_log;
      s.beta[0] = item.beta;
    }
    compute_rows<1>(g, p, s, state, {p.cursor, 1, p.first_row, first, true, item.first_of_key != 0}, norm_weight, barrier);
    if (item.committed != 0 && p.end == boundary + kGrid) {
      fold(s, state, warp, lane, barrier);
      store_state();
    }
    keep_boundary_columns(g, p, item.committed != 0, item.first_of_key != 0);
    hopper::fence_async_proxy();  // the next copies overwrite what was written here
    __syncwarp();
    if (lane == 0) {
      hopper::barrier_arrive(at(&m.ring_empty));
      hopper::barrier_arrive(at(&m.inputs_empty[stage]));
    }
  }
}

template <class Ring>
__device__ void stream(const GdnArgs& g) {
  extern __shared__ __align__(16) unsigned char memory[];
  auto& m = *reinterpret_cast<Memory<Ring>*>(memory);
  if (threadIdx.x == kThreads) {
    for (int stage = 0; stage < 2; ++stage) {
      hopper::barrier_init(at(&m.state_full[stage]), 1);
      hopper::barrier_init(at(&m.state_empty[stage]), kWarps);
      hopper::barrier_init(at(&m.inputs_full[stage]), 1);
      hopper::barrier_init(at(&m.inputs_empty[stage]), kWarps);
    }
    hopper::barrier_init(at(&m.ring_full), 1 + 32);
    hopper::barrier_init(at(&m.ring_empty), kWarps);
    hopper::fence_barrier_init();
    release_successor();
  }
  __syncthreads();
  if (threadIdx.x >= kThreads)
    Copier<Ring>{g, m, static_cast<int>(threadIdx.x) % 32}.run();
  else
    compute(g, m);
}

}  // namespace

static_assert(sizeof(Memory<float>) <= kGdnStreamSharedBytes && kThreads + 32 == kGdnStreamThreads);

// The ring's dtype.
extern "C" __global__ void __launch_bounds__(kGdnStreamThreads, 1) gdn_stream_f32(const __grid_constant__ GdnArgs g) { stream<float>(g); }
extern "C" __global__ void __launch_bounds__(kGdnStreamThreads, 1) gdn_stream_bf16(const __grid_constant__ GdnArgs g) { stream<__nv_bfloat16>(g); }

}  // namespace quern::cuda
