#include "backends/opencl/kernel_table.h"

#include "backends/opencl/dpas.h"
#include "backends/opencl/plain.h"
#include "backends/opencl/simd16.h"

namespace quern::opencl {

namespace {

/// Candidates of an op, best first, each with the launches of a call (tests/worker/launches_test.cpp counts them). accepts and make are overloaded for every op: a
/// candidate takes its own.
template <class Op, ops::LaunchCounts kSimd16Launches, ops::LaunchCounts kPlainLaunches>
constexpr ops::Candidate<Op> kSimd16[] = {{"opencl.simd16", simd16::accepts, simd16::make, false, kSimd16Launches}, {"opencl.plain", plain::accepts, plain::make, false, kPlainLaunches}};
template <class Op, ops::LaunchCounts kDpasLaunches, ops::LaunchCounts kPlainLaunches>
constexpr ops::Candidate<Op> kLinear[] = {{"opencl.dpas", dpas::accepts, dpas::make, false, kDpasLaunches}, {"opencl.plain", plain::accepts, plain::make, false, kPlainLaunches}};
constexpr ops::Candidate<ops::Attention> kAttention[] = {{"opencl.dpas", dpas::accepts, dpas::make, false, {1, 1}},
                                                        {"opencl.simd16", simd16::accepts, simd16::make, false, {1, 1}},
                                                        {"opencl.plain", plain::accepts, plain::make, false, {1, 1}}};
constexpr ops::Candidate<ops::GdnMix> kGdnMix[] = {{"opencl.dpas", dpas::accepts, dpas::make, false, {1, 5}},
                                                  {"opencl.simd16", simd16::accepts, simd16::make, false, {1, 3}},
                                                  {"opencl.plain", plain::accepts, plain::make, false, {4, 4}}};

using Launches = ops::LaunchCounts;  // of decode rows, of a prompt

}  // namespace

constinit const ops::KernelTable kKernelTable{
    .embed = kSimd16<ops::Embed, Launches{1, 1}, Launches{2, 2}>,
    .attn_in = kLinear<ops::AttnIn, Launches{2, 3}, Launches{5, 5}>,
    .attention = kAttention,
    .gdn_in = kLinear<ops::GdnIn, Launches{1, 3}, Launches{5, 5}>,
    .gdn_mix = kGdnMix,
    .out_residual = kLinear<ops::OutResidual, Launches{1, 2}, Launches{1, 1}>,
    .mlp_in = kLinear<ops::MlpIn, Launches{1, 2}, Launches{3, 3}>,
    .down_residual = kLinear<ops::DownResidual, Launches{1, 2}, Launches{1, 1}>,
    .mtp_in = kLinear<ops::MtpIn, Launches{3, 4}, Launches{3, 3}>,
    .head = kLinear<ops::Head, Launches{2, 2}, Launches{2, 2}>,
    .sample = kSimd16<ops::Sample, Launches{1, 1}, Launches{1, 1}>,
    .draft_rows = kSimd16<ops::DraftRows, Launches{2, 2}, Launches{2, 2}>,  // enqueue_first; enqueue_next is one
    .state_copy = kSimd16<ops::StateCopy, Launches{1, 1}, Launches{1, 1}>,  // store_hidden
    .combine = kSimd16<ops::Combine, Launches{1, 1}, Launches{0, 0}>,  // plain: one a rank
};

}  // namespace quern::opencl
