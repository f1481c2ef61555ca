#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "base/hash.h"
#include "engine/speculation_options.h"
#include "worker/worker_group.h"

namespace quern::engine {

/// Most drafts that a step can verify.
inline constexpr int32_t kMaxDrafts = 16;

struct SpeculationCounts {
  uint64_t num_drafts = 0;           // verifies
  uint64_t num_draft_tokens = 0, num_accepted_tokens = 0;
  uint64_t num_partly_accepted = 0;  // verifies of which some drafts were accepted and some not,
  uint64_t num_across_boundary = 0;  // and whose rows stood on both sides of a boundary
  std::array<uint64_t, kMaxDrafts> accepted_at{};  // by position in the draft
};

/// Decides how many tokens are guessed: as many as give the most tokens per second, from what was accepted and what steps took so far.
///   tokens of a step with depth d:  1 + a1 + a1 a2 + .. + a1 .. ad      a_i: how often draft i is accepted when those before it were
/// Both are moving averages; a depth whose time is unknown is tried, and now and then one that seemed worse. Part of the scheduler.
class Speculator {
 public:
  /// Logs what had to be changed in the wish.
  Speculator(const SpeculationOptions& options, const worker::WorkerLimits& limits);

  [[nodiscard]] SpeculationMethod method() const { return options_.method; }
  [[nodiscard]] const SpeculationOptions& options() const { return options_; }
  /// Drafts for each of `num_sequences` sequences, at most `most`.
  [[nodiscard]] int32_t choose_depth(int32_t num_sequences, int32_t most);

  void observe_verify(int32_t num_drafts, int32_t num_accepted, bool across_boundary);
  /// A step that only decoded `num_sequences` sequences, with `depth` drafts each, took so long.
  void observe_step(int32_t num_sequences, int32_t depth, double seconds);
  /// How many of `num_drafts` are accepted in a benchmark with a synthetic acceptance length; -1: as many as agree.
  [[nodiscard]] int32_t synthetic_acceptance(int32_t num_drafts);

  [[nodiscard]] const SpeculationCounts& counts() const { return counts_; }

 private:
  struct Average {
    double value = 0;
    int32_t num_samples = 0;
    void add(double sample, double weight) {
      value = num_samples == 0 ? sample : value + weight * (sample - value);
      ++num_samples;
    }
  };
  /// Launches of a new kind of step are recorded as it runs, which takes many times as long: of the first samples the shortest counts, and later ones count as half as much again as the average at most.
  static void add_seconds(Average& average, double seconds);
  using Times = std::array<Average, kMaxDrafts + 1>;  // by depth
  static constexpr size_t kNumSizes = 17;             // of batches: by powers of two

  [[nodiscard]] static size_t size_class(int32_t num_sequences);
  [[nodiscard]] double tokens_per_second(const Times& times, int32_t depth) const;

  SpeculationOptions options_;
  std::array<double, kMaxDrafts> acceptance_{};
  std::array<Times, kNumSizes> times_{};
  std::array<int32_t, kNumSizes> chosen_{};
  uint64_t num_choices_ = 0;
  int32_t trial_depth_ = 0, trial_left_ = 0;
  SplitMix64 random_{0x5eed};
  SpeculationCounts counts_;
};

}  // namespace quern::engine
