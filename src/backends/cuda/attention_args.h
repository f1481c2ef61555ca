#pragma once

#include "backends/cuda/linear_args.h"
#include "backends/cuda/step_tables.h"
#include "backends/cuda/tensor_map.h"

namespace quern::cuda {

/// KV of one layer: [num_blocks, num_kv_heads, 64, head_dim].
struct KvCache {
  void *k, *v;
  const float *k_scale, *v_scale;  // [num_kv_heads] or null: 1.0; e4m3 only
  DType dtype;
};

inline constexpr int kMaxHeadDim = 512;

/// q/k norm, rotary embedding, and the KV write of rows that were projected.
struct RotateArgs {
  StepTables step;  // of the whole step
  int32_t first_row, num_q_heads, num_kv_heads, head_dim, num_frequencies;
  DType activation;
  float eps, rope_scale;
  const void *q, *k, *v;                // of the rows from first_row on: [., num_q_heads * 2 * head_dim], [., num_kv_heads * head_dim]
  const float *q_norm, *k_norm;         // factors [head_dim]
  const float* inv_freq;                // [num_frequencies]
  const int32_t* axis;                  // [num_frequencies]: which of the positions (t, h, w)
  void *query, *gate;                   // [rows, num_q_heads, head_dim] of the step
  KvCache kv;
};

inline constexpr int kRotatedHeads = 4;  // a block of rotate_heads_256

/// A job of decode rows (attention_decode.cu) that no block has as a whole.
struct SplitJob {
  int32_t job;                          // -1: none
  int32_t position, total;              // of its first tile among those of all jobs, and how many these are
  int32_t kv_head, first_row, num_rows; // rows of the step
  int32_t first, last;                  // tiles
};

struct AttentionArgs {
  StepTables step;
  int32_t num_q_heads, num_kv_heads, head_dim, first_index;
  DType activation;
  const void *query, *gate;   // [rows, num_q_heads, head_dim]
  void* out;
  const int32_t* kv_head;     // [num_q_heads]
  KvCache kv;
  // Of the kernels in attention_decode.cu.
  const int32_t* heads;              // [num_kv_heads + 1]: where in this table the query heads of each kv head begin, and where the last ones' end; then these, [num_q_heads]
  int32_t num_blocks;                // of the launch
  int32_t rows_per_group, max_groups;  // rows of a run that are computed together, and groups of the longest run
  int32_t num_jobs;                  // runs * max_groups * num_kv_heads
  int32_t lanes;                     // rows and query heads of a job, at most
  int32_t max_slots;                 // of results that are left to attention_merge
  SplitJob* split_jobs;              // of each job, or where there are more jobs than blocks of each block: the one that it began and did not finish
  float* slots;                      // [max_slots, lanes, head_dim]: weighted values
  float* slot_sums;                  // [max_slots, lanes, 2]: their maximum and sum
  int32_t* relay;                    // of attention_decode_many [num_blocks, 2], zeros before and after each launch: whether a block has left what it has of a part, and of a job
  Prefetch next;
};

/// A launch whose rows are taken together or each by itself, as contexts are long or short; num_blocks are the same.
struct AttentionEitherArgs {
  AttentionArgs together, apart;
};

/// A launch of the kernels in attention_prompt_sm90.cu.
struct AttentionPromptArgs {
  AttentionArgs attention;
  TensorMap k, v;  // of a bf16 cache: [4 images of 64 columns, num_blocks * num_kv_heads * 64 rows, 64]; a box is all images of 64 rows
};

/// Dynamic shared memory of the kernels in attention_mma.cu, and the rows of a prompt tile.
inline constexpr int kPromptSharedBytes = 96 << 10, kPromptTileRows = 128;
/// The kernels in attention_decode.cu, for jobs of 8 and 24 rows and heads: slices of 4 KB of each of the four warps' rings, dynamic shared memory, and how many blocks fit a multiprocessor of sm_90a, in whose code (`hopper`)
/// rings are longer. In all other code two blocks fit one of sm_80, and one those that have 100 KB.
constexpr int decode_ring_slices(int columns, bool codes, bool hopper) { return hopper && (columns > 8 || !codes) ? 6 : 4; }
constexpr int decode_shared_bytes(int columns, bool codes, bool hopper) { return decode_ring_slices(columns, codes, hopper) * (16 << 10) + ((columns > 8 ? 17 : codes ? 8 : 10) << 10); }
constexpr int decode_blocks(int columns, bool codes, bool hopper) { return hopper && columns == 8 && codes ? 3 : 2; }
inline constexpr int64_t kMaxDecodeHeads = 128;
inline constexpr int kPromptSharedBytes90 = (224 << 10) + 128;  // of attention_prompt_sm90.cu

}  // namespace quern::cuda
