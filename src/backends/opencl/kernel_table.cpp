#include "backends/opencl/kernel_table.h"

#include "backends/opencl/dpas.h"
#include "backends/opencl/plain.h"
#include "backends/opencl/simd16.h"

namespace quern::opencl {

namespace {

/// Candidates of an op, best first. accepts and make are overloaded for every op: a candidate takes its own.
template <class Op>
constexpr ops::Candidate<Op> kMixer[] = {{"opencl.simd16", simd16::accepts, simd16::make}, {"opencl.plain", plain::accepts, plain::make}};
template <class Op>
constexpr ops::Candidate<Op> kLinear[] = {{"opencl.dpas", dpas::accepts, dpas::make}, {"opencl.plain", plain::accepts, plain::make}};
template <class Op>
constexpr ops::Candidate<Op> kPlain[] = {{"opencl.plain", plain::accepts, plain::make}};

}  // namespace

constinit const ops::KernelTable kKernelTable{
    .embed = kPlain<ops::Embed>,
    .attn_in = kLinear<ops::AttnIn>,
    .attention = kMixer<ops::Attention>,
    .gdn_in = kLinear<ops::GdnIn>,
    .gdn_mix = kMixer<ops::GdnMix>,
    .out_residual = kLinear<ops::OutResidual>,
    .mlp_in = kLinear<ops::MlpIn>,
    .down_residual = kLinear<ops::DownResidual>,
    .mtp_in = kLinear<ops::MtpIn>,
    .head = kLinear<ops::Head>,
    .sample = kPlain<ops::Sample>,
    .draft_rows = kPlain<ops::DraftRows>,
    .state_copy = kPlain<ops::StateCopy>,
    .combine = kPlain<ops::Combine>,
};

}  // namespace quern::opencl
