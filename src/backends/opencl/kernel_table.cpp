#include "backends/opencl/kernel_table.h"

#include "backends/opencl/dpas.h"
#include "backends/opencl/plain.h"
#include "backends/opencl/simd16.h"

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

template <class Op>
ops::Verdict accepts_dpas(const typename Op::Problem& problem, const ops::DeviceTraits& traits) {
  return dpas::accepts(problem, traits);
}
template <class Op>
Result<std::unique_ptr<typename Op::Kernel>> make_dpas(const typename Op::Problem& problem, ops::Device& device) {
  return dpas::make(problem, device);
}

template <class Op>
ops::Verdict accepts_simd16(const typename Op::Problem& problem, const ops::DeviceTraits& traits) {
  return simd16::accepts(problem, traits);
}
template <class Op>
Result<std::unique_ptr<typename Op::Kernel>> make_simd16(const typename Op::Problem& problem, ops::Device& device) {
  return simd16::make(problem, device);
}

/// Candidates of an op, best first.
template <class Op>
constexpr ops::Candidate<Op> kMixer[] = {{"opencl.simd16", accepts_simd16<Op>, make_simd16<Op>}, {"opencl.plain", accepts<Op>, make<Op>}};
template <class Op>
constexpr ops::Candidate<Op> kLinear[] = {{"opencl.dpas", accepts_dpas<Op>, make_dpas<Op>}, {"opencl.plain", accepts<Op>, make<Op>}};
template <class Op>
constexpr ops::Candidate<Op> kPlain[] = {{"opencl.plain", accepts<Op>, make<Op>}};

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
