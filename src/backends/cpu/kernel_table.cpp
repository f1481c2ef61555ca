#include "backends/cpu/kernel_table.h"

#include <type_traits>

#include "backends/cpu/fma_tile.h"
#include "backends/cpu/plain.h"

namespace quern::cpu {

namespace {

// The weights of each op that must come in whole groups of columns.
std::vector<ops::LinearShape> linears(const ops::Attention::Problem&) { return {}; }
std::vector<ops::LinearShape> linears(const ops::GdnMix::Problem&) { return {}; }
std::vector<ops::LinearShape> linears(const ops::Embed::Problem& p) { return {{p.vocab_size, p.hidden, p.scheme}}; }
std::vector<ops::LinearShape> linears(const ops::AttnIn::Problem& p) { return {p.q, p.k, p.v}; }
std::vector<ops::LinearShape> linears(const ops::GdnIn::Problem& p) { return {p.qkv, p.z, p.b, p.a}; }
std::vector<ops::LinearShape> linears(const ops::LinearResidual::Problem& p) { return {p.linear}; }
std::vector<ops::LinearShape> linears(const ops::MlpIn::Problem& p) { return {p.gate, p.up}; }
std::vector<ops::LinearShape> linears(const ops::MtpIn::Problem& p) { return {p.fc}; }
std::vector<ops::LinearShape> linears(const ops::Head::Problem& p) { return {p.lm_head}; }

ops::Verdict has_instructions(LinearPath path, const ops::DeviceTraits& traits) {
  switch (path) {
    case LinearPath::kPlain: return ops::accept();
    case LinearPath::kAvx2: return traits.avx2 ? ops::accept() : ops::refuse("the processor has no AVX2 with FMA, or QUERN_CPU_ISA hides it");
    case LinearPath::kAvx512: return traits.avx512 ? ops::accept() : ops::refuse("the processor has no AVX-512 (F, BW, DQ, VL), or QUERN_CPU_ISA hides it");
    case LinearPath::kAvx512Bf16:
      return traits.avx512_bf16 && traits.avx512_vbmi ? ops::accept() : ops::refuse("the processor has no AVX-512 with BF16 and VBMI, or QUERN_CPU_ISA hides it");
    case LinearPath::kAmx:
    case LinearPath::kAmxPrompt:
      return traits.amx_bf16 && traits.avx512_bf16 && traits.avx512_vbmi ? ops::accept() : ops::refuse("the processor has no AMX for bf16, or QUERN_CPU_ISA hides it");
  }
  CHECK_UNREACHABLE();
}

ops::Verdict fits_bf16(const ops::LinearShape& linear, int64_t columns) {
  if (!ops::is_fp8(linear.scheme) && linear.scheme != ops::WeightScheme::kBF16)
    return ops::refuse("{} weights are not exact in bf16", ops::weight_scheme_name(linear.scheme));
  if (linear.in_features % columns != 0) return ops::refuse("{} input features are not a multiple of {}", linear.in_features, columns);
  return ops::accept();
}

template <class Op, LinearPath kPath>
ops::Verdict accepts(const typename Op::Problem& problem, const ops::DeviceTraits& traits) {
  if (ops::Verdict verdict = has_instructions(kPath, traits); !verdict.accepted) return verdict;
  if constexpr (kPath != LinearPath::kPlain) {
    if constexpr (std::is_same_v<Op, ops::Embed>)
      if (!problem.tied) return ops::refuse("tiles serve the head; a table that is only looked up stays in rows");
    for (const ops::LinearShape& linear : linears(problem))
      if constexpr (multiplies_bf16(kPath)) {
        if (ops::Verdict verdict = fits_bf16(linear, uses_amx(kPath) ? 32 : kTileGroup); !verdict.accepted) return verdict;
      } else if (linear.in_features % kTileGroup != 0) {
        return ops::refuse("{} input features are not a multiple of {}", linear.in_features, kTileGroup);
      }
  }
  if constexpr (multiplies_bf16(kPath))
    if (problem.activation != DType::kBF16) return ops::refuse("it multiplies bf16; activations are {}", dtype_name(problem.activation));
  return plain::accepts(problem, traits);
}

template <class Op, LinearPath kPath>
Result<std::unique_ptr<typename Op::Kernel>> make(const typename Op::Problem& problem, ops::Device& device) {
  return plain::make(problem, device, kPath);
}

/// Candidates of an op whose kernel runs on any path, best first.
template <class Op>
constexpr ops::Candidate<Op> kVector[] = {{"cpu.avx512", accepts<Op, LinearPath::kAvx512>, make<Op, LinearPath::kAvx512>},
                                          {"cpu.avx2", accepts<Op, LinearPath::kAvx2>, make<Op, LinearPath::kAvx2>},
                                          {"cpu.plain", accepts<Op, LinearPath::kPlain>, make<Op, LinearPath::kPlain>}};

/// Of one that reads weights. cpu.amx.prompt has prompt rows alone on AMX, whose bits then differ from those of decode rows; it is taken only when it is asked for.
template <class Op>
constexpr ops::Candidate<Op> kMatrix[] = {{"cpu.amx", accepts<Op, LinearPath::kAmx>, make<Op, LinearPath::kAmx>},
                                          {"cpu.avx512_bf16", accepts<Op, LinearPath::kAvx512Bf16>, make<Op, LinearPath::kAvx512Bf16>},
                                          {"cpu.avx512", accepts<Op, LinearPath::kAvx512>, make<Op, LinearPath::kAvx512>},
                                          {"cpu.avx2", accepts<Op, LinearPath::kAvx2>, make<Op, LinearPath::kAvx2>},
                                          {"cpu.amx.prompt", accepts<Op, LinearPath::kAmxPrompt>, make<Op, LinearPath::kAmxPrompt>, true},
                                          {"cpu.plain", accepts<Op, LinearPath::kPlain>, make<Op, LinearPath::kPlain>}};

constexpr ops::Candidate<ops::Sample> kSample[] = {{"cpu.plain", plain::accepts, plain::make}};
constexpr ops::Candidate<ops::DraftRows> kDraftRows[] = {{"cpu.plain", plain::accepts, plain::make}};
constexpr ops::Candidate<ops::StateCopy> kStateCopy[] = {{"cpu.plain", plain::accepts, plain::make}};
constexpr ops::Candidate<ops::Combine> kCombine[] = {{"cpu.plain", plain::accepts, plain::make}};

}  // namespace

constinit const ops::KernelTable kKernelTable{
    .embed = kMatrix<ops::Embed>,
    .attn_in = kMatrix<ops::AttnIn>,
    .attention = kVector<ops::Attention>,
    .gdn_in = kMatrix<ops::GdnIn>,
    .gdn_mix = kVector<ops::GdnMix>,
    .out_residual = kMatrix<ops::OutResidual>,
    .mlp_in = kMatrix<ops::MlpIn>,
    .down_residual = kMatrix<ops::DownResidual>,
    .mtp_in = kMatrix<ops::MtpIn>,
    .head = kMatrix<ops::Head>,
    .sample = kSample,
    .draft_rows = kDraftRows,
    .state_copy = kStateCopy,
    .combine = kCombine,
};

}  // namespace quern::cpu
