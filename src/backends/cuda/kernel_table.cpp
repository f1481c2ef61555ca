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

/// Candidates of an op, best first.
template <class Op>
constexpr ops::Candidate<Op> kSm90[] = {{"cuda.sm90", accepts_sm90<Op>, make_sm90<Op>}, {"cuda.plain", accepts<Op>, make<Op>}};
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
template <class Op>
constexpr ops::Candidate<Op> kMma[] = {{"cuda.mma", accepts_mma<Op>, make_mma<Op>}, {"cuda.plain", accepts<Op>, make<Op>}};
/// Prompt rows chunk by chunk only by request, until a device has shown them right: `--kernel gdn_mix=cuda.mma.chunked`.
constexpr ops::Candidate<ops::GdnMix> kGdnMix[] = {{"cuda.mma", accepts_mma<ops::GdnMix>, make_mma<ops::GdnMix>},
                                                   {"cuda.mma.chunked", accepts_mma<ops::GdnMix>, mma::make_chunked},
                                                   {"cuda.plain", accepts<ops::GdnMix>, make<ops::GdnMix>}};

}  // namespace

constinit const ops::KernelTable kKernelTable{
    .embed = kPlain<ops::Embed>,
    .attn_in = kSm90<ops::AttnIn>,
    .attention = kMma<ops::Attention>,
    .gdn_in = kSm90<ops::GdnIn>,
    .gdn_mix = kGdnMix,
    .out_residual = kSm90<ops::OutResidual>,
    .mlp_in = kSm90<ops::MlpIn>,
    .down_residual = kSm90<ops::DownResidual>,
    .mtp_in = kSm90<ops::MtpIn>,
    .head = kSm90<ops::Head>,
    .sample = kSm90<ops::Sample>,
    .draft_rows = kPlain<ops::DraftRows>,
    .state_copy = kPlain<ops::StateCopy>,
    .combine = kPlain<ops::Combine>,
};

}  // namespace quern::cuda
