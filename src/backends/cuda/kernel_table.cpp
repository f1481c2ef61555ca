#include "backends/cuda/kernel_table.h"

#include "backends/cuda/e4m3.h"
#include "backends/cuda/mma.h"
#include "backends/cuda/plain.h"
#include "backends/cuda/sample_rows.h"
#include "backends/cuda/sm90.h"

namespace quern::cuda {

namespace {

// Candidates of an op, best first. accepts and make are overloaded for every op: a candidate takes its own. By request: for tests and measurements.

template <class Op, sm90::PromptShape kShape>
Result<std::unique_ptr<typename Op::Kernel>> make_linear(const typename Op::Problem& problem, ops::Device& device) {
  return sm90::make(problem, device, kShape);
}
template <class Op>
ops::Verdict accepts_e4m3(const typename Op::Problem& problem, const ops::DeviceTraits& traits) {
  if (ops::Verdict verdict = e4m3::multiplies(traits); !verdict.accepted) return verdict;
  return e4m3::accepts(problem, traits);
}
template <class Op>
ops::Verdict accepts_emulated(const typename Op::Problem& problem, const ops::DeviceTraits& traits) {
  ops::Verdict own = e4m3::multiplies(traits);
  if (own.accepted) return ops::refuse("sm_{} needs no emulation", traits.architecture);
  if (traits.architecture < 90) return own;
  return e4m3::accepts(problem, traits);
}
/// The shapes by name are for tests and measurements.
template <class Op>
constexpr ops::Candidate<Op> kLinear[] = {{"cuda.sm90.single", sm90::accepts, make_linear<Op, sm90::PromptShape::kSingle>, true},
                                          {"cuda.sm90.pairs", sm90::accepts, make_linear<Op, sm90::PromptShape::kPair>, true},
                                          {"cuda.sm90.tall.pairs", sm90::accepts, make_linear<Op, sm90::PromptShape::kTallPair>, true},
                                          {"cuda.sm90", sm90::accepts, make_linear<Op, sm90::PromptShape::kFastest>},
                                          {"cuda.mma.e4m3", accepts_e4m3<Op>, e4m3::make},
                                          {"cuda.mma.e4m3.emulated", accepts_emulated<Op>, e4m3::make, true},
                                          {"cuda.mma", mma::accepts, mma::make},
                                          {"cuda.plain", plain::accepts, plain::make}};
template <class Op>
constexpr ops::Candidate<Op> kPlain[] = {{"cuda.plain", plain::accepts, plain::make}};

constexpr ops::Candidate<ops::Attention> kAttention[] = {{"cuda.sm90", sm90::accepts, sm90::make},
                                                         {"cuda.mma", mma::accepts, mma::make},
                                                         {"cuda.plain", plain::accepts, plain::make}};
constexpr ops::Candidate<ops::Sample> kSample[] = {{"cuda.sm90", sm90::accepts, sm90::make}, {"cuda.rows", rows::accepts, rows::make}, {"cuda.plain", plain::accepts, plain::make}};
constexpr ops::Candidate<ops::GdnMix> kGdnMix[] = {{"cuda.mma.chunked", mma::accepts, mma::make_chunked},
                                                   {"cuda.mma", mma::accepts, mma::make},
                                                   {"cuda.plain", plain::accepts, plain::make}};

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
    .sample = kSample,
    .draft_rows = kPlain<ops::DraftRows>,
    .state_copy = kPlain<ops::StateCopy>,
    .combine = kPlain<ops::Combine>,
};

}  // namespace quern::cuda
