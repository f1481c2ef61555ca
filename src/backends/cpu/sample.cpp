#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>

#include "backends/cpu/plain.h"
#include "backends/cpu/scratch.h"
#include "ops/random.h"

namespace quern::cpu::plain {

namespace {

using ops::SlotSampling;

constexpr float kMasked = -std::numeric_limits<float>::infinity();
constexpr float kLogprobFloor = -9999.0f;  // JSON has no infinity
constexpr float kGreedyBelow = 1e-5f;      // SamplingParams::greedy()

/// A token and its logit.
struct Entry {
  float logit;
  int32_t id;
};
/// Most likely first, the lowest id on ties.
bool before(const Entry& a, const Entry& b) { return a.logit != b.logit ? a.logit > b.logit : a.id < b.id; }

bool all_finite(std::span<const float> x) {
  uint32_t worst = 0;
  for (const float value : x) worst = std::max(worst, std::bit_cast<uint32_t>(value) & 0x7fffffffu);
  return worst < 0x7f800000u;
}

int32_t argmax(std::span<const float> x) {
  size_t best = 0;
  for (size_t i = 1; i < x.size(); ++i)
    if (x[i] > x[best]) best = i;
  return static_cast<int32_t>(best);
}

/// Fills `out` with the k first entries in order; one pass, since most entries lose against the worst one kept.
void select_top(std::span<const float> logits, int64_t k, std::vector<Entry>& out) {
  out.clear();
  for (size_t i = 0; i < logits.size(); ++i) {
    const Entry entry{logits[i], static_cast<int32_t>(i)};
    if (std::ssize(out) < k) {
      out.push_back(entry);
      std::push_heap(out.begin(), out.end(), before);
    } else if (entry.logit > out.front().logit) {  // an equal one has a higher id
      std::pop_heap(out.begin(), out.end(), before);
      out.back() = entry;
      std::push_heap(out.begin(), out.end(), before);
    }
  }
  std::sort_heap(out.begin(), out.end(), before);
}

/// Tokens of one row after top-k, top-p and min-p. Reserves all memory that it will need when it is made.
class CandidateSet {
 public:
  explicit CandidateSet(int64_t vocab_size) { entries_.reserve(static_cast<size_t>(vocab_size)); }

  /// `logits` after bias, penalties and mask. False: every token passes that is not masked, and entries() is not filled.
  bool restrict(std::span<const float> logits, const SlotSampling& params) {
    const int64_t top_k = params.top_k > 0 ? params.top_k : std::ssize(logits);
    const bool limits_k = top_k < std::ssize(logits), limits_p = params.top_p<1.0f, limits_min = params.min_p> 0.0f;
    if (!limits_k && !limits_p && !limits_min) return false;
    num_sorted_ = 0;
    if (limits_k && top_k <= kHeapLimit) {
      select_top(logits, top_k, entries_);
      num_sorted_ = entries_.size();
    } else {
      entries_.clear();
      for (size_t i = 0; i < logits.size(); ++i)
        if (logits[i] != kMasked) entries_.push_back({logits[i], static_cast<int32_t>(i)});
      if (limits_k && std::ssize(entries_) > top_k) {
        std::nth_element(entries_.begin(), entries_.begin() + top_k, entries_.end(), before);
        entries_.resize(static_cast<size_t>(top_k));
      }
    }
    while (!entries_.empty() && num_sorted_ > 0 && entries_.back().logit == kMasked) entries_.pop_back(), --num_sorted_;
    if (entries_.empty()) return true;
    if (limits_p) keep_top_p(params);
    if (limits_min) {
      const float best = std::max_element(entries_.begin(), entries_.end(), [](auto& a, auto& b) { return a.logit < b.logit; })->logit;
      const float lowest = best + params.temperature * std::log(params.min_p);
      std::erase_if(entries_, [&](const Entry& entry) { return entry.logit < lowest; });
    }
    return true;
  }
  [[nodiscard]] std::span<const Entry> entries() const { return entries_; }

 private:
  static constexpr int64_t kHeapLimit = 1024;

  /// Keeps the shortest prefix, most likely first, that holds top_p of the probability of all entries. Only so much is sorted as needed.
  void keep_top_p(const SlotSampling& params) {
    const float best = std::max_element(entries_.begin(), entries_.end(), [](auto& a, auto& b) { return a.logit < b.logit; })->logit;
    const auto weight = [&](const Entry& entry) { return std::exp((entry.logit - best) / params.temperature); };
    double all = 0;
    for (const Entry& entry : entries_) all += weight(entry);
    const double wanted = static_cast<double>(params.top_p) * all;
    double sum = 0;
    for (size_t kept = 0; kept < entries_.size(); ++kept) {
      if (kept == num_sorted_) {
        const size_t more = std::min(entries_.size() - kept, std::max<size_t>(256, 7 * kept));
        const auto first = entries_.begin() + static_cast<int64_t>(kept), last = first + static_cast<int64_t>(more);
        if (last != entries_.end()) std::nth_element(first, last, entries_.end(), before);
        std::sort(first, last, before);
        num_sorted_ = kept + more;
      }
      sum += weight(entries_[kept]);
      if (sum >= wanted) return entries_.resize(kept + 1);
    }
  }

  std::vector<Entry> entries_;
  size_t num_sorted_ = 0;  // entries at the front that are in order
};

/// argmax of logit / temperature + gumbel(seed, index, id), the lowest id on ties.
class GumbelDraw {
 public:
  GumbelDraw(uint64_t seed, int64_t index, float temperature) : key_(ops::draw_key(seed, index)), temperature_(temperature) {}

  void offer(float logit, int32_t id) {
    if (logit == kMasked) return;
    const float scaled = logit / temperature_;
    const double u = ops::uniform(key_, id);
    // The variate is at most -log(1 - u), and e^x <= (1 - x / 8)^-8 for x < 0: most tokens lose without a logarithm.
    const double ahead = static_cast<double>(best_) - static_cast<double>(scaled);
    if (ahead > 0) {
      double bound = 1.0 + ahead / 8;
      bound *= bound;
      bound *= bound;
      if ((1.0 - u) * bound * bound > 1.001) return;
    }
    keep(scaled + ops::gumbel(u), id);
  }
  /// What another draw of the same key has found.
  void merge(const GumbelDraw& other) {
    if (other.token_ >= 0) keep(other.best_, other.token_);
  }
  /// -1 when nothing was offered that is allowed.
  [[nodiscard]] int32_t token() const { return token_; }

 private:
  void keep(float score, int32_t id) {
    if (token_ < 0 || score > best_ || (score == best_ && id < token_)) {
      best_ = score;
      token_ = id;
    }
  }

  uint64_t key_;
  float temperature_, best_ = kMasked;
  int32_t token_ = -1;
};

/// Slot values and tables of one run.
struct Slot {
  SlotSampling* params;
  int32_t* counts;           // [vocab_size]
  const uint8_t* in_prompt;  // [vocab_size]
};

/// Rows of logits are read only: transforms work on a copy, so that logprobs see the raw distribution.
class SampleKernel final : public ops::Sample::Kernel {
 public:
  SampleKernel(const ops::Sample::Problem& problem, ThreadPool& pool) : problem_(problem), pool_(pool) {
    for (int thread = 0; thread < pool.num_threads(); ++thread) {
      candidates_.emplace_back(problem.vocab_size);
      most_likely_.emplace_back().reserve(ops::kMaxLogprobs);
      draws_.emplace_back(0, 0, 1.0f);
    }
  }

  [[nodiscard]] std::string_view arithmetic() const override { return "cpu.plain"; }
  [[nodiscard]] size_t workspace_bytes(int64_t) const override { return static_cast<size_t>(pool_.num_threads()) * thread_bytes(); }

  void enqueue(const ops::TensorView& runs, const ops::TensorView& logits, const ops::TensorView& masks,
               const ops::SamplerTables& sampler, const ops::SlotTables& slots, const ops::SampleOutput& out,
               ops::Launch& launch) const override {
    CHECK(workspace_bytes(0) <= launch.workspace.size_bytes());
    if (runs.shape[0] == 1)  // the threads share the vocabulary instead
      return sample_run(0, runs.data<ops::SampleRun>()[0], logits, masks, sampler, slots, out, launch.workspace.data<float>(), kAllThreads);
    pool_.parallel_for(runs.shape[0], 8 * problem_.vocab_size, [&](int64_t begin, int64_t end, int thread) {
      for (int64_t i = begin; i < end; ++i) {
        auto* transformed = reinterpret_cast<float*>(launch.workspace.data<std::byte>() + static_cast<size_t>(thread) * thread_bytes());
        sample_run(i, runs.data<ops::SampleRun>()[i], logits, masks, sampler, slots, out, transformed, thread);
      }
    });
  }

  void enqueue_argmax(const ops::TensorView& logits, const ops::TensorView& ids, ops::Launch&) const override {
    pool_.parallel_for(ids.shape[0], problem_.vocab_size, [&](int64_t begin, int64_t end, int) {
      for (int64_t i = begin; i < end; ++i) {
        const float* row = logits.data<float>() + i * problem_.vocab_size;
        ids.data<int32_t>()[i] = static_cast<int32_t>(std::max_element(row, row + problem_.num_tokens) - row);
      }
    });
  }

 private:
  [[nodiscard]] size_t thread_bytes() const { return Scratch::size<float>(problem_.vocab_size); }

  void sample_run(int64_t i, const ops::SampleRun& run, const ops::TensorView& logits, const ops::TensorView& masks,
                  const ops::SamplerTables& sampler, const ops::SlotTables& slots, const ops::SampleOutput& out, float* transformed,
                  int owner) const {
    // The thread that samples the run, or all of them while it is the only run.
    const bool alone = owner == kAllThreads;
    const size_t thread = alone ? 0 : static_cast<size_t>(owner);
    const int64_t per_run = problem_.k_max + 1, vocab = problem_.vocab_size;
    if (run.slot < 0) {
      out.num_tokens.data<int32_t>()[i] = out.non_finite.data<int32_t>()[i] = 0;
      return;
    }
    int32_t* tokens = out.tokens.data<int32_t>() + i * per_run;
    int32_t& cursor = slots.cursor.data<int32_t>()[run.slot];
    int32_t& boundary = slots.boundary.data<int32_t>()[run.slot];
    const bool verify = run.first_logits_row >= 0 && run.verify != 0;
    const int32_t synthetic = run.verify - ops::kSyntheticAcceptance;  // drafts that count as accepted; below 0: those that agree
    const int64_t num_draws = run.first_logits_row < 0 ? 0 : verify ? run.num_rows : 1;
    CHECK(num_draws <= per_run);
    const Slot slot{sampler.params.data<SlotSampling>() + run.slot, sampler.counts.data<int32_t>() + run.slot * vocab,
                    sampler.in_prompt.data<uint8_t>() + run.slot * vocab};
    const int32_t* drafts = num_draws > 1 ? slots.drafts.data<int32_t>() + run.slot * slots.drafts.shape[1] : nullptr;

    int32_t num_tokens = 0;
    bool failed = false;
    for (int64_t draw = 0; draw < num_draws; ++draw) {
      const float* raw = logits.data<float>() + (run.first_logits_row + draw) * vocab;
      const uint32_t* mask = run.first_mask_row < 0 ? nullptr : masks.data<uint32_t>() + (run.first_mask_row + draw) * ((vocab + 31) / 32);
      const int64_t token_index = int64_t{cursor} + (verify ? draw + 1 : run.num_rows);
      const int32_t token =
          all_finite({raw, static_cast<size_t>(vocab)}) ? draw_token(slot, raw, mask, token_index, transformed, thread, alone) : -1;
      if (token < 0) {
        failed = true;
        break;
      }
      if (slot.params->num_logprobs >= 0) write_logprobs(raw, token, slot.params->num_logprobs, i * per_run + draw, out, thread);
      tokens[num_tokens++] = token;
      ++slot.counts[token];
      ++slot.params->num_generated;
      if (is_stop(*slot.params, token)) break;
      if (draw + 1 < num_draws && (synthetic >= 0 ? draw >= synthetic : drafts[draw] != token)) break;
    }
    if (failed) {  // what was drawn before the bad row is taken back: the request fails as a whole
      for (int32_t t = 0; t < num_tokens; ++t) --slot.counts[tokens[t]];
      slot.params->num_generated -= num_tokens;
      num_tokens = 0;
    }
    out.num_tokens.data<int32_t>()[i] = num_tokens;
    out.non_finite.data<int32_t>()[i] = failed ? 1 : 0;
    if (num_tokens > 0) slots.last_token.data<int32_t>()[run.slot] = tokens[num_tokens - 1];
    const int32_t grid = static_cast<int32_t>(ops::kGrid), after = cursor + (verify ? num_tokens : run.num_rows);
    boundary = (verify ? cursor : after) / grid * grid;  // where gdn_mix has left the state
    cursor = after;
  }

  static bool is_stop(const SlotSampling& params, int32_t token) {
    return std::find(params.stop_ids, params.stop_ids + params.num_stop_ids, token) != params.stop_ids + params.num_stop_ids;
  }

  /// -1: no token is allowed.
  int32_t draw_token(const Slot& slot, const float* raw, const uint32_t* mask, int64_t index, float* transformed, size_t thread,
                     bool alone) const {
    const SlotSampling& params = *slot.params;
    const auto n = static_cast<size_t>(problem_.num_tokens);
    const std::span<const float> logits{transform(slot, raw, mask, transformed), n};
    if (params.temperature < kGreedyBelow) {
      const int32_t token = argmax(logits);
      return logits[static_cast<size_t>(token)] == kMasked ? -1 : token;
    }
    GumbelDraw draw(params.seed, index, params.temperature);
    CandidateSet& candidates = candidates_[thread];
    if (candidates.restrict(logits, params)) {
      for (const Entry& entry : candidates.entries()) draw.offer(entry.logit, entry.id);
    } else {
      const auto offer = [&](GumbelDraw& to, size_t begin, size_t end) {
        for (size_t id = begin; id < end; ++id) to.offer(logits[id], static_cast<int32_t>(id));
      };
      if (!alone) {
        offer(draw, 0, n);
      } else {
        std::fill(draws_.begin(), draws_.end(), draw);
        pool_.parallel_for(problem_.num_tokens, 16, [&](int64_t begin, int64_t end, int worker) {
          offer(draws_[static_cast<size_t>(worker)], static_cast<size_t>(begin), static_cast<size_t>(end));
        });
        for (const GumbelDraw& part : draws_) draw.merge(part);
      }
    }
    return draw.token();
  }

  /// Logit bias, penalties, grammar mask; `raw` itself where nothing is asked for.
  const float* transform(const Slot& slot, const float* raw, const uint32_t* mask, float* x) const {
    const SlotSampling& p = *slot.params;
    const bool penalties = p.presence_penalty != 0 || p.frequency_penalty != 0 || p.repetition_penalty != 1;
    const bool too_early = p.num_generated < p.min_tokens && p.num_stop_ids > 0;
    if (p.num_logit_bias == 0 && !penalties && mask == nullptr && !too_early) return raw;
    const int64_t n = problem_.num_tokens;
    std::copy_n(raw, n, x);
    for (int32_t i = 0; i < p.num_logit_bias; ++i)
      if (p.bias_ids[i] >= 0 && p.bias_ids[i] < n) x[p.bias_ids[i]] += p.bias_values[i];
    if (penalties)
      for (int64_t id = 0; id < n; ++id) {
        const int32_t count = slot.counts[id];
        if (count == 0 && slot.in_prompt[id] == 0) continue;
        x[id] = x[id] > 0 ? x[id] / p.repetition_penalty : x[id] * p.repetition_penalty;
        if (count > 0) x[id] -= p.frequency_penalty * static_cast<float>(count) + p.presence_penalty;
      }
    if (mask != nullptr)
      for (int64_t id = 0; id < n; ++id)
        if ((mask[id / 32] >> (id % 32) & 1u) == 0) x[id] = kMasked;
    if (too_early)
      for (int32_t i = 0; i < p.num_stop_ids; ++i)
        if (p.stop_ids[i] >= 0 && p.stop_ids[i] < n) x[p.stop_ids[i]] = kMasked;
    return x;
  }

  /// Log-probabilities of the whole raw row: the chosen token's, then the most likely ones'.
  void write_logprobs(const float* raw, int32_t token, int32_t num_top, int64_t entry, const ops::SampleOutput& out, size_t thread) const {
    const std::span<const float> row{raw, static_cast<size_t>(problem_.vocab_size)};
    const float chosen = raw[token], best = raw[argmax(row)];
    double sum = 0;
    int32_t rank = 1;
    for (const float logit : row) {
      sum += std::exp(logit - best);
      rank += logit > chosen;
    }
    rank += static_cast<int32_t>(std::count(row.begin(), row.begin() + token, chosen));
    const double log_sum = static_cast<double>(best) + std::log(sum);
    const auto logprob = [&](float logit) { return std::max(static_cast<float>(static_cast<double>(logit) - log_sum), kLogprobFloor); };
    float* values = out.logprobs.data<float>() + entry * (1 + ops::kMaxLogprobs);
    int32_t* ids = out.logprob_ids.data<int32_t>() + entry * (1 + ops::kMaxLogprobs);
    out.chosen_rank.data<int32_t>()[entry] = rank;
    values[0] = logprob(chosen);
    ids[0] = token;
    if (num_top == 0) return;
    std::vector<Entry>& top = most_likely_[thread];
    select_top(row, std::min(num_top, ops::kMaxLogprobs), top);
    for (size_t i = 0; i < top.size(); ++i) {
      values[1 + i] = logprob(top[i].logit);
      ids[1 + i] = top[i].id;
    }
  }

  static constexpr int kAllThreads = -1;

  ops::Sample::Problem problem_;
  ThreadPool& pool_;
  mutable std::vector<GumbelDraw> draws_;                // one a thread
  mutable std::vector<CandidateSet> candidates_;         // one a thread
  mutable std::vector<std::vector<Entry>> most_likely_;  // one a thread
};

}  // namespace

ops::Verdict accepts(const ops::Sample::Problem& problem, const ops::DeviceTraits&) {
  if (problem.num_tokens < 1 || problem.num_tokens > problem.vocab_size)
    return ops::refuse("{} tokens with text in a vocabulary of {}", problem.num_tokens, problem.vocab_size);
  return ops::accept();
}

Result<std::unique_ptr<ops::Sample::Kernel>> make(const ops::Sample::Problem& problem, ops::Device& device) {
  return std::unique_ptr<ops::Sample::Kernel>(std::make_unique<SampleKernel>(problem, pool_of(device)));
}

}  // namespace quern::cpu::plain
