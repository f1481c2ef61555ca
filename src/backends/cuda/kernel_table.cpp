#include "backends/cuda/kernel_table.h"

#include "backends/cuda/mma.h"
#include "backends/cuda/plain.h"
#include "backends/cuda/sm90.h"

namespace quern::cuda {

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
ops::Verdict accepts_sm90(const typename Op::Problem& problem, const ops::DeviceTraits& traits) {
  return sm90::accepts(problem, traits);
}
template <class Op>
Result<std::unique_ptr<typename Op::Kernel>> make_sm90(const typename Op::Problem& problem, ops::Device& device) {
  return sm90::make(problem, device);
}

template <class Op>
Result<std::unique_ptr<typename Op::Kernel>> make_sm90_pairs(const typename Op::Problem& problem, ops::Device& device) {
  return sm90::make_pairs(problem, device);
}

/// Candidates of an op, best first. By request: until their tests have passed on a device.
template <class Op>
constexpr ops::Candidate<Op> kSm90[] = {{"cuda.sm90", accepts_sm90<Op>, make_sm90<Op>}, {"cuda.plain", accepts<Op>, make<Op>}};
template <class Op>
constexpr ops::Candidate<Op> kLinear[] = {{"cuda.sm90.pairs", accepts_sm90<Op>, make_sm90_pairs<Op>, true},
                                          {"cuda.sm90", accepts_sm90<Op>, make_sm90<Op>},
                                          {"cuda.plain", accepts<Op>, make<Op>}};
template <class Op>
constexpr ops::Candidate<Op> kPlain[] = {{"cuda.plain", accepts<Op>, make<Op>}};

template <class Op>
ops::Verdict accepts_mma(const typename Op::Problem& problem, const ops::DeviceTraits& traits) {
  return mma::accepts(problem, traits);
}
template <class Op>
Result<std::unique_ptr<typename Op::Kernel>> make_mma(const typename Op::Problem& problem, ops::Device& device) {
  return mma::make(problem, device);
}
constexpr ops::Candidate<ops::Attention> kAttention[] = {{"cuda.sm90", accepts_sm90<ops::Attention>, make_sm90<ops::Attention>, true},
                                                         {"cuda.mma", accepts_mma<ops::Attention>, make_mma<ops::Attention>},
                                                         {"cuda.plain", accepts<ops::Attention>, make<ops::Attention>}};
constexpr ops::Candidate<ops::GdnMix> kGdnMix[] = {{"cuda.mma.chunked", accepts_mma<ops::GdnMix>, mma::make_chunked},
                                                   {"cuda.mma", accepts_mma<ops::GdnMix>, make_mma<ops::GdnMix>},
                                                   {"cuda.plain", accepts<ops::GdnMix>, make<ops::GdnMix>}};

}  // namespace

constinit const ops::KernelTable kKernelTable{
    .embed = kPlain<ops::Embed>,
    .attn_in = kLinear<ops::AttnIn>,
    .attention = kAttention,
    .gdn_in = kLinear<ops::GdnIn>,
    .gdn_mix = kGdnMix,
    .out_residual = kLinear<ops::OutResidual>,
    .mlp_in = kLinear<ops::MlpIn>,
    .down_residual = kLinear<ops::DownResidual>,
    .mtp_in = kLinear<ops::MtpIn>,
    .head = kLinear<ops::Head>,
    .sample = kSm90<ops::Sample>,
    .draft_rows = kPlain<ops::DraftRows>,
    .state_copy = kPlain<ops::StateCopy>,
    .combine = kPlain<ops::Combine>,
};

}  // namespace quern::cuda
