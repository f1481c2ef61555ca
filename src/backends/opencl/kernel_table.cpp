#include "backends/opencl/kernel_table.h"

#include "backends/opencl/dpas.h"
#include "backends/opencl/plain.h"
#include "backends/opencl/simd16.h"

namespace quern::opencl {

namespace {

/// Candidates of an op, best first, each with the launches of a call (tests/worker/launches_test.cpp counts them). accepts and make are overloaded for every op: a
/// candidate takes its own.
template <class Op, ops::LaunchCounts kSimd16Launches, ops::LaunchCounts kPlainLaunches>
constexpr ops::Candidate<Op> kMixer[] = {{"opencl.simd16", simd16::accepts, simd16::make, false, kSimd16Launches}, {"opencl.plain", plain::accepts, plain::make, false, kPlainLaunches}};
template <class Op, ops::LaunchCounts kDpasLaunches, ops::LaunchCounts kPlainLaunches>
constexpr ops::Candidate<Op> kLinear[] = {{"opencl.dpas", dpas::accepts, dpas::make, false, kDpasLaunches}, {"opencl.plain", plain::accepts, plain::make, false, kPlainLaunches}};
template <class Op, ops::LaunchCounts kPlainLaunches>
constexpr ops::Candidate<Op> kPlain[] = {{"opencl.plain", plain::accepts, plain::make, false, kPlainLaunches}};

using Launches = ops::LaunchCounts;  // of decode rows, of a prompt

}  // namespace

constinit const ops::KernelTable kKernelTable{
    .embed = kPlain<ops::Embed, Launches{2, 2}>,
    .attn_in = kLinear<ops::AttnIn, Launches{6, 6}, Launches{5, 5}>,
    .attention = kMixer<ops::Attention, Launches{2, 1}, Launches{1, 1}>,
    .gdn_in = kLinear<ops::GdnIn, Launches{6, 6}, Launches{5, 5}>,
    .gdn_mix = kMixer<ops::GdnMix, Launches{4, 4}, Launches{4, 4}>,
    .out_residual = kLinear<ops::OutResidual, Launches{2, 2}, Launches{1, 1}>,
    .mlp_in = kLinear<ops::MlpIn, Launches{3, 4}, Launches{3, 3}>,
    .down_residual = kLinear<ops::DownResidual, Launches{2, 2}, Launches{1, 1}>,
    .mtp_in = kLinear<ops::MtpIn, Launches{4, 4}, Launches{3, 3}>,
    .head = kLinear<ops::Head, Launches{3, 3}, Launches{2, 2}>,
    .sample = kPlain<ops::Sample, Launches{1, 1}>,
    .draft_rows = kPlain<ops::DraftRows, Launches{2, 2}>,  // enqueue_first; enqueue_next is one
    .state_copy = kPlain<ops::StateCopy, Launches{1, 1}>,  // store_hidden
    .combine = kPlain<ops::Combine, Launches{0, 0}>,       // one a rank
};

}  // namespace quern::opencl
