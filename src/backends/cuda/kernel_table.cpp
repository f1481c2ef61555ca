#include "backends/cuda/kernel_table.h"

#include "backends/cuda/plain.h"

namespace quern::cuda {

namespace {

constexpr ops::Absent kNone{"the CUDA platform has no kernel for it yet"};
constexpr ops::Candidate<ops::Combine> kCombine[] = {{"cuda.plain", plain::accepts, plain::make}};

}  // namespace

constinit const ops::KernelTable kKernelTable{
    .embed = kNone,
    .attn_in = kNone,
    .attention = kNone,
    .gdn_in = kNone,
    .gdn_mix = kNone,
    .out_residual = kNone,
    .mlp_in = kNone,
    .down_residual = kNone,
    .mtp_in = kNone,
    .head = kNone,
    .sample = kNone,
    .draft_rows = kNone,
    .state_copy = kNone,
    .combine = kCombine,
};

}  // namespace quern::cuda
