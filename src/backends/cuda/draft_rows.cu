#include "backends/cuda/async.cuh"
#include "backends/cuda/draft_rows_args.h"
#include "backends/cuda/numeric.cuh"

namespace quern::cuda {

/// One block: first every row is padding, then each run's rows are placed.
extern "C" __global__ void draft_first(const __grid_constant__ DraftFirstArgs args) {
  release_successor();
  await_predecessor();
  const StepTables& s = args.step;
  for (int row = static_cast<int>(threadIdx.x); row < s.num_rows; row += static_cast<int>(blockDim.x)) {
    args.tokens[row] = 0;
    args.indices[row] = -1;
    for (int axis = 0; axis < 3; ++axis) args.positions[3 * row + axis] = 0;
  }
  __syncthreads();
  const int warps = static_cast<int>(blockDim.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  for (int r = static_cast<int>(threadIdx.x) / 32; r < s.num_runs; r += warps) {  // a warp a run
    const DraftRecord draft = args.drafts[r];
    const RunRecord run = s.runs[r];
    int last_row = -1;
    if (draft.slot >= 0 && draft.fill != 0 && args.non_finite[r] == 0) {
      const int32_t* tokens = args.sampled + int64_t{r} * (args.k_max + 1);
      const int num_tokens = args.num_sampled[r];
      const bool verify = (run.flags & kIsCommitted) == 0;
      const int num_committed = verify ? num_tokens : run.num_rows;
      const int after = num_tokens > 0 ? tokens[num_tokens - 1] : draft.following_token;
      const int num_pairs = after >= 0 ? num_committed : num_committed - 1;
      for (int p = lane; p < num_pairs; p += 32) {
        const int row = run.first_row + p;
        int token = after;
        if (p + 1 < num_committed) token = verify ? tokens[p] : s.tokens[row + 1];
        args.tokens[row] = token;
        args.indices[row] = s.indices[row] + 1;
        for (int axis = 0; axis < 3; ++axis) args.positions[3 * row + axis] = s.positions[3 * row + axis] + 1;
      }
      if (draft.depth > 0 && num_pairs > 0) last_row = run.first_row + num_pairs - 1;
    }
    if (lane == 0) args.last_rows[r] = last_row;
  }
}

/// A block a run.
extern "C" __global__ void draft_next(const __grid_constant__ DraftNextArgs args) {
  release_successor();
  await_predecessor();
  const int r = static_cast<int>(blockIdx.x);
  const DraftRecord draft = args.drafts[r];
  const int row = args.last_rows[r];
  const bool goes_on = row >= 0 && draft.depth > args.pass + 1;
  constexpr int kAtOnce = 8;  // elements of a thread whose loads do not wait for each other
  const int threads = static_cast<int>(blockDim.x);
  for (int first = static_cast<int>(threadIdx.x); first < args.width; first += kAtOnce * threads) {
    float values[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int at = first + i * threads;
      values[i] = goes_on && at < args.width ? load(args.hidden, args.activation, int64_t{row} * args.width + at) : 0.0f;
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i)
      if (const int at = first + i * threads; at < args.width)
        store(args.hidden_out, args.activation, int64_t{r} * args.width + at, values[i]);
  }
  __syncthreads();  // every thread has read last_rows
  if (threadIdx.x != 0) return;
  const int id = args.ids[r];
  if (row >= 0) {
    args.slot_drafts[int64_t{draft.slot} * args.drafts_stride + args.pass] = id;
    args.proposed[int64_t{r} * args.k_max + args.pass] = id;
  }
  args.last_rows[r] = goes_on ? r : -1;
  args.tokens[r] = goes_on ? id : 0;
  args.indices[r] = goes_on ? args.before_indices[row] + 1 : -1;
  for (int axis = 0; axis < 3; ++axis) args.positions[3 * r + axis] = goes_on ? args.before_positions[3 * row + axis] + 1 : 0;
}

}  // namespace quern::cuda
