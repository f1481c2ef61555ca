#include "backends/cpu/kernel_table.h"

#include "backends/cpu/plain.h"

namespace quern::cpu {

namespace {

// Candidates best first, cpu.plain last.
constexpr ops::Candidate<ops::Embed> kEmbed[] = {{"cpu.plain", plain::accepts, plain::make}};
constexpr ops::Candidate<ops::AttnIn> kAttnIn[] = {{"cpu.plain", plain::accepts, plain::make}};
constexpr ops::Candidate<ops::Attention> kAttention[] = {{"cpu.plain", plain::accepts, plain::make}};
constexpr ops::Candidate<ops::GdnIn> kGdnIn[] = {{"cpu.plain", plain::accepts, plain::make}};
constexpr ops::Candidate<ops::GdnMix> kGdnMix[] = {{"cpu.plain", plain::accepts, plain::make}};
constexpr ops::Candidate<ops::OutResidual> kOutResidual[] = {{"cpu.plain", plain::accepts, plain::make}};
constexpr ops::Candidate<ops::MlpIn> kMlpIn[] = {{"cpu.plain", plain::accepts, plain::make}};
constexpr ops::Candidate<ops::DownResidual> kDownResidual[] = {{"cpu.plain", plain::accepts, plain::make}};
constexpr ops::Candidate<ops::MtpIn> kMtpIn[] = {{"cpu.plain", plain::accepts, plain::make}};
constexpr ops::Candidate<ops::Head> kHead[] = {{"cpu.plain", plain::accepts, plain::make}};
constexpr ops::Candidate<ops::Sample> kSample[] = {{"cpu.plain", plain::accepts, plain::make}};
constexpr ops::Candidate<ops::StateCopy> kStateCopy[] = {{"cpu.plain", plain::accepts, plain::make}};
constexpr ops::Candidate<ops::Combine> kCombine[] = {{"cpu.plain", plain::accepts, plain::make}};

}  // namespace

constinit const ops::KernelTable kKernelTable{
    .embed = kEmbed,
    .attn_in = kAttnIn,
    .attention = kAttention,
    .gdn_in = kGdnIn,
    .gdn_mix = kGdnMix,
    .out_residual = kOutResidual,
    .mlp_in = kMlpIn,
    .down_residual = kDownResidual,
    .mtp_in = kMtpIn,
    .head = kHead,
    .sample = kSample,
    .state_copy = kStateCopy,
    .combine = kCombine,
};

}  // namespace quern::cpu
