#include "backends/opencl/kernel_table.h"

#include "backends/opencl/plain.h"

namespace quern::opencl {

namespace {

template <class Op>
ops::Verdict accepts(const typename Op::Problem& problem, const ops::DeviceTraits& traits) {
  return plain::accepts(problem, traits);
}
template <class Op>
Result<std::unique_ptr<typename Op::Kernel>> make(const typename Op::Problem& problem, ops::Device& device) {
  return plain::make(problem, device);
}

/// Candidates of an op, best first.
template <class Op>
constexpr ops::Candidate<Op> kPlain[] = {{"opencl.plain", accepts<Op>, make<Op>}};

}  // namespace

constinit const ops::KernelTable kKernelTable{
    .embed = kPlain<ops::Embed>,
    .attn_in = kPlain<ops::AttnIn>,
    .attention = kPlain<ops::Attention>,
    .gdn_in = kPlain<ops::GdnIn>,
    .gdn_mix = kPlain<ops::GdnMix>,
    .out_residual = kPlain<ops::OutResidual>,
    .mlp_in = kPlain<ops::MlpIn>,
    .down_residual = kPlain<ops::DownResidual>,
    .mtp_in = kPlain<ops::MtpIn>,
    .head = kPlain<ops::Head>,
    .sample = kPlain<ops::Sample>,
    .draft_rows = kPlain<ops::DraftRows>,
    .state_copy = kPlain<ops::StateCopy>,
    .combine = kPlain<ops::Combine>,
};

}  // namespace quern::opencl
