#include "backends/cuda/async.cuh"
#include "backends/cuda/embed_args.h"
#include "backends/cuda/numeric.cuh"

namespace quern::cuda {

/// One thread a row.
extern "C" __global__ void resolve_rows(const __grid_constant__ ResolveArgs args) {
  release_successor();
  await_predecessor();
  const StepTables& s = args.step;
  const int row = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  if (row >= s.num_rows) return;
  const int run_number = s.row_runs[row];
  if (run_number < 0) {
    s.tokens[row] = 0;
    s.indices[row] = -1;
    for (int axis = 0; axis < 3; ++axis) s.positions[row * 3 + axis] = 0;
    return;
  }
  const RunRecord run = s.runs[run_number];
  const int i = row - run.first_row, index = s.cursor[run.slot] + i;
  int token = s.given_tokens[row];
  if (token < 0) token = i == 0 ? s.last_token[run.slot] : s.drafts[int64_t{run.slot} * s.drafts_stride + i - 1];
  s.tokens[row] = token;
  s.indices[row] = index;
  const bool decode = (run.flags & kIsDecode) != 0;
  for (int axis = 0; axis < 3; ++axis)
    s.positions[row * 3 + axis] = decode ? index + s.position_delta[run.slot] : s.run_positions[run_number * 3 + axis] + i;
}

/// blockIdx: (row, piece of it); a thread has an element. An id that no rank has gives NaN, which the sampler reports.
extern "C" __global__ void lookup_rows(const __grid_constant__ LookupArgs args) {
  constexpr int64_t kScaleBlock = 128;
  release_successor();
  await_predecessor();
  const Weight& table = args.table;
  const int64_t id = args.tokens[blockIdx.x], token = id - args.first_id, width = table.in_features, out = int64_t{blockIdx.x} * width;
  const bool known = token >= 0 && token < table.out_features;
  const int64_t i = int64_t{blockIdx.y} * blockDim.x + threadIdx.x;
  if (i >= width) return;
  float x = id >= 0 && id < args.num_ids ? 0.0f : __int_as_float(0x7fc00000);
  if (known) {
    x = load(table.data, table.dtype, token * width + i);
    if (table.scales == Weight::Scales::kBlock) {
      const int64_t columns = (table.offsets->column + width + kScaleBlock - 1) / kScaleBlock;
      x *= table.scale[(table.offsets->row + token) / kScaleBlock * columns + (table.offsets->column + i) / kScaleBlock];
    } else if (table.scales != Weight::Scales::kNone) {
      x *= table.scale[table.scales == Weight::Scales::kChannel ? token : 0];
    }
  }
  store(args.out, args.activation, out + i, x);
}

}  // namespace quern::cuda
