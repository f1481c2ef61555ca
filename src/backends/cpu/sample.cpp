#include <algorithm>
#include <bit>
#include <cmath>
#include <functional>
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
    if (limits_min) keep_min_p(params);
    return true;
  }
  /// As restrict() where top-k leaves some: `keys` hold every token that it leaves. Sorts them.
  void restrict_keys(std::span<uint64_t> keys, const SlotSampling& params) {
    static_assert(ops::kMaxCandidates <= kHeapLimit);  // so that restrict() adds up in the same order
    std::sort(keys.begin(), keys.end(), std::greater<>());
    entries_.clear();
    for (const uint64_t key : keys.first(std::min(keys.size(), static_cast<size_t>(params.top_k))))
      if (key != 0) entries_.push_back({ops::candidate_value(key), ops::candidate_id(key)});
    num_sorted_ = entries_.size();
    if (entries_.empty()) return;
    if (params.top_p < 1.0f) keep_top_p(params);
    if (params.min_p > 0.0f) keep_min_p(params);
  }
  [[nodiscard]] std::span<const Entry> entries() const { return entries_; }

 private:
  static constexpr int64_t kHeapLimit = 1024;

  void keep_min_p(const SlotSampling& params) {
    const float best = std::max_element(entries_.begin(), entries_.end(), [](auto& a, auto& b) { return a.logit < b.logit; })->logit;
    const float lowest = best + params.temperature * std::log(params.min_p);
    std::erase_if(entries_, [&](const Entry& entry) { return entry.logit < lowest; });
  }

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
  /// 0 then.
  [[nodiscard]] uint64_t key() const { return token_ < 0 ? 0 : ops::candidate_key(best_, token_); }

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
      most_likely_.emplace_back().reserve(std::max(ops::kMaxLogprobs, ops::kMaxCandidates));
      keys_.emplace_back().reserve(kUsualParts * ops::kMaxCandidates);
      draws_.emplace_back(0, 0, 1.0f);
    }
  }

  [[nodiscard]] std::string_view arithmetic() const override { return "cpu.plain"; }
  [[nodiscard]] size_t workspace_bytes(int64_t) const override { return static_cast<size_t>(pool_.num_threads()) * thread_bytes(); }

  void enqueue(const ops::TensorView& runs, const ops::TensorView& logits, const ops::TensorView& masks,
               const ops::SamplerTables& sampler, const ops::SlotTables& slots, const ops::SampleOutput& out,
               ops::Launch& launch) const override {
    each_run(runs, launch, [&](int64_t i, float* transformed, int thread) {
      sample_run(i, runs.data<ops::SampleRun>()[i], logits, masks, sampler, slots, out, transformed, thread);
    });
  }

  void enqueue_candidates(const ops::TensorView& runs, const ops::TensorView& logits, int32_t first_id, int32_t num_candidates, const ops::TensorView& masks, const ops::SamplerTables& sampler,
                          const ops::SlotTables& slots, const ops::TensorView& candidates, ops::Launch& launch) const override {
    if (logits.empty()) return;
    const Part part = part_of(logits, first_id);
    each_run(runs, launch, [&](int64_t i, float* transformed, int thread) {
      find_candidates(runs.data<ops::SampleRun>()[i], logits, part, num_candidates, masks, sampler, slots, candidates, transformed, thread);
    });
  }

  void enqueue_drawing(const ops::TensorView& runs, const ops::TensorView& gathered, int32_t num_candidates, const ops::SamplerTables& sampler, const ops::SlotTables& slots, const ops::SampleOutput& out,
                       ops::Launch& launch) const override {
    const int64_t num_parts = gathered.empty() ? 0 : gathered.shape[1] / ops::candidate_words(num_candidates);
    each_run(runs, launch, [&](int64_t i, float*, int thread) {
      const ops::SampleRun& run = runs.data<ops::SampleRun>()[i];
      walk(i, run, sampler, slots, out, [&](const Slot& slot, int64_t draw, int64_t index) {
        const uint64_t* words = gathered.data<const uint64_t>() + (run.first_logits_row + draw) * num_parts * (1 + num_candidates);
        return draw_candidate(slot, words, num_parts, num_candidates, index, static_cast<size_t>(std::max(thread, 0)));
      });
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

  void enqueue_argmax_candidates(const ops::TensorView& logits, int32_t first_id, const ops::TensorView& keys, ops::Launch&) const override {
    const Part part = part_of(logits, first_id);
    pool_.parallel_for(keys.shape[0], part.width, [&](int64_t begin, int64_t end, int) {
      for (int64_t i = begin; i < end; ++i) {
        const float *row = logits.data<float>() + i * part.width, *best = std::max_element(row, row + part.num_tokens);
        keys.data<uint64_t>()[i] = part.num_tokens == 0 ? 0 : ops::candidate_key(*best, first_id + static_cast<int32_t>(best - row));
      }
    });
  }

  void enqueue_argmax_of(const ops::TensorView& gathered, const ops::TensorView& ids, ops::Launch&) const override {
    const int64_t num_parts = gathered.shape[1] / ops::kKeyWords;
    for (int64_t i = 0; i < ids.shape[0]; ++i) {
      const auto* keys = gathered.data<const uint64_t>() + i * num_parts;
      ids.data<int32_t>()[i] = ops::candidate_id(*std::max_element(keys, keys + num_parts));
    }
  }

 private:
  [[nodiscard]] size_t thread_bytes() const { return Scratch::size<float>(problem_.vocab_size); }

  /// body(run, memory for a row of logits, thread) of every run; the thread is kAllThreads for the only one.
  template <class Body>
  void each_run(const ops::TensorView& runs, ops::Launch& launch, const Body& body) const {
    CHECK(workspace_bytes(0) <= launch.workspace.size_bytes());
    if (runs.shape[0] == 1) return body(0, launch.workspace.data<float>(), kAllThreads);  // the threads share the vocabulary instead
    pool_.parallel_for(runs.shape[0], 8 * problem_.vocab_size, [&](int64_t begin, int64_t end, int thread) {
      for (int64_t i = begin; i < end; ++i) body(i, reinterpret_cast<float*>(launch.workspace.data<std::byte>() + static_cast<size_t>(thread) * thread_bytes()), thread);
    });
  }

  /// What a run draws.
  struct Draws {
    bool verify;
    int64_t num_draws;
    int32_t synthetic;      // drafts that count as accepted; below 0: those that agree
    const int32_t* drafts;  // null: none
  };
  [[nodiscard]] Draws draws_of(const ops::SampleRun& run, const ops::SlotTables& slots) const {
    const bool verify = run.first_logits_row >= 0 && run.verify != 0;
    const int64_t num_draws = run.slot < 0 || run.first_logits_row < 0 ? 0 : verify ? run.num_rows : 1;
    CHECK(num_draws <= problem_.k_max + 1);
    return {verify, num_draws, run.verify - ops::kSyntheticAcceptance, num_draws > 1 ? slots.drafts.data<int32_t>() + run.slot * slots.drafts.shape[1] : nullptr};
  }
  /// The sequence index of a draw's token.
  static int64_t token_index(const ops::SampleRun& run, const Draws& draws, const ops::SlotTables& slots, int64_t draw) {
    return int64_t{slots.cursor.data<int32_t>()[run.slot]} + (draws.verify ? draw + 1 : run.num_rows);
  }
  [[nodiscard]] Slot slot_of(const ops::SampleRun& run, const ops::SamplerTables& sampler) const {
    return {sampler.params.data<SlotSampling>() + run.slot, sampler.counts.data<int32_t>() + run.slot * problem_.vocab_size,
            sampler.in_prompt.data<uint8_t>() + run.slot * problem_.vocab_size};
  }
  [[nodiscard]] const uint32_t* mask_of(const ops::SampleRun& run, const ops::TensorView& masks, int64_t draw) const {
    return run.first_mask_row < 0 ? nullptr : masks.data<uint32_t>() + (run.first_mask_row + draw) * ((problem_.vocab_size + 31) / 32);
  }

  void sample_run(int64_t i, const ops::SampleRun& run, const ops::TensorView& logits, const ops::TensorView& masks,
                  const ops::SamplerTables& sampler, const ops::SlotTables& slots, const ops::SampleOutput& out, float* transformed,
                  int owner) const {
    // The thread that samples the run, or all of them while it is the only run.
    const bool alone = owner == kAllThreads;
    const size_t thread = alone ? 0 : static_cast<size_t>(owner);
    const int64_t vocab = problem_.vocab_size;
    walk(i, run, sampler, slots, out, [&](const Slot& slot, int64_t draw, int64_t index) {
      const float* raw = logits.data<float>() + (run.first_logits_row + draw) * vocab;
      if (!all_finite({raw, static_cast<size_t>(vocab)})) return -1;
      const int32_t token = draw_token(slot, raw, mask_of(run, masks, draw), index, transformed, thread, alone);
      if (token >= 0 && slot.params->num_logprobs >= 0) write_logprobs(raw, token, slot.params->num_logprobs, i * (problem_.k_max + 1) + draw, out, thread);
      return token;
    });
  }

  /// One draw after the other, as long as drafts agree: token_of(slot, draw, index of the token in the sequence), -1 where it fails. Then the run has advanced.
  template <class TokenOf>
  void walk(int64_t i, const ops::SampleRun& run, const ops::SamplerTables& sampler, const ops::SlotTables& slots, const ops::SampleOutput& out, const TokenOf& token_of) const {
    if (run.slot < 0) {
      out.num_tokens.data<int32_t>()[i] = out.non_finite.data<int32_t>()[i] = 0;
      return;
    }
    int32_t* tokens = out.tokens.data<int32_t>() + i * (problem_.k_max + 1);
    int32_t& cursor = slots.cursor.data<int32_t>()[run.slot];
    int32_t& boundary = slots.boundary.data<int32_t>()[run.slot];
    const Draws draws = draws_of(run, slots);
    const Slot slot = slot_of(run, sampler);

    int32_t num_tokens = 0;
    bool failed = false;
    for (int64_t draw = 0; draw < draws.num_draws; ++draw) {
      const int32_t token = token_of(slot, draw, token_index(run, draws, slots, draw));
      if (token < 0) {
        failed = true;
        break;
      }
      tokens[num_tokens++] = token;
      ++slot.counts[token];
      ++slot.params->num_generated;
      if (is_stop(*slot.params, token)) break;
      if (draw + 1 < draws.num_draws && (draws.synthetic >= 0 ? draw >= draws.synthetic : draws.drafts[draw] != token)) break;
    }
    if (failed) {  // what was drawn before the bad row is taken back: the request fails as a whole
      for (int32_t t = 0; t < num_tokens; ++t) --slot.counts[tokens[t]];
      slot.params->num_generated -= num_tokens;
      num_tokens = 0;
    }
    out.num_tokens.data<int32_t>()[i] = num_tokens;
    out.non_finite.data<int32_t>()[i] = failed ? 1 : 0;
    if (num_tokens > 0) slots.last_token.data<int32_t>()[run.slot] = tokens[num_tokens - 1];
    const int32_t grid = static_cast<int32_t>(ops::kGrid), after = cursor + (draws.verify ? num_tokens : run.num_rows);
    boundary = (draws.verify ? cursor : after) / grid * grid;  // where gdn_mix has left the state
    cursor = after;
  }

  /// A rank's part of the vocabulary.
  struct Part {
    int64_t first_id, width, num_tokens;  // the first num_tokens of them have text
  };
  [[nodiscard]] Part part_of(const ops::TensorView& logits, int32_t first_id) const {
    return {first_id, logits.shape[1], std::clamp<int64_t>(problem_.num_tokens - first_id, 0, logits.shape[1])};
  }

  void find_candidates(const ops::SampleRun& run, const ops::TensorView& logits, const Part& part, int32_t num_candidates, const ops::TensorView& masks, const ops::SamplerTables& sampler,
                       const ops::SlotTables& slots, const ops::TensorView& candidates, float* transformed, int owner) const {
    const Draws draws = draws_of(run, slots);
    if (draws.num_draws == 0) return;
    const Slot slot = slot_of(run, sampler);
    const int32_t generated = slot.params->num_generated;
    for (int64_t draw = 0; draw < draws.num_draws; ++draw) {
      const int64_t row = run.first_logits_row + draw;
      const float* raw = logits.data<float>() + row * part.width;
      auto* words = candidates.data<uint64_t>() + row * (1 + num_candidates);
      std::fill_n(words, 1 + num_candidates, uint64_t{0});
      words[0] = all_finite({raw, static_cast<size_t>(part.width)}) ? 1 : 0;
      const std::span<const float> x{transform(slot, raw, mask_of(run, masks, draw), transformed, part.first_id, part.num_tokens), static_cast<size_t>(part.num_tokens)};
      if (words[0] != 0 && !x.empty()) fill_keys(x, part, *slot.params, token_index(run, draws, slots, draw), {words + 1, static_cast<size_t>(num_candidates)}, owner);
      if (draw + 1 == draws.num_draws) break;
      ++slot.counts[draws.drafts[draw]];  // the next row is reached by this draft alone
      ++slot.params->num_generated;
    }
    for (int64_t draw = 0; draw + 1 < draws.num_draws; ++draw) --slot.counts[draws.drafts[draw]];
    slot.params->num_generated = generated;
  }

  void fill_keys(std::span<const float> x, const Part& part, const SlotSampling& params, int64_t index, std::span<uint64_t> keys, int owner) const {
    const auto first = static_cast<int32_t>(part.first_id);
    if (params.temperature < kGreedyBelow) {
      const int32_t best = argmax(x);
      if (x[static_cast<size_t>(best)] != kMasked) keys[0] = ops::candidate_key(x[static_cast<size_t>(best)], first + best);
      return;
    }
    if (!limits_k(params)) {
      keys[0] = draw_of_all(x, first, params, index, owner == kAllThreads).key();
      return;
    }
    CHECK(params.top_k <= std::ssize(keys));
    std::vector<Entry>& top = most_likely_[owner == kAllThreads ? 0 : static_cast<size_t>(owner)];
    select_top(x, params.top_k, top);
    for (size_t k = 0; k < top.size(); ++k) keys[k] = top[k].logit == kMasked ? 0 : ops::candidate_key(top[k].logit, first + top[k].id);
  }
  [[nodiscard]] bool limits_k(const SlotSampling& params) const { return params.top_k > 0 && params.top_k < problem_.num_tokens; }

  /// The token drawn from the candidates of all ranks.
  int32_t draw_candidate(const Slot& slot, const uint64_t* words, int64_t num_parts, int32_t num_candidates, int64_t index, size_t thread) const {
    const SlotSampling& params = *slot.params;
    std::vector<uint64_t>& keys = keys_[thread];
    keys.clear();
    for (int64_t part = 0; part < num_parts; ++part, words += 1 + num_candidates) {
      if (words[0] == 0) return -1;
      keys.insert(keys.end(), words + 1, words + 1 + num_candidates);
    }
    if (params.temperature < kGreedyBelow || !limits_k(params)) {
      const uint64_t best = *std::max_element(keys.begin(), keys.end());
      return best == 0 ? -1 : ops::candidate_id(best);
    }
    CandidateSet& candidates = candidates_[thread];
    candidates.restrict_keys(keys, params);
    GumbelDraw draw(params.seed, index, params.temperature);
    for (const Entry& entry : candidates.entries()) draw.offer(entry.logit, entry.id);
    return draw.token();
  }

  static bool is_stop(const SlotSampling& params, int32_t token) {
    return std::find(params.stop_ids, params.stop_ids + params.num_stop_ids, token) != params.stop_ids + params.num_stop_ids;
  }

  /// -1: no token is allowed.
  int32_t draw_token(const Slot& slot, const float* raw, const uint32_t* mask, int64_t index, float* transformed, size_t thread,
                     bool alone) const {
    const SlotSampling& params = *slot.params;
    const auto n = static_cast<size_t>(problem_.num_tokens);
    const std::span<const float> logits{transform(slot, raw, mask, transformed, 0, problem_.num_tokens), n};
    if (params.temperature < kGreedyBelow) {
      const int32_t token = argmax(logits);
      return logits[static_cast<size_t>(token)] == kMasked ? -1 : token;
    }
    CandidateSet& candidates = candidates_[thread];
    if (!candidates.restrict(logits, params)) return draw_of_all(logits, 0, params, index, alone).token();
    GumbelDraw draw(params.seed, index, params.temperature);
    for (const Entry& entry : candidates.entries()) draw.offer(entry.logit, entry.id);
    return draw.token();
  }

  /// Every token that is not masked may be drawn.
  [[nodiscard]] GumbelDraw draw_of_all(std::span<const float> logits, int32_t first_id, const SlotSampling& params, int64_t index, bool alone) const {
    GumbelDraw draw(params.seed, index, params.temperature);
    const auto offer = [&](GumbelDraw& to, size_t begin, size_t end) {
      for (size_t i = begin; i < end; ++i) to.offer(logits[i], first_id + static_cast<int32_t>(i));
    };
    if (!alone) {
      offer(draw, 0, logits.size());
      return draw;
    }
    std::fill(draws_.begin(), draws_.end(), draw);
    pool_.parallel_for(std::ssize(logits), 16, [&](int64_t begin, int64_t end, int worker) {
      offer(draws_[static_cast<size_t>(worker)], static_cast<size_t>(begin), static_cast<size_t>(end));
    });
    for (const GumbelDraw& part : draws_) draw.merge(part);
    return draw;
  }

  /// Logit bias, penalties, grammar mask of the logits of n ids from `first` on; `raw` itself where nothing is asked for.
  const float* transform(const Slot& slot, const float* raw, const uint32_t* mask, float* x, int64_t first, int64_t n) const {
    const SlotSampling& p = *slot.params;
    const bool penalties = p.presence_penalty != 0 || p.frequency_penalty != 0 || p.repetition_penalty != 1;
    const bool too_early = p.num_generated < p.min_tokens && p.num_stop_ids > 0;
    if (p.num_logit_bias == 0 && !penalties && mask == nullptr && !too_early) return raw;
    const auto has = [&](int32_t id) { return id >= first && id < first + n; };
    std::copy_n(raw, n, x);
    for (int32_t i = 0; i < p.num_logit_bias; ++i)
      if (has(p.bias_ids[i])) x[p.bias_ids[i] - first] += p.bias_values[i];
    if (penalties)
      for (int64_t i = 0; i < n; ++i) {
        const int32_t count = slot.counts[first + i];
        if (count == 0 && slot.in_prompt[first + i] == 0) continue;
        x[i] = x[i] > 0 ? x[i] / p.repetition_penalty : x[i] * p.repetition_penalty;
        if (count > 0) x[i] -= p.frequency_penalty * static_cast<float>(count) + p.presence_penalty;
      }
    if (mask != nullptr)
      for (int64_t i = 0; i < n; ++i)
        if ((mask[(first + i) / 32] >> ((first + i) % 32) & 1u) == 0) x[i] = kMasked;
    if (too_early)
      for (int32_t i = 0; i < p.num_stop_ids; ++i)
        if (has(p.stop_ids[i])) x[p.stop_ids[i] - first] = kMasked;
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
  static constexpr size_t kUsualParts = 8;

  ops::Sample::Problem problem_;
  ThreadPool& pool_;
  mutable std::vector<GumbelDraw> draws_;                // one a thread
  mutable std::vector<CandidateSet> candidates_;         // one a thread
  mutable std::vector<std::vector<Entry>> most_likely_;  // one a thread
  mutable std::vector<std::vector<uint64_t>> keys_;      // one a thread: candidates of all ranks
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
