#pragma once

#include <cstdint>

#include "ops/kernel_table.h"
#include "worker/selftest_trial.h"

// Per op: a small instance of a problem, and how to run a kernel on it.

namespace quern::worker::selftest {

/// The problem with the same schemes, dtypes, head extents and head ratios, and no other extent above `cap`, a multiple of 256. A reduced extent keeps its
/// remainder by 128; what cannot be reduced so stays.
ops::Embed::Problem reduced(ops::Embed::Problem problem, int64_t cap);
ops::AttnIn::Problem reduced(ops::AttnIn::Problem problem, int64_t cap);
ops::Attention::Problem reduced(ops::Attention::Problem problem, int64_t cap);
ops::GdnIn::Problem reduced(ops::GdnIn::Problem problem, int64_t cap);
ops::GdnMix::Problem reduced(ops::GdnMix::Problem problem, int64_t cap);
ops::LinearResidual::Problem reduced(ops::LinearResidual::Problem problem, int64_t cap);
ops::MlpIn::Problem reduced(ops::MlpIn::Problem problem, int64_t cap);
ops::MtpIn::Problem reduced(ops::MtpIn::Problem problem, int64_t cap);
ops::Head::Problem reduced(ops::Head::Problem problem, int64_t cap);
ops::Sample::Problem reduced(ops::Sample::Problem problem, int64_t cap);
ops::DraftRows::Problem reduced(ops::DraftRows::Problem problem, int64_t cap);
ops::StateCopy::Problem reduced(ops::StateCopy::Problem problem, int64_t cap);
ops::Combine::Problem reduced(ops::Combine::Problem problem, int64_t cap);

/// Packs random weights, runs the kernel on rows of both kinds and keeps its outputs in `trial`. An error is the device's.
Result<void> run(const ops::Embed::Problem& problem, const ops::Embed::Kernel& kernel, Trial& trial);
Result<void> run(const ops::AttnIn::Problem& problem, const ops::AttnIn::Kernel& kernel, Trial& trial);
Result<void> run(const ops::Attention::Problem& problem, const ops::Attention::Kernel& kernel, Trial& trial);
Result<void> run(const ops::GdnIn::Problem& problem, const ops::GdnIn::Kernel& kernel, Trial& trial);
Result<void> run(const ops::GdnMix::Problem& problem, const ops::GdnMix::Kernel& kernel, Trial& trial);
Result<void> run(const ops::LinearResidual::Problem& problem, const ops::LinearResidual::Kernel& kernel, Trial& trial);
Result<void> run(const ops::MlpIn::Problem& problem, const ops::MlpIn::Kernel& kernel, Trial& trial);
Result<void> run(const ops::MtpIn::Problem& problem, const ops::MtpIn::Kernel& kernel, Trial& trial);
Result<void> run(const ops::Head::Problem& problem, const ops::Head::Kernel& kernel, Trial& trial);
Result<void> run(const ops::Sample::Problem& problem, const ops::Sample::Kernel& kernel, Trial& trial);
Result<void> run(const ops::DraftRows::Problem& problem, const ops::DraftRows::Kernel& kernel, Trial& trial);
Result<void> run(const ops::StateCopy::Problem& problem, const ops::StateCopy::Kernel& kernel, Trial& trial);
Result<void> run(const ops::Combine::Problem& problem, const ops::Combine::Kernel& kernel, Trial& trial);

}  // namespace quern::worker::selftest
