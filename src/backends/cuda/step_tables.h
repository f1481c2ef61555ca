#pragma once

#include <cstdint>

// The tables of a step (ops/rows.h) as device code reads them.

namespace quern::cuda {

inline constexpr int64_t kGrid = 64;      // ops::kGrid
inline constexpr int64_t kKvSplit = 512;  // ops::kKvSplit

/// ops::RunEntry
struct RunRecord {
  int32_t slot, first_row, num_rows, flags;
};
inline constexpr int32_t kIsDecode = 1, kIsCommitted = 2;

struct StepTables {
  int32_t num_rows, num_runs;
  const RunRecord* runs;         // [num_runs]
  const int32_t* row_runs;       // [num_rows]
  const int32_t* given_tokens;   // [num_rows]
  const int32_t* run_positions;  // [num_runs, 3]
  int32_t* tokens;               // [num_rows]
  int32_t* indices;              // [num_rows]
  int32_t* positions;            // [num_rows, 3]
  // By slot.
  const int32_t* cursor;
  const int32_t* boundary;
  const int32_t* last_token;
  const int32_t* position_delta;
  const int32_t* drafts;         // [., drafts_stride]
  const int32_t* block_tables;   // [., block_tables_stride]
  int32_t drafts_stride, block_tables_stride;
};

/// Memory that the blocks of a launch bring into the L2 cache for the next one, each a share. Nothing: no bytes.
struct Prefetch {
  const void* address = nullptr;  // 16-byte aligned
  int64_t bytes = 0;              // a multiple of 16
};

}  // namespace quern::cuda
