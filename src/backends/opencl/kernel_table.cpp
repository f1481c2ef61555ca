#include "backends/opencl/kernel_table.h"

namespace quern::opencl {

namespace {

constexpr ops::Absent kNone{"this build has no OpenCL kernels"};

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
    .combine = kNone,
};

}  // namespace quern::opencl
