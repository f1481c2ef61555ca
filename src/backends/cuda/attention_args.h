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

inline constexpr int32_t kPromptRuns = 1, kDecodeRuns = 2;

struct AttentionArgs {
  StepTables step;
  int32_t kinds;  // of the runs that the launch computes: kPromptRuns | kDecodeRuns
  int32_t num_q_heads, num_kv_heads, head_dim, first_index;
  DType activation;
  const void *query, *gate;   // [rows, num_q_heads, head_dim]
  void* out;
  const int32_t* kv_head;     // [num_q_heads]
  KvCache kv;
  // Of the kernels in attention_mma.cu.
  int32_t num_splits;    // clusters of blocks that share the parts of a run
  int32_t cluster;       // blocks of a cluster: 1, or as many as a part has tiles
  int32_t max_parts;     // of a run, that `parts` has room for; a longer run is one block's
  int32_t first_decode_row;
  float* parts;          // [rows from first_decode_row on, num_q_heads, max_parts, head_dim + 2]: weighted values, maximum, sum
};

/// A launch of the kernels in attention_prompt_sm90.cu.
struct AttentionPromptArgs {
  AttentionArgs attention;
  TensorMap k, v;  // of a bf16 cache: [4 images of 64 columns, num_blocks * num_kv_heads * 64 rows, 64]; a box is all images of 64 rows
};

/// Dynamic shared memory of the kernels in attention_mma.cu, and the rows of a prompt tile.
inline constexpr int kDecodeSharedBytes1 = 100 << 10, kDecodeSharedBytes2 = 132 << 10, kPromptSharedBytes = 192 << 10,
                     kPromptTileRows = 128;
inline constexpr int kPromptSharedBytes90 = (224 << 10) + 128;  // of attention_prompt_sm90.cu

}  // namespace quern::cuda
