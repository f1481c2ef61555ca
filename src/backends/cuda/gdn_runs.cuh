#pragma once

#include "backends/cuda/gdn_mix_args.h"
#include "backends/cuda/numeric.cuh"

// How GDN kernels find the runs of a step and their raw columns. Device code only.

namespace quern::cuda {

struct Run {
  int64_t slot, first_row, cursor, end;  // rows stand at the indices [cursor, end)
  bool committed;
};
/// The run of that number; empty where it is padding or of a kind that the launch does not compute.
__device__ inline Run run_of(const GdnArgs& g, int number) {
  const RunRecord record = g.step.runs[number];
  const int32_t kind = (record.flags & kIsDecode) != 0 ? kGdnDecode : kGdnPrompt;
  if (record.slot < 0 || record.num_rows == 0 || (kind & g.kinds) == 0) return {0, 0, 0, 0, false};
  const int64_t cursor = g.step.cursor[record.slot];
  return {record.slot, record.first_row, cursor, cursor + record.num_rows, (record.flags & kIsCommitted) != 0};
}

/// With kGdnToGrid: the rows of a prompt run up to the next grid point. Drafts, whose fold is not stored, stay as they are.
__device__ inline Run to_grid(const GdnArgs& g, Run run) {
  const int64_t next = (run.cursor + kGrid - 1) / kGrid * kGrid;
  if ((g.phases & kGdnToGrid) != 0 && run.committed && next < run.end) run.end = next;
  return run;
}
/// Of the value heads that share a k head, one keeps the keys.
__device__ inline bool first_of_key(const GdnArgs& g, int head) {
  for (int other = 0; other < head; ++other)
    if (g.k_head[other] == g.k_head[head]) return false;
  return true;
}

__device__ inline int64_t channels_of(const GdnArgs& g) { return 2 * int64_t{g.num_k_heads} * g.d_k + int64_t{g.num_v_heads} * g.d_v; }
__device__ inline int64_t ring_row(const GdnArgs& g, int64_t slot, int64_t index) {
  const int64_t length = kGrid + g.k_max + 1;
  return slot * length + index % length;
}

/// The raw column of an index: in the step's rows, in the window, or nothing before the sequence's start.
__device__ inline float raw(const GdnArgs& g, const Run& run, int64_t index, int64_t channel) {
  if (index < 0) return 0.0f;
  const int64_t channels = channels_of(g), window = 3 + g.k_max + 1;
  if (index >= run.cursor) return load(g.qkv, g.activation, (run.first_row + index - run.cursor) * channels + channel);
  return load(g.conv_window, g.activation, (run.slot * window + index % window) * channels + channel);
}

}  // namespace quern::cuda
