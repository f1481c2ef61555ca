#pragma once

#include <algorithm>
#include <cstdint>
#include <span>

#include "ops/tensor.h"

// The rows of one step and the tables of sequences as kernels see them (architecture.md sections 3 and 4).

namespace quern::ops {

/// Ring length = GDN chunk = KV block = snapshot grid, counted from the start of the sequence.
inline constexpr int64_t kGrid = 64;
/// Attention splits its keys every 512 tokens from the sequence's start and merges the parts in order.
inline constexpr int64_t kKvSplit = 512;

/// P: prompt rows. D: decode and verify rows. The kernel is chosen by kind and weight shape, never by the number of rows.
enum class RowKind : uint8_t { kPrompt, kDecode };

/// Consecutive rows of one sequence. Row i of the run stands at index cursor[slot] + i of the sequence. A run of no rows is padding; its slot is -1.
struct RowRun {
  int32_t slot = 0;
  int32_t first_row = 0;  // in the step's activations
  int32_t num_rows = 0;
  RowKind kind = RowKind::kPrompt;
  bool committed = true;  // false: all rows but the first are drafts, and the step stores no fold past the cursor
};

/// Values that the device owns, one entry a slot.
struct SlotTables {
  TensorView cursor;            // i32 [num_slots]: tokens whose rows are committed
  TensorView boundary;          // i32 [num_slots]: the boundary at which the stored recurrent state stands, a multiple of 64, <= cursor
  TensorView last_token;        // i32 [num_slots]: the token at index cursor, sampled but not yet computed
  TensorView position_delta;    // i32 [num_slots]: mrope position of a decode row minus its index
  TensorView drafts;            // i32 [num_slots, k_max]: proposed ids for the indices cursor + 1 ...
  TensorView block_tables;      // i32 [num_slots, max_blocks]: KV block of the indices 64 b .. 64 b + 63
};

/// A RowRun as the device reads it.
struct RunEntry {
  int32_t slot = -1, first_row = 0, num_rows = 0;
  int32_t flags = 0;  // kRunIsDecode | kRunIsCommitted
};
inline constexpr int32_t kRunIsDecode = 1, kRunIsCommitted = 2;
inline constexpr int64_t kRunFields = sizeof(RunEntry) / sizeof(int32_t);
constexpr RunEntry to_entry(const RowRun& run) {
  return {run.slot, run.first_row, run.num_rows, (run.kind == RowKind::kDecode ? kRunIsDecode : 0) | (run.committed ? kRunIsCommitted : 0)};
}
/// The host's half of the tables of Rows: entries [runs.size()], and in row_runs the number of each row's run, -1 where none is.
inline void fill_run_tables(std::span<const RowRun> runs, std::span<RunEntry> entries, std::span<int32_t> row_runs) {
  std::fill(row_runs.begin(), row_runs.end(), -1);
  for (size_t r = 0; r < runs.size(); ++r) {
    entries[r] = to_entry(runs[r]);
    std::fill_n(row_runs.begin() + runs[r].first_row, runs[r].num_rows, static_cast<int32_t>(r));
  }
}

/// The step's rows, as device tables: a launch may be recorded once and replayed for other rows of the same extent, so its arguments are extents and the addresses
/// of these tables. `runs` repeats run_table on the host, for extents (how many runs, how long); only a device that never replays may read more of it.
/// A row whose index is -1 is padding: no state, KV or table changes for it, and its outputs mean nothing. Within a run such rows stand at the end.
struct Rows {
  int32_t num_rows = 0;
  std::span<const RowRun> runs;
  // Written by the host for each step.
  TensorView run_table;      // i32 [num_runs, kRunFields]: RunEntry
  TensorView row_runs;       // i32 [num_rows]: the run of each row; -1: padding
  TensorView given_tokens;   // i32 [num_rows]: the id; -1: row 0 of a run is last_token[slot], row i the draft i - 1
  TensorView run_positions;  // i32 [num_runs, 3]: P: (t, h, w) of the first row, all three advance by one a row. D: unused, index + position_delta
  // Filled on the device, by `embed` or `draft_rows`.
  TensorView tokens;         // i32 [num_rows]
  TensorView indices;        // i32 [num_rows]: index in the sequence, which is also the KV slot; -1: padding
  TensorView positions;      // i32 [num_rows, 3]: (t, h, w)
  SlotTables slots;
};

/// KV of one attention layer: [num_blocks, num_kv_heads, 64, head_dim] in f32, bf16 or e4m3.
struct KvCacheView {
  TensorView k, v;
  TensorView k_scale, v_scale;  // f32 [num_kv_heads], stored value = e4m3(x / scale); read for e4m3 only, empty: 1.0
};

/// Recurrent state of one GDN layer (architecture.md section 4). R = 64 + k_max + 1; W = 3 + k_max + 1.
/// Ring rows and window columns of index p stand at p mod R and p mod W.
struct GdnStateView {
  TensorView state;             // f32 [num_slots, num_v_heads, d_v, d_k]: S transposed, at `boundary`, in the kernel's GdnStateLayout
  TensorView ring_k;            // f32 or bf16 [num_slots, R, num_k_heads, d_k]: l2-normalized k
  TensorView ring_u;            // f32 or bf16 [num_slots, R, num_v_heads, d_v]
  TensorView ring_g;            // f32 [num_slots, R, num_v_heads]: G, the sum of g since the boundary below the row
  TensorView conv_window;       // activation dtype [num_slots, W, channels]: raw (pre-conv) columns
  TensorView boundary_columns;  // activation dtype [num_slots, 3, channels]: the columns boundary - 3 .. boundary - 1
};

}  // namespace quern::ops
