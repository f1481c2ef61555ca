#include "engine/speculator.h"

#include <algorithm>
#include <bit>

#include "base/check.h"
#include "base/log.h"

namespace quern::engine {
namespace {

constexpr double kAcceptanceWeight = 1.0 / 32, kTimeWeight = 1.0 / 8;
constexpr double kFirstGuess = 0.7;          // of an acceptance, until there are measurements
constexpr int32_t kSamplesWanted = 3;        // of a depth's time before it is judged
constexpr uint64_t kChoicesPerTrial = 256;   // so often another depth is tried,
constexpr int32_t kTrialLength = 3;          // for so many steps: only those that verify as many drafts as they make are compared
constexpr double kWorthChanging = 1.03;
constexpr double kMostSlowdown = 1.5;         // a step counts as no longer than so many times the average

}  // namespace

Speculator::Speculator(const SpeculationOptions& options, const worker::WorkerLimits& limits) : options_(options) {
  if (options_.method == SpeculationMethod::kAuto) options_.method = limits.has_mtp ? SpeculationMethod::kMtp : SpeculationMethod::kNone;
  if (options_.method == SpeculationMethod::kMtp && !limits.has_mtp) {
    log_warning("speculation: the model has no MTP head; nothing is guessed");
    options_.method = SpeculationMethod::kNone;
  }
  const int32_t most = std::min(limits.k_max, kMaxDrafts);
  if (options_.method != SpeculationMethod::kNone && options_.num_speculative_tokens > most) {
    log_info("speculation: {} drafts are lowered to {}, which a step can verify", options_.num_speculative_tokens, most);
    options_.num_speculative_tokens = most;
  }
  if (options_.num_speculative_tokens <= 0) options_.method = SpeculationMethod::kNone;
  if (options_.method == SpeculationMethod::kNone) options_.num_speculative_tokens = 0;
  acceptance_.fill(kFirstGuess);
  chosen_.fill(options_.num_speculative_tokens);
}

size_t Speculator::size_class(int32_t num_sequences) {
  return std::min<size_t>(static_cast<size_t>(std::bit_width(static_cast<uint32_t>(std::max(num_sequences, 1)) - 1)), kNumSizes - 1);
}

double Speculator::tokens_per_second(const Times& times, int32_t depth) const {
  double tokens = 1, reached = 1;
  for (int32_t i = 0; i < depth; ++i) {
    reached *= acceptance_[static_cast<size_t>(i)];
    tokens += reached;
  }
  return tokens / times[static_cast<size_t>(depth)].value;
}

int32_t Speculator::choose_depth(int32_t num_sequences, int32_t most) {
  most = std::min(most, options_.num_speculative_tokens);
  if (most <= 0) return 0;
  if (!options_.adaptive) return most;
  const size_t size = size_class(num_sequences);
  const Times& times = times_[size];
  for (int32_t depth = most; depth >= 0; --depth)
    if (times[static_cast<size_t>(depth)].num_samples < kSamplesWanted) return depth;
  if (++num_choices_ % kChoicesPerTrial == 0) {
    trial_depth_ = static_cast<int32_t>(random_.next() % static_cast<uint64_t>(most + 1));
    trial_left_ = kTrialLength;
  }
  if (trial_left_ > 0) {
    --trial_left_;
    return std::min(trial_depth_, most);
  }
  int32_t& chosen = chosen_[size];
  chosen = std::min(chosen, most);
  int32_t best = chosen;
  for (int32_t depth = 0; depth <= most; ++depth)
    if (tokens_per_second(times, depth) > tokens_per_second(times, best)) best = depth;
  if (tokens_per_second(times, best) > kWorthChanging * tokens_per_second(times, chosen)) chosen = best;
  return chosen;
}

void Speculator::observe_verify(int32_t num_drafts, int32_t num_accepted, bool across_boundary) {
  CHECK(num_drafts <= kMaxDrafts && num_accepted <= num_drafts);
  ++counts_.num_drafts;
  counts_.num_draft_tokens += static_cast<uint64_t>(num_drafts);
  counts_.num_accepted_tokens += static_cast<uint64_t>(num_accepted);
  counts_.num_partly_accepted += num_accepted > 0 && num_accepted < num_drafts ? 1 : 0;
  counts_.num_across_boundary += across_boundary ? 1 : 0;
  for (int32_t i = 0; i < num_drafts && i <= num_accepted; ++i) {
    const bool accepted = i < num_accepted;
    counts_.accepted_at[static_cast<size_t>(i)] += accepted ? 1 : 0;
    double& average = acceptance_[static_cast<size_t>(i)];
    average += kAcceptanceWeight * ((accepted ? 1.0 : 0.0) - average);
  }
}

void Speculator::observe_step(int32_t num_sequences, int32_t depth, double seconds) {
  if (depth > kMaxDrafts || seconds <= 0) return;
  add_seconds(times_[size_class(num_sequences)][static_cast<size_t>(depth)], seconds);
}

void Speculator::add_seconds(Average& average, double seconds) {
  if (average.num_samples == 0) {
    average.add(seconds, 1);
  } else if (average.num_samples < kSamplesWanted) {
    average.add(std::min(seconds, average.value), 1);
  } else {
    average.add(std::min(seconds, kMostSlowdown * average.value), kTimeWeight);
  }
}

int32_t Speculator::synthetic_acceptance(int32_t num_drafts) {
  if (!options_.synthetic_acceptance_length) return -1;
  // Between two whole numbers, so that the mean is as asked.
  const double wanted = std::clamp(*options_.synthetic_acceptance_length - 1, 0.0, static_cast<double>(num_drafts));
  const auto whole = static_cast<int32_t>(wanted);
  const double chance = static_cast<double>(random_.next() >> 11) * 0x1p-53;
  return whole + (chance < wanted - whole ? 1 : 0);
}

}  // namespace quern::engine
