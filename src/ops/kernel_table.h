#pragma once

#include "ops/attention.h"
#include "ops/attn_in.h"
#include "ops/candidate.h"
#include "ops/combine.h"
#include "ops/draft_rows.h"
#include "ops/embed.h"
#include "ops/gdn_in.h"
#include "ops/gdn_mix.h"
#include "ops/head.h"
#include "ops/linear_residual.h"
#include "ops/mlp_in.h"
#include "ops/mtp_in.h"
#include "ops/sample.h"
#include "ops/state_copy.h"

namespace quern::ops {

/// A member per op, a table per platform: add an op, and each platform stops compiling until it has something to say about it.
struct KernelTable {
  CandidateList<Embed> embed;
  CandidateList<AttnIn> attn_in;
  CandidateList<Attention> attention;
  CandidateList<GdnIn> gdn_in;
  CandidateList<GdnMix> gdn_mix;
  CandidateList<OutResidual> out_residual;
  CandidateList<MlpIn> mlp_in;
  CandidateList<DownResidual> down_residual;
  CandidateList<MtpIn> mtp_in;
  CandidateList<Head> head;
  CandidateList<Sample> sample;
  CandidateList<DraftRows> draft_rows;
  CandidateList<StateCopy> state_copy;
  CandidateList<Combine> combine;

  /// The list of an op, by its type.
  template <class Op>
  [[nodiscard]] constexpr const CandidateList<Op>& list() const;
};

// clang-format off
template <> constexpr const CandidateList<Embed>& KernelTable::list<Embed>() const { return embed; }
template <> constexpr const CandidateList<AttnIn>& KernelTable::list<AttnIn>() const { return attn_in; }
template <> constexpr const CandidateList<Attention>& KernelTable::list<Attention>() const { return attention; }
template <> constexpr const CandidateList<GdnIn>& KernelTable::list<GdnIn>() const { return gdn_in; }
template <> constexpr const CandidateList<GdnMix>& KernelTable::list<GdnMix>() const { return gdn_mix; }
template <> constexpr const CandidateList<OutResidual>& KernelTable::list<OutResidual>() const { return out_residual; }
template <> constexpr const CandidateList<MlpIn>& KernelTable::list<MlpIn>() const { return mlp_in; }
template <> constexpr const CandidateList<DownResidual>& KernelTable::list<DownResidual>() const { return down_residual; }
template <> constexpr const CandidateList<MtpIn>& KernelTable::list<MtpIn>() const { return mtp_in; }
template <> constexpr const CandidateList<Head>& KernelTable::list<Head>() const { return head; }
template <> constexpr const CandidateList<Sample>& KernelTable::list<Sample>() const { return sample; }
template <> constexpr const CandidateList<DraftRows>& KernelTable::list<DraftRows>() const { return draft_rows; }
template <> constexpr const CandidateList<StateCopy>& KernelTable::list<StateCopy>() const { return state_copy; }
template <> constexpr const CandidateList<Combine>& KernelTable::list<Combine>() const { return combine; }
// clang-format on

}  // namespace quern::ops
