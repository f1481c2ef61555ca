#pragma once

#include "backends/cuda/plain.h"

// The candidates named "cuda.mma": bf16 activations and matrix instructions of sm_80 and newer. Attention and gdn_mix take heads of the model's sizes; prompt rows and decode rows have kernels,
// and so arithmetics, of their own there, and within a kind a row's bits depend on its sequence only. Linear layers (linears_mma.h) widen FP8 weights to bf16, and have one arithmetic for both kinds.

namespace quern::cuda::mma {

#define QUERN_MMA(Op)                                                                     \
  ops::Verdict accepts(const ops::Op::Problem& problem, const ops::DeviceTraits& traits); \
  Result<std::unique_ptr<ops::Op::Kernel>> make(const ops::Op::Problem& problem, ops::Device& device);
QUERN_MMA(Attention)
QUERN_MMA(GdnMix)
QUERN_MMA(AttnIn)
QUERN_MMA(GdnIn)
QUERN_MMA(MlpIn)
QUERN_MMA(MtpIn)
QUERN_MMA(Head)
QUERN_MMA(LinearResidual)
#undef QUERN_MMA
/// "cuda.mma.chunked": as GdnMix's, and prompt rows chunk by chunk on the matrix units.
Result<std::unique_ptr<ops::GdnMix::Kernel>> make_chunked(const ops::GdnMix::Problem& problem, ops::Device& device);

/// Which kinds a step's runs have, and the longest of the decode runs.
struct Kinds {
  bool prompt = false;
  int64_t num_decode_runs = 0, longest_decode_run = 0;
  int32_t first_decode_row = 0, end_decode_row = 0;
  int32_t first_prompt_run = 0, end_prompt_runs = 0;  // all prompt runs are among these
};
inline Kinds kinds_of(const ops::Rows& rows) {
  Kinds kinds;
  for (size_t number = 0; number < rows.runs.size(); ++number) {
    const ops::RowRun& run = rows.runs[number];
    if (run.kind == ops::RowKind::kPrompt) {
      if (run.num_rows == 0) continue;
      if (!kinds.prompt) kinds.first_prompt_run = static_cast<int32_t>(number);
      kinds.prompt = true;
      kinds.end_prompt_runs = static_cast<int32_t>(number) + 1;
      continue;
    }
    if (run.num_rows == 0) continue;
    if (kinds.num_decode_runs++ == 0) kinds.first_decode_row = run.first_row;
    kinds.first_decode_row = std::min(kinds.first_decode_row, run.first_row);
    kinds.end_decode_row = std::max(kinds.end_decode_row, run.first_row + run.num_rows);
    kinds.longest_decode_run = std::max<int64_t>(kinds.longest_decode_run, run.num_rows);
  }
  return kinds;
}

}  // namespace quern::cuda::mma
