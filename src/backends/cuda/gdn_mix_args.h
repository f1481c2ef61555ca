#pragma once

#include "backends/cuda/linear_args.h"
#include "backends/cuda/step_tables.h"

namespace quern::cuda {

inline constexpr int kMaxGdnDim = 256;  // d_k and d_v

inline constexpr int32_t kGdnPrompt = 1, kGdnDecode = 2;
inline constexpr int32_t kGdnToGrid = 1, kGdnHeadsApart = 2, kGdnDealt = 4;
/// Dynamic shared memory of the kernels in gdn_decode.cu, and of those in gdn_decode_bf16.cu; small: where a block may have 99 KB.
inline constexpr int kGdnDecodeSharedBytesF32 = 113 << 10, kGdnDecodeSharedBytesUnstaged = 81 << 10;
inline constexpr int kGdnDecodeSharedBytesBF16 = 113 << 10, kGdnDecodeSharedBytesBF16Small = 97 << 10;

/// One GDN layer: its extents, weights, state and the step's rows.
struct GdnArgs {
  StepTables step;
  int32_t first_run, end_run;  // those of the step that a grid over runs has
  int32_t kinds;   // of the runs that the launch computes: kGdnPrompt | kGdnDecode
  int32_t phases;  // of gdn_decode: kGdnHeadsApart or all heads of a key head together, kGdnDealt; of gdn_rows and gdn_keys: kGdnToGrid or all rows
  int32_t num_k_heads, num_v_heads, d_k, d_v, k_max;
  float eps;
  DType activation, ring;
  // Packed, all f32.
  const float* conv;      // [4, channels]: tap 3 multiplies the current token
  const float* decay;     // [num_v_heads]: -exp(A_log)
  const float* dt_bias;   // [num_v_heads]
  const float* norm;      // [d_v]
  const int32_t* k_head;      // [num_v_heads], ascending
  const int32_t* first_head;  // [num_k_heads + 1]: a key head's value heads begin where those of the one before end
  // Rows.
  const void *qkv, *z, *b, *a;
  void* out;
  // State (ops::GdnStateView).
  float* state;
  bool is_state_halved;  // ops::GdnStateLayout::kHalves
  void *ring_k, *ring_u;
  float* ring_g;
  void *conv_window, *boundary_columns;
  int32_t* dealt;     // with kGdnDealt [2], zeros before and after each launch: jobs that were dealt, blocks that are done
  uint32_t* key_readers;  // of gdn_few [num_runs, num_k_heads], zeros before and after each launch: blocks that have read keys that are folded
  Prefetch prefetch;  // of gdn_decode
};

/// What gdn_prepare makes of a checkpoint's vectors.
struct GdnPrepareArgs {
  int64_t channels;
  int32_t num_v_heads;
  const void* conv1d;  // [channels, 4]
  DType conv_dtype;
  float* conv;         // [4, channels]
  float* decay;        // in: A_log, out: -exp(A_log)
};

}  // namespace quern::cuda
