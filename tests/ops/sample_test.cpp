#include "ops/sample.h"

#include <algorithm>
#include <numeric>
#include <set>

#include "ops/bed.h"
#include "ops/random.h"

namespace quern::ops::testing {
namespace {

constexpr int64_t kMaxDrafts = 3;

/// One slot (number 1 of 3) with its tables; rows of logits are given per call.
class Sampler {
 public:
  struct Answer {
    std::vector<int32_t> tokens;
    bool non_finite = false;
    std::vector<float> logprobs;  // of the first token
    std::vector<int32_t> logprob_ids;
    int32_t rank = 0;
  };

  explicit Sampler(int64_t vocab, int64_t num_tokens = 0, int threads = 1) : vocab_(vocab), num_tokens_(num_tokens > 0 ? num_tokens : vocab), bed_(threads) {
    kernel_ = make_kernel<Sample>(bed_, {vocab, num_tokens_, kMaxDrafts});
    slots_ = make_slots(bed_, 3, kMaxDrafts, 1);
    tables_.params = bed_.zeros(DType::kU8, {3, sizeof(SlotSampling)});
    tables_.counts = bed_.zeros(DType::kI32, {3, vocab});
    tables_.in_prompt = bed_.zeros(DType::kU8, {3, vocab});
    out_.tokens = bed_.tensor(DType::kI32, {1, kMaxDrafts + 1});
    out_.num_tokens = bed_.tensor(DType::kI32, {1});
    out_.non_finite = bed_.tensor(DType::kI32, {1});
    out_.logprobs = bed_.tensor(DType::kF32, {1, kMaxDrafts + 1, 1 + kMaxLogprobs});
    out_.logprob_ids = bed_.tensor(DType::kI32, {1, kMaxDrafts + 1, 1 + kMaxLogprobs});
    out_.chosen_rank = bed_.tensor(DType::kI32, {1, kMaxDrafts + 1});
    runs_ = bed_.tensor(DType::kI32, {1, kSampleRunFields});
    workspace_ = bed_.launch(*kernel_, kMaxDrafts + 1).workspace;
    logits_ = bed_.tensor(DType::kF32, {kMaxDrafts + 1, vocab});
    masks_ = bed_.tensor(DType::kI32, {kMaxDrafts + 1, (vocab + 31) / 32});
    own_ = bed_.tensor(DType::kF32, {kMaxDrafts + 1, vocab});
    candidates_ = bed_.tensor(DType::kI32, {kMaxDrafts + 1, candidate_words(kMaxCandidates)});
    gathered_ = bed_.tensor(DType::kI32, {kMaxDrafts + 1, kMaxParts * candidate_words(kMaxCandidates)});
  }

  void set(const SamplingParams& params) {
    params_ = params;
    slot() = to_slot_sampling(params);
  }
  SlotSampling& slot() { return tables_.params.data<SlotSampling>()[1]; }
  int32_t& count(int32_t token) { return tables_.counts.data<int32_t>()[vocab_ + token]; }
  void set_in_prompt(int32_t token) { tables_.in_prompt.data<uint8_t>()[vocab_ + token] = 1; }
  int32_t& cursor() { return slots_.cursor.data<int32_t>()[1]; }
  int32_t boundary() { return slots_.boundary.data<int32_t>()[1]; }
  int32_t last_token() { return slots_.last_token.data<int32_t>()[1]; }
  void set_drafts(const std::vector<int32_t>& drafts) {
    std::copy(drafts.begin(), drafts.end(), slots_.drafts.data<int32_t>() + kMaxDrafts);
  }
  /// Allows exactly these tokens in every row.
  void allow(const std::vector<int32_t>& tokens) {
    std::memset(masks_.data<std::byte>(), 0, masks_.size_bytes());
    for (int64_t row = 0; row <= kMaxDrafts; ++row)
      for (const int32_t token : tokens) masks_.data<uint32_t>()[row * ((vocab_ + 31) / 32) + token / 32] |= 1u << (token % 32);
    masked_ = true;
  }

  /// The last of `num_rows` rows is sampled.
  Answer sample(const std::vector<float>& logits, int32_t num_rows = 1) { return run({logits}, {1, num_rows, 0, 0, masked_ ? 0 : -1}); }
  Answer verify(const std::vector<std::vector<float>>& rows) {
    return run(rows, {1, static_cast<int32_t>(rows.size()), 0, 1, masked_ ? 0 : -1});
  }
  /// The first `accepted` drafts count as accepted, whatever was drawn.
  Answer verify_as_if(const std::vector<std::vector<float>>& rows, int32_t accepted) {
    return run(rows, {1, static_cast<int32_t>(rows.size()), 0, kSyntheticAcceptance + accepted, masked_ ? 0 : -1});
  }
  Answer skip(int32_t num_rows) { return run({}, {1, num_rows, -1, 0, -1}); }

 private:
  Answer run(const std::vector<std::vector<float>>& rows, const SampleRun& run) {
    for (size_t i = 0; i < rows.size(); ++i)
      std::copy(rows[i].begin(), rows[i].end(), logits_.data<float>() + static_cast<int64_t>(i) * vocab_);
    Launch launch{bed_.stream(), workspace_};
    std::memcpy(runs_.data<SampleRun>(), &run, sizeof run);
    const State before = state();
    kernel_->enqueue(runs_, logits_, masks_, tables_, slots_, out_, launch);
    Answer answer;
    answer.non_finite = out_.non_finite.data<int32_t>()[0] != 0;
    answer.tokens.assign(out_.tokens.data<int32_t>(), out_.tokens.data<int32_t>() + out_.num_tokens.data<int32_t>()[0]);
    answer.logprobs.assign(out_.logprobs.data<float>(), out_.logprobs.data<float>() + 1 + kMaxLogprobs);
    answer.logprob_ids.assign(out_.logprob_ids.data<int32_t>(), out_.logprob_ids.data<int32_t>() + 1 + kMaxLogprobs);
    answer.rank = out_.chosen_rank.data<int32_t>()[0];
    draw_in_parts(rows, run, before, answer);
    return answer;
  }

  static constexpr int64_t kMaxParts = 4;
  /// What a step changes of a sequence.
  using State = std::vector<std::string>;
  [[nodiscard]] std::vector<TensorView> state_tensors() const { return {tables_.params, tables_.counts, slots_.cursor, slots_.boundary, slots_.last_token}; }
  [[nodiscard]] State state() const {
    State bytes;
    for (const TensorView& view : state_tensors()) bytes.push_back(Bed::bytes(view));
    return bytes;
  }

  /// The same step by ranks with parts of the vocabulary, where their candidates are enough: it has to be the same to the last bit.
  void draw_in_parts(const std::vector<std::vector<float>>& rows, const SampleRun& run, const State& before, const Answer& expected) {
    const int32_t needed = candidates_needed(params_, num_tokens_, run.verify >= kSyntheticAcceptance);
    if (needed == 0 || rows.empty() || (few_launches() && std::exchange(drew_in_parts_, true))) return;
    std::vector<std::vector<int64_t>> cuts = {{0, vocab_ / 3, vocab_}};
    if (vocab_ >= 16 && vocab_ < 20000) cuts.push_back({0, 1, vocab_ / 2, vocab_ - 5, vocab_});
    const auto num_rows = static_cast<int64_t>(rows.size());
    const State after = state();
    for (const std::vector<int64_t>& cut : cuts)
      for (const int32_t num_candidates : {1, kMaxCandidates}) {
        if (num_candidates < needed) continue;
        restore(before);
        const int64_t words = candidate_words(num_candidates), num_parts = std::ssize(cut) - 1;
        const TensorView gathered{gathered_.buffer, 0, DType::kI32, {num_rows, num_parts * words}};
        Launch launch{bed_.stream(), workspace_};
        for (int64_t part = 0; part < num_parts; ++part) {
          const int64_t first = cut[static_cast<size_t>(part)], width = cut[static_cast<size_t>(part) + 1] - first;
          const TensorView own{own_.buffer, 0, DType::kF32, {num_rows, width}}, candidates{candidates_.buffer, 0, DType::kI32, {num_rows, words}};
          std::memset(candidates_.data<std::byte>(), 0xff, candidates_.size_bytes());
          for (int64_t row = 0; row < num_rows; ++row) std::copy_n(rows[static_cast<size_t>(row)].begin() + first, width, own.data<float>() + row * width);
          kernel_->enqueue_candidates(runs_, own, static_cast<int32_t>(first), num_candidates, masks_, tables_, slots_, candidates, launch);
          EXPECT_TRUE(state() == before) << "candidates change nothing";
          for (int64_t row = 0; row < num_rows; ++row)
            std::copy_n(candidates.data<int32_t>() + row * words, words, gathered.data<int32_t>() + (row * num_parts + part) * words);
        }
        kernel_->enqueue_drawing(runs_, gathered, num_candidates, tables_, slots_, out_, launch);
        EXPECT_EQ((std::vector<int32_t>(out_.tokens.data<int32_t>(), out_.tokens.data<int32_t>() + out_.num_tokens.data<int32_t>()[0])), expected.tokens)
            << num_parts << " parts, " << num_candidates << " candidates";
        EXPECT_EQ(out_.non_finite.data<int32_t>()[0] != 0, expected.non_finite);
        EXPECT_TRUE(state() == after) << "what the step changes of the sequence";
      }
    restore(after);
  }
  void restore(const State& bytes) {
    const std::vector<TensorView> tensors = state_tensors();
    for (size_t i = 0; i < tensors.size(); ++i) std::memcpy(tensors[i].data<std::byte>(), bytes[i].data(), bytes[i].size());
  }

  int64_t vocab_, num_tokens_;
  SamplingParams params_;
  Bed bed_;
  std::unique_ptr<Sample::Kernel> kernel_;
  SlotTables slots_;
  SamplerTables tables_;
  SampleOutput out_;
  TensorView workspace_, runs_, logits_, masks_, own_, candidates_, gathered_;
  bool masked_ = false, drew_in_parts_ = false;
};

SamplingParams greedy() {
  SamplingParams params;
  params.temperature = 0;
  return params;
}

TEST(Sample, CandidatesAreEnoughWhereTheyHoldWhatMayBeDrawn) {
  SamplingParams params;
  EXPECT_EQ(candidates_needed(params, 1000, false), 1) << "every token may be drawn";
  params.top_p = 0.9f;
  EXPECT_EQ(candidates_needed(params, 1000, false), 0);
  params.top_k = kMaxCandidates;
  EXPECT_EQ(candidates_needed(params, 1000, false), kMaxCandidates);
  EXPECT_EQ(candidates_needed(params, kMaxCandidates, false), 0) << "top-k leaves all of them";
  params.top_k = kMaxCandidates + 1;
  EXPECT_EQ(candidates_needed(params, 1000, false), 0);
  params = {};
  params.min_p = 0.1f;
  EXPECT_EQ(candidates_needed(params, 1000, false), 0);
  params.temperature = 0;
  EXPECT_EQ(candidates_needed(params, 1000, false), 1);
  params.presence_penalty = 1;
  EXPECT_EQ(candidates_needed(params, 1000, false), 1);
  EXPECT_EQ(candidates_needed(params, 1000, true), 0) << "what is drawn before a row is not its draft";
  params.num_logprobs = 0;
  EXPECT_EQ(candidates_needed(params, 1000, false), 0);
}

TEST(Sample, KeysOrderByValueAndThenByTheLowestId) {
  const std::vector<float> values = {-INFINITY, -3.0f, -0.0f, 1e-30f, 0.5f, 7.0f, INFINITY};
  for (size_t i = 0; i < values.size(); ++i) {
    EXPECT_GT(candidate_key(values[i], 3), candidate_key(values[i], 4));
    EXPECT_EQ(candidate_value(candidate_key(values[i], 248319)), values[i]);
    EXPECT_EQ(candidate_id(candidate_key(values[i], 248319)), 248319);
    EXPECT_GT(candidate_key(values[i], 1 << 20), 0u);
    if (i > 0) EXPECT_GT(candidate_key(values[i], 1 << 20), candidate_key(values[i - 1], 0));
  }
  EXPECT_EQ(candidate_key(-0.0f, 5), candidate_key(0.0f, 5));
}

/// Logits in which `token` wins by far.
std::vector<float> peak(int64_t vocab, int32_t token) {
  std::vector<float> logits(static_cast<size_t>(vocab), 0.0f);
  logits[static_cast<size_t>(token)] = 50.0f;
  return logits;
}

/// How often each token is drawn over `n` positions.
std::vector<int> histogram(Sampler& sampler, const std::vector<float>& logits, int n) {
  std::vector<int> counts(logits.size());
  for (int i = 0; i < n; ++i) ++counts[static_cast<size_t>(sampler.sample(logits).tokens.at(0))];
  return counts;
}
std::set<int> drawn(const std::vector<int>& counts) {
  std::set<int> tokens;
  for (size_t i = 0; i < counts.size(); ++i)
    if (counts[i] > 0) tokens.insert(static_cast<int>(i));
  return tokens;
}

TEST(Random, IsUniformAndNeverZeroOrOne) {
  double sum = 0;
  std::vector<int> buckets(16);
  for (int32_t token = 0; token < 100000; ++token) {
    const double u = uniform(draw_key(7, 3), token);
    ASSERT_GT(u, 0.0);
    ASSERT_LT(u, 1.0);
    sum += u;
    ++buckets[static_cast<size_t>(u * 16)];
  }
  EXPECT_NEAR(sum / 100000, 0.5, 5 * 0.2887 / std::sqrt(100000.0));
  for (const int count : buckets) EXPECT_NEAR(count, 6250, 5 * 77);  // five sigma
  EXPECT_TRUE(std::isfinite(gumbel(0x1p-53)));
  EXPECT_TRUE(std::isfinite(gumbel(1 - 0x1p-53)));
}

TEST(Random, DependsOnSeedIndexAndToken) {
  const float g = gumbel(1, 2, 3);
  EXPECT_EQ(g, gumbel(1, 2, 3));
  EXPECT_NE(g, gumbel(2, 2, 3));
  EXPECT_NE(g, gumbel(1, 3, 3));
  EXPECT_NE(g, gumbel(1, 2, 4));
  EXPECT_NE(gumbel(1, 2, 3), gumbel(2, 1, 3));
}

TEST(Sample, GreedyTakesTheLargestAndTheLowestIdOnTies) {
  Sampler sampler(100);
  sampler.set(greedy());
  std::vector<float> logits(100, -3.0f);
  logits[70] = logits[20] = logits[99] = 2.5f;
  EXPECT_EQ(sampler.sample(logits).tokens, (std::vector<int32_t>{20}));
}

TEST(Sample, NeverTakesAnIdWithoutText) {
  Sampler sampler(100, 90);
  sampler.set(greedy());
  EXPECT_EQ(sampler.sample(peak(100, 95)).tokens, (std::vector<int32_t>{0}));
  sampler.set({});
  for (int i = 0; i < 50; ++i) EXPECT_LT(sampler.sample(peak(100, 95)).tokens.at(0), 90);
}

TEST(Sample, DrawsInProportionToTheProbabilities) {
  Sampler sampler(6);
  SamplingParams params;
  params.temperature = 0.7f;
  params.seed = 11;
  sampler.set(params);
  const std::vector<float> logits = {0.0f, 1.0f, -1.0f, 0.5f, 2.0f, -4.0f};
  double total = 0;
  for (const float logit : logits) total += std::exp(logit / 0.7);
  constexpr int kDraws = 20000;
  const std::vector<int> counts = histogram(sampler, logits, kDraws);
  double chi_square = 0;
  for (size_t i = 0; i < logits.size(); ++i) {
    const double expected = kDraws * std::exp(logits[i] / 0.7) / total;
    chi_square += (counts[i] - expected) * (counts[i] - expected) / expected;
  }
  EXPECT_LT(chi_square, 20.5);  // five degrees of freedom: exceeded once in a thousand seeds, and this seed is fixed
}

TEST(Sample, EqualsGumbelMaxComputedPlainly) {
  Random random(5);
  Sampler sampler(5000);
  SamplingParams params;
  params.temperature = 1.3f;
  params.seed = 99;
  sampler.set(params);
  for (int round = 0; round < (few_launches() ? 2 : 40); ++round) {
    const std::vector<float> logits = random.normals(5000, round % 2 == 0 ? 0.1f : 4.0f);
    int32_t best = 0;
    float best_score = -INFINITY;
    for (int32_t id = 0; id < 5000; ++id) {
      const float score = logits[static_cast<size_t>(id)] / 1.3f + gumbel(99, sampler.cursor() + 1, id);
      if (score > best_score) best_score = score, best = id;
    }
    EXPECT_EQ(sampler.sample(logits).tokens, (std::vector<int32_t>{best}));
  }
}

// SAMP-64
TEST(Sample, RepeatsItselfForASeedAndIndexAndDiffersForOthers) {
  const std::vector<float> flat(1000, 0.0f);
  const auto text = [&](uint64_t seed, int threads) {
    Sampler sampler(1000, 0, threads);
    SamplingParams params;
    params.seed = seed;
    sampler.set(params);
    std::vector<int32_t> tokens;
    for (int i = 0; i < 20; ++i) tokens.push_back(sampler.sample(flat).tokens.at(0));
    return tokens;
  };
  EXPECT_EQ(text(1, 1), text(1, 1));
  EXPECT_EQ(text(1, 1), text(1, 3));
  EXPECT_NE(text(1, 1), text(2, 1));
  const std::vector<int32_t> tokens = text(1, 1);
  EXPECT_GT(std::set<int32_t>(tokens.begin(), tokens.end()).size(), 15u);
}

TEST(Sample, TopKKeepsTheKMostLikelyAndTheLowestIdsOnTies) {
  Sampler sampler(50);
  SamplingParams params;
  params.top_k = 3;
  sampler.set(params);
  std::vector<float> logits(50, 0.0f);
  logits[40] = 1.0f;
  logits[30] = logits[20] = logits[10] = 0.9f;  // two of these three fit
  EXPECT_EQ(drawn(histogram(sampler, logits, 400)), (std::set<int>{10, 20, 40}));
  for (const int32_t off : {0, -1, 50, 1000}) {
    params.top_k = off;
    sampler.set(params);
    EXPECT_GT(drawn(histogram(sampler, logits, 400)).size(), 40u) << off;
  }
  params.top_k = 1;
  sampler.set(params);
  EXPECT_EQ(drawn(histogram(sampler, logits, 50)), (std::set<int>{40}));
}

TEST(Sample, TopKAboveTheHeapKeepsTheSameSet) {
  Random random(21);
  Sampler sampler(5000);
  SamplingParams params;
  params.top_k = 1500;
  params.temperature = 100.0f;  // nearly flat: many different tokens are drawn
  sampler.set(params);
  const std::vector<float> logits = random.normals(5000);
  std::vector<float> sorted = logits;
  std::sort(sorted.rbegin(), sorted.rend());
  for (const int token : drawn(histogram(sampler, logits, 2000))) EXPECT_GE(logits[static_cast<size_t>(token)], sorted[1499]);
}

TEST(Sample, TopPKeepsTheShortestPrefixThatHoldsP) {
  const std::vector<float> logits = {std::log(0.1f), std::log(0.4f), std::log(0.2f), std::log(0.3f)};
  for (const auto& [p, expected] : {std::pair{0.39f, std::set<int>{1}},
                                    {0.41f, {1, 3}},
                                    {0.69f, {1, 3}},
                                    {0.71f, {1, 2, 3}},
                                    {0.95f, {0, 1, 2, 3}},
                                    {1.0f, {0, 1, 2, 3}},
                                    {1e-6f, {1}}}) {
    Sampler sampler(4);
    SamplingParams params;
    params.top_p = p;
    sampler.set(params);
    EXPECT_EQ(drawn(histogram(sampler, logits, 500)), expected) << p;
  }
}

TEST(Sample, TopPOfAFlatDistributionOverALargeVocabularyIsRight) {
  Sampler sampler(20000);
  SamplingParams params;
  params.top_p = 0.5f;
  sampler.set(params);
  std::vector<float> logits(20000);
  for (size_t i = 0; i < logits.size(); ++i)
    logits[i] = -1e-5f * static_cast<float>(i);  // falls slowly: half of the mass is in about the first 9500
  double total = 0, prefix = 0;
  for (const float logit : logits) total += std::exp(logit);
  int kept = 0;
  while (prefix < 0.5 * total) prefix += std::exp(logits[static_cast<size_t>(kept++)]);
  const std::set<int> tokens = drawn(histogram(sampler, logits, few_launches() ? 1 : 100));
  EXPECT_LT(*tokens.rbegin(), kept + 2);
  if (few_launches()) return;
  EXPECT_GT(*tokens.rbegin(), kept * 9 / 10);
}

TEST(Sample, TopKComesBeforeTopP) {
  // Of the two tokens that top-k leaves, the first holds 4/7 of the probability.
  const std::vector<float> logits = {std::log(0.1f), std::log(0.4f), std::log(0.2f), std::log(0.3f)};
  Sampler sampler(4);
  SamplingParams params;
  params.top_k = 2;
  params.top_p = 0.5f;  // of all four: {1, 3}
  sampler.set(params);
  EXPECT_EQ(drawn(histogram(sampler, logits, 300)), (std::set<int>{1}));
}

TEST(Sample, MinPDropsWhatIsFarBelowTheBest) {
  const std::vector<float> logits = {std::log(0.1f), std::log(0.4f), std::log(0.2f), std::log(0.3f)};
  for (const auto& [p, expected] : {std::pair{0.6f, std::set<int>{1, 3}}, {0.4f, {1, 2, 3}}, {0.0f, {0, 1, 2, 3}}, {1.0f, {1}}}) {
    Sampler sampler(4);
    SamplingParams params;
    params.min_p = p;
    sampler.set(params);
    EXPECT_EQ(drawn(histogram(sampler, logits, 500)), expected) << p;
  }
}

// SAMP-65
TEST(Sample, MinPHoldsForEverySeed) {
  const std::vector<float> logits = {std::log(0.1f), std::log(0.4f), std::log(0.2f), std::log(0.3f)};
  for (uint64_t seed = 0; seed < 50; ++seed) {
    Sampler sampler(4), again(4);
    SamplingParams params;
    params.min_p = 0.6f;
    params.seed = seed;
    sampler.set(params);
    again.set(params);
    const std::vector<int> counts = histogram(sampler, logits, 50);
    EXPECT_EQ(counts[0] + counts[2], 0) << seed;
    EXPECT_EQ(counts, histogram(again, logits, 50)) << seed;
  }
}

// SAMP-62
TEST(Sample, ATinyTemperatureIsGreedyAndFinite) {
  for (const float temperature : {1e-30f, 1e-6f, 1e-4f, 1e-3f, 1e-2f}) {
    for (const float best : {1.0f, 30.0f, 1e4f}) {
      Sampler sampler(50);
      SamplingParams params;
      params.temperature = temperature;
      params.num_logprobs = 3;
      sampler.set(params);
      std::vector<float> logits(50);
      for (size_t i = 0; i < logits.size(); ++i) logits[i] = best - 0.5f * static_cast<float>(1 + (i * 7) % 50);
      logits[33] = best;
      for (int i = 0; i < 50; ++i) {
        const auto answer = sampler.sample(logits);
        EXPECT_FALSE(answer.non_finite);
        EXPECT_EQ(answer.tokens, (std::vector<int32_t>{33})) << temperature << " " << best;
        for (int k = 0; k < 4; ++k) EXPECT_TRUE(std::isfinite(answer.logprobs[static_cast<size_t>(k)]));
      }
    }
  }
}

TEST(Sample, PenaltiesActOnWhatOutputAndPromptHold) {
  Sampler sampler(10);
  SamplingParams params = greedy();
  params.frequency_penalty = 1.0f;
  sampler.set(params);
  std::vector<float> logits(10, 0.0f);
  logits[3] = 2.5f;
  logits[7] = 1.0f;
  std::vector<int32_t> tokens;
  for (int i = 0; i < 4; ++i) tokens.push_back(sampler.sample(logits).tokens.at(0));
  EXPECT_EQ(tokens, (std::vector<int32_t>{3, 3, 7, 3}));  // 2.5; 1.5; 0.5 < 1; 0.5 > 0

  params = greedy();
  params.presence_penalty = 2.0f;
  sampler.set(params);
  for (int32_t id = 0; id < 10; ++id) sampler.count(id) = id == 3 ? 5 : 0;
  EXPECT_EQ(sampler.sample(logits).tokens.at(0), 7) << "presence counts once: 2.5 - 2 < 1";

  params = greedy();
  params.repetition_penalty = 5.0f;
  sampler.set(params);
  for (int32_t id = 0; id < 10; ++id) sampler.count(id) = 0;
  EXPECT_EQ(sampler.sample(logits).tokens.at(0), 3);
  sampler.count(3) = 0;
  sampler.set_in_prompt(3);
  EXPECT_EQ(sampler.sample(logits).tokens.at(0), 7) << "2.5 / 5 < 1";
  std::vector<float> negative(10, -1.0f);
  negative[3] = -0.5f;
  sampler.count(7) = 0;
  EXPECT_EQ(sampler.sample(negative).tokens.at(0), 0) << "-0.5 * 5 < -1";
}

TEST(Sample, BiasComesFirstAndMayForceOrBan) {
  Sampler sampler(10);
  SamplingParams params = greedy();
  params.logit_bias = {{4, 100.0f}, {2, -100.0f}};
  sampler.set(params);
  EXPECT_EQ(sampler.sample(peak(10, 2)).tokens.at(0), 4);
}

TEST(Sample, MasksStopIdsUntilMinTokens) {
  Sampler sampler(10);
  SamplingParams params = greedy();
  params.min_tokens = 2;
  params.stop_ids = {5};
  sampler.set(params);
  std::vector<float> logits = peak(10, 5);
  logits[8] = 1.0f;
  std::vector<int32_t> tokens;
  for (int i = 0; i < 3; ++i) tokens.push_back(sampler.sample(logits).tokens.at(0));
  EXPECT_EQ(tokens, (std::vector<int32_t>{8, 8, 5}));
}

TEST(Sample, ObeysTheGrammarMaskAndFailsWhereNothingIsAllowed) {
  for (const float temperature : {0.0f, 1.0f}) {
    Sampler sampler(70);
    SamplingParams params;
    params.temperature = temperature;
    params.top_k = 5;
    sampler.set(params);
    sampler.allow({33, 64});
    for (int i = 0; i < (few_launches() ? 3 : 20); ++i) EXPECT_THAT(sampler.sample(peak(70, 2)).tokens.at(0), ::testing::AnyOf(33, 64));
    sampler.allow({});
    const auto answer = sampler.sample(peak(70, 2));
    EXPECT_TRUE(answer.non_finite);
    EXPECT_TRUE(answer.tokens.empty());
  }
}

TEST(Sample, FailsOnNonFiniteLogitsAndEmitsNothing) {
  for (const float bad : {NAN, INFINITY, -INFINITY})
    for (const float temperature : {0.0f, 1.0f}) {
      Sampler sampler(100, 90);
      SamplingParams params;
      params.temperature = temperature;
      sampler.set(params);
      std::vector<float> logits = peak(100, 3);
      logits[97] = bad;  // even where no text is
      const auto answer = sampler.sample(logits);
      EXPECT_TRUE(answer.non_finite);
      EXPECT_TRUE(answer.tokens.empty());
      EXPECT_EQ(sampler.slot().num_generated, 0);
      EXPECT_FALSE(sampler.sample(peak(100, 3)).non_finite);
    }
}

TEST(Sample, ReportsLogprobsOfTheRawDistribution) {
  Sampler sampler(50);
  SamplingParams params = greedy();
  params.num_logprobs = 3;
  params.logit_bias = {{9, 100.0f}};  // chosen, though only fourth by itself
  sampler.set(params);
  std::vector<float> logits(50, -2.0f);
  logits[5] = 3.0f;
  logits[6] = 2.0f;
  logits[9] = logits[8] = 1.0f;
  double total = 0;
  for (const float logit : logits) total += std::exp(logit);
  const auto answer = sampler.sample(logits);
  EXPECT_EQ(answer.tokens.at(0), 9);
  EXPECT_EQ(answer.rank, 4);
  EXPECT_EQ((std::vector<int32_t>(answer.logprob_ids.begin(), answer.logprob_ids.begin() + 4)), (std::vector<int32_t>{9, 5, 6, 8}));
  const std::vector<float> expected = {1.0f, 3.0f, 2.0f, 1.0f};
  for (size_t i = 0; i < 4; ++i) EXPECT_NEAR(answer.logprobs[i], expected[i] - std::log(total), 1e-6);
}

// LOGP-68
TEST(Sample, KeepsLogprobsFinite) {
  Sampler sampler(10);
  SamplingParams params = greedy();
  params.num_logprobs = 2;
  params.logit_bias = {{4, 1e30f}};
  sampler.set(params);
  std::vector<float> logits(10, -1e20f);
  logits[0] = 1e20f;
  const auto answer = sampler.sample(logits);
  EXPECT_EQ(answer.tokens.at(0), 4);
  EXPECT_EQ(answer.logprobs[0], -9999.0f);
  EXPECT_EQ(answer.logprobs[1], 0.0f);
}

TEST(Sample, AdvancesCursorBoundaryAndLastToken) {
  Sampler sampler(10);
  sampler.set(greedy());
  EXPECT_TRUE(sampler.skip(63).tokens.empty());
  EXPECT_EQ(sampler.cursor(), 63);
  EXPECT_EQ(sampler.boundary(), 0);
  EXPECT_EQ(sampler.sample(peak(10, 4)).tokens, (std::vector<int32_t>{4}));
  EXPECT_EQ(sampler.cursor(), 64);
  EXPECT_EQ(sampler.boundary(), 64) << "a committed run folds where it ends";
  EXPECT_EQ(sampler.last_token(), 4);
  EXPECT_EQ(sampler.count(4), 1);
  EXPECT_EQ(sampler.slot().num_generated, 1);
  sampler.sample(peak(10, 5), 70);
  EXPECT_EQ(sampler.cursor(), 134);
  EXPECT_EQ(sampler.boundary(), 128);
}

TEST(Sample, AcceptsDraftsUntilTheFirstMismatch) {
  for (int32_t matching = 0; matching <= 3; ++matching) {
    Sampler sampler(20);
    sampler.set(greedy());
    sampler.cursor() = 62;
    const std::vector<int32_t> target = {3, 5, 7, 9};
    std::vector<int32_t> drafts = {3, 5, 7};
    if (matching < 3) drafts[static_cast<size_t>(matching)] = 19;
    sampler.set_drafts(drafts);
    std::vector<std::vector<float>> rows;
    for (const int32_t token : target) rows.push_back(peak(20, token));
    const auto answer = sampler.verify(rows);
    EXPECT_EQ(answer.tokens, std::vector<int32_t>(target.begin(), target.begin() + matching + 1));
    EXPECT_EQ(sampler.cursor(), 62 + matching + 1);
    EXPECT_EQ(sampler.boundary(), 0) << "a verify stores no fold";
    EXPECT_EQ(sampler.last_token(), target[static_cast<size_t>(matching)]);
    EXPECT_EQ(sampler.slot().num_generated, matching + 1);
  }
}

TEST(Sample, AcceptsNothingAfterAStop) {
  Sampler sampler(20);
  SamplingParams params = greedy();
  params.stop_ids = {5};
  sampler.set(params);
  sampler.set_drafts({3, 5, 7});
  const auto answer = sampler.verify({peak(20, 3), peak(20, 5), peak(20, 7), peak(20, 9)});
  EXPECT_EQ(answer.tokens, (std::vector<int32_t>{3, 5}));
  EXPECT_EQ(sampler.cursor(), 2);
  EXPECT_EQ(sampler.count(7), 0);
}

// SAMP-64
TEST(Sample, WritesTheSameTextWithDraftsAsWithout) {
  // Penalties, min_tokens and seeds all depend on what was accepted before: right drafts, wrong drafts and none must agree.
  Random random(77);
  constexpr int64_t kVocab = 40;
  std::vector<std::vector<float>> logits;  // of the row at each index
  for (int i = 0; i < 120; ++i) logits.push_back(random.normals(kVocab, 2.0f));
  SamplingParams params;
  params.temperature = 0.8f;
  params.top_k = 12;
  params.top_p = 0.9f;
  params.presence_penalty = 0.7f;
  params.frequency_penalty = 0.3f;
  params.repetition_penalty = 1.2f;
  params.min_tokens = 30;
  params.seed = 4;
  Sampler plain(kVocab);
  plain.set(params);
  std::vector<int32_t> expected;
  for (int i = 0; i < 100; ++i) expected.push_back(plain.sample(logits[static_cast<size_t>(i)]).tokens.at(0));

  Sampler drafted(kVocab);
  drafted.set(params);
  std::vector<int32_t> text;
  int accepted = 0, verifies = 0;
  while (text.size() < 100) {
    const size_t at = text.size();
    std::vector<int32_t> drafts;
    for (size_t i = 0; i < 3; ++i) {
      const int32_t right = at + i < 100 ? expected[at + i] : 0;
      drafts.push_back(random.below(3) > 0 ? right : (right + 1) % static_cast<int32_t>(kVocab));
    }
    drafted.set_drafts(drafts);
    const auto answer = drafted.verify({logits[at], logits[at + 1], logits[at + 2], logits[at + 3]});
    text.insert(text.end(), answer.tokens.begin(), answer.tokens.end());
    accepted += static_cast<int>(answer.tokens.size()) - 1;
    ++verifies;
  }
  text.resize(100);
  EXPECT_EQ(text, expected);
  EXPECT_GT(accepted, 20);
  EXPECT_GT(verifies, 26);
}

TEST(Sample, TakesBackDraftsBeforeANonFiniteRow) {
  Sampler sampler(20);
  sampler.set(greedy());
  sampler.set_drafts({3, 5, 7});
  std::vector<float> bad = peak(20, 5);
  bad[0] = NAN;
  const auto answer = sampler.verify({peak(20, 3), bad, peak(20, 7), peak(20, 9)});
  EXPECT_TRUE(answer.non_finite);
  EXPECT_TRUE(answer.tokens.empty());
  EXPECT_EQ(sampler.cursor(), 0);
  EXPECT_EQ(sampler.count(3), 0);
  EXPECT_EQ(sampler.slot().num_generated, 0);
}

/// A vocabulary that no number of blocks divides, and that of the model.
const std::vector<int64_t> kLargeVocabs = few_launches() ? std::vector<int64_t>{10007} : std::vector<int64_t>{10007, 248320};
/// Ids around the borders of equal parts of a vocabulary, lowest first.
std::vector<int32_t> border_ids(int64_t vocab) {
  std::set<int32_t> ids;
  for (const int64_t parts : {2, 8, 16, 128})
    for (int64_t part = 1; part < parts; ++part)
      for (int64_t id = part * vocab / parts - 4; id <= part * vocab / parts + 4; ++id) ids.insert(static_cast<int32_t>(id));
  return {ids.begin(), ids.end()};
}

TEST(Sample, FindsWhatStandsAtTheBordersOfALargeVocabulary) {
  for (const int64_t vocab : kLargeVocabs) {
    Sampler sampler(vocab, vocab - 100);
    sampler.set(greedy());
    const std::vector<float> flat(static_cast<size_t>(vocab), -1.0f);
    EXPECT_EQ(sampler.sample(flat).tokens.at(0), 0);
    std::vector<int32_t> ids = border_ids(vocab);
    ids.insert(ids.end(), {1, static_cast<int32_t>(vocab - 101)});
    for (size_t i = 0; i < ids.size(); i += 37) {
      std::vector<float> logits = flat;
      logits[static_cast<size_t>(ids[i])] = 3;
      EXPECT_EQ(sampler.sample(logits).tokens.at(0), ids[i]);
      for (const int32_t other : ids)
        if (other > ids[i]) logits[static_cast<size_t>(other)] = 3;  // ties, in other parts as well
      logits[static_cast<size_t>(vocab - 100)] = 4;                  // no text
      EXPECT_EQ(sampler.sample(logits).tokens.at(0), ids[i]);
    }
    for (const int64_t bad : {int64_t{0}, vocab / 8, vocab - 1}) {
      std::vector<float> logits = flat;
      logits[static_cast<size_t>(bad)] = INFINITY;
      EXPECT_TRUE(sampler.sample(logits).non_finite) << bad;
    }
  }
}

TEST(Sample, MasksAndBiasActAtTheBordersOfALargeVocabulary) {
  for (const int64_t vocab : kLargeVocabs) {
    const std::vector<int32_t> ids = border_ids(vocab);
    Sampler sampler(vocab);
    sampler.allow(ids);
    SamplingParams params;
    params.seed = 3;
    sampler.set(params);
    const std::vector<float> flat(static_cast<size_t>(vocab), 0.5f);
    std::set<int32_t> seen;
    for (int i = 0; i < 40; ++i) seen.insert(sampler.sample(flat).tokens.at(0));
    EXPECT_TRUE(std::includes(ids.begin(), ids.end(), seen.begin(), seen.end()));
    EXPECT_GT(seen.size(), 20u);
    params = greedy();
    for (size_t i = 0; i < ids.size() && i < 900; ++i) params.logit_bias.emplace_back(ids[i], static_cast<float>(i) * 0.5f);
    params.logit_bias.emplace_back(ids[2], 2000.0f);  // a second time: they add up
    sampler.set(params);
    EXPECT_EQ(sampler.sample(flat).tokens.at(0), ids[2]);
  }
}

/// The token that the rules draw, from a sorted vocabulary; `logits` are transformed.
int32_t drawn_plainly(const std::vector<float>& logits, const SamplingParams& params, int64_t index) {
  std::vector<int32_t> order(logits.size());
  std::iota(order.begin(), order.end(), 0);
  const auto at = [&](int32_t id) { return logits[static_cast<size_t>(id)]; };
  std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) { return at(a) > at(b); });
  const float best = at(order[0]);
  if (params.top_k > 0 && params.top_k < std::ssize(order)) order.resize(static_cast<size_t>(params.top_k));
  if (params.top_p < 1) {
    const auto weight = [&](int32_t id) { return static_cast<double>(std::exp((at(id) - best) / params.temperature)); };
    double all = 0, sum = 0;
    for (const int32_t id : order) all += weight(id);
    size_t kept = 0;
    while (kept < order.size() && sum < static_cast<double>(params.top_p) * all) sum += weight(order[kept++]);
    order.resize(std::max<size_t>(kept, 1));
  }
  if (params.min_p > 0) std::erase_if(order, [&](int32_t id) { return at(id) < best + params.temperature * std::log(params.min_p); });
  int32_t token = -1;
  float score = -INFINITY;
  for (const int32_t id : order)
    if (const float x = at(id) / params.temperature + gumbel(params.seed, index, id); x > score || (x == score && id < token))
      score = x, token = id;
  return token;
}

TEST(Sample, LimitsOfALargeVocabularyAreThoseOfSorting) {
  Random random(31);
  for (const int64_t vocab : kLargeVocabs) {
    const bool large = vocab > 100000;
    Sampler sampler(vocab);
    for (int shape = 0; shape < 6; ++shape) {
      std::vector<float> logits = random.normals(vocab, shape == 1 ? 0.01f : 3.0f);
      if (shape == 2)  // many ties
        for (float& x : logits) x = std::round(x);
      if (shape == 3)  // few tokens far above the others, some of them further than any histogram reaches
        for (size_t i = 0; i < logits.size(); ++i) logits[i] = i % 977 == 5 ? 30 + logits[i] : 10 * logits[i] - 40;
      if (shape == 4) std::fill(logits.begin(), logits.end(), 1.5f);
      if (shape == 5)  // the best ones at few distances from each other
        for (size_t i = 0; i < logits.size(); ++i) logits[i] += i % 4096 < 12 ? 30 : 0;
      for (const float temperature : {1.0f, 0.2f, 3.0f})
        for (const auto& [top_k, top_p, min_p] : {std::tuple{0, 0.9f, 0.0f},
                                                  {20, 1.0f, 0.0f},
                                                  {50, 0.95f, 0.0f},
                                                  {kMaxCandidates, 0.999f, 0.0f},
                                                  {3000, 0.5f, 0.0f},
                                                  {1, 0.3f, 0.0f},
                                                  {700, 0.8f, 0.01f},
                                                  {0, 1.0f, 0.1f}}) {
          if (large && (temperature != 1.0f || top_k == 700)) continue;  // sorting takes long
          SamplingParams params;
          params.temperature = temperature;
          params.top_k = top_k;
          params.top_p = top_p;
          params.min_p = min_p;
          params.seed = static_cast<uint64_t>(100 * shape + top_k);
          sampler.set(params);
          for (int i = 0; i < (large ? 1 : 3); ++i) {
            const int32_t expected = drawn_plainly(logits, params, sampler.cursor() + 1);
            EXPECT_EQ(sampler.sample(logits).tokens, (std::vector<int32_t>{expected}))
                << vocab << " shape " << shape << " T " << temperature << " k " << top_k << " p " << top_p;
          }
        }
    }
  }
}

TEST(Sample, RanksAndLogprobsOfALargeVocabularyAreThoseOfSorting) {
  Random random(32);
  for (const int64_t vocab : kLargeVocabs) {
    Sampler sampler(vocab, vocab - 100);
    SamplingParams params;
    params.num_logprobs = kMaxLogprobs;
    params.seed = 8;
    sampler.set(params);
    for (int shape = 0; shape < (few_launches() ? 2 : 3); ++shape) {
      std::vector<float> logits = random.normals(vocab, 2.0f);
      if (shape == 1)
        for (float& x : logits) x = std::round(x);
      if (shape == 2) std::fill(logits.begin(), logits.end(), -0.25f);
      const auto answer = sampler.sample(logits);
      std::vector<int32_t> order(logits.size());
      std::iota(order.begin(), order.end(), 0);
      std::stable_sort(order.begin(), order.end(),
                       [&](int32_t a, int32_t b) { return logits[static_cast<size_t>(a)] > logits[static_cast<size_t>(b)]; });
      double total = 0;
      for (const float x : logits) total += std::exp(static_cast<double>(x));
      EXPECT_EQ(order[static_cast<size_t>(answer.rank - 1)], answer.tokens.at(0));
      EXPECT_EQ(answer.logprob_ids[0], answer.tokens.at(0));
      EXPECT_EQ((std::vector<int32_t>(answer.logprob_ids.begin() + 1, answer.logprob_ids.end())),
                (std::vector<int32_t>(order.begin(), order.begin() + kMaxLogprobs)));
      for (size_t i = 0; i <= kMaxLogprobs; ++i)
        EXPECT_NEAR(answer.logprobs[i], static_cast<double>(logits[static_cast<size_t>(answer.logprob_ids[i])]) - std::log(total), 2e-5);
    }
  }
}

TEST(Sample, PenaltiesSeeWhatWasDrawnWhereDraftsCountAsAccepted) {
  Random random(33);
  constexpr int64_t kVocab = 300;
  SamplingParams params;
  params.frequency_penalty = 1.5f;
  params.presence_penalty = 0.5f;
  params.seed = 12;
  const std::vector<float> logits = random.normals(kVocab, 1.0f);
  Sampler one(kVocab), many(kVocab);
  one.set(params);
  many.set(params);
  std::vector<int32_t> expected, text;
  const int verifies = few_launches() ? 2 : 10;
  for (int i = 0; i < 4 * verifies; ++i) expected.push_back(one.sample(logits).tokens.at(0));
  many.set_drafts({0, 0, 0});  // none of which is right
  for (int i = 0; i < verifies; ++i) {
    const auto answer = many.verify_as_if({logits, logits, logits, logits}, 3);
    EXPECT_EQ(answer.tokens.size(), 4u);
    text.insert(text.end(), answer.tokens.begin(), answer.tokens.end());
  }
  EXPECT_EQ(text, expected);
}

/// Parameters of every kind, each of which may take its own way through a kernel.
std::vector<SamplingParams> params_of_all_kinds() {
  std::vector<SamplingParams> kinds;
  const auto add = [&](float temperature, int32_t top_k, float top_p, float min_p) -> SamplingParams& {
    SamplingParams& p = kinds.emplace_back();
    p.temperature = temperature;
    p.top_k = top_k;
    p.top_p = top_p;
    p.min_p = min_p;
    p.seed = kinds.size();
    return p;
  };
  for (const bool penalties : {false, true})
    for (const auto& [temperature, top_k, top_p, min_p] : {std::tuple{0.0f, 0, 1.0f, 0.0f}, {1.0f, 0, 1.0f, 0.0f}, {0.7f, 20, 0.95f, 0.0f}, {1.3f, kMaxCandidates, 1.0f, 0.02f}}) {
      SamplingParams& p = add(temperature, top_k, top_p, min_p);
      if (!penalties) continue;
      p.presence_penalty = 1.5f;
      p.frequency_penalty = 0.25f;
      p.repetition_penalty = 1.1f;
    }
  add(2, 0, 1, 0);
  add(1, 1, 1, 0);
  add(1, 0, 0.9f, 0);
  add(1, 0, 1, 0.1f);
  add(0.9f, 700, 0.8f, 0);
  add(1, 20, 0.95f, 0).num_logprobs = 5;
  add(0, 0, 1, 0).num_logprobs = 0;
  add(1, 20, 0.95f, 0).logit_bias = {{7, 9.0f}, {11, -100.0f}, {7, 1.0f}};
  SamplingParams& early = add(0.8f, 40, 1, 0);
  early.min_tokens = 9;
  early.stop_ids = {3, 4000};
  return kinds;
}

TEST(Sample, DrawsOfManyRunsWhatItDrawsOfEachAlone) {
  Random random(35);
  const std::vector<SamplingParams> kinds = params_of_all_kinds();
  for (const int64_t vocab : {4099, 5004}) {
    if (few_launches() && vocab != 4099) continue;
    Bed bed;
    const auto kernel = make_kernel<Sample>(bed, {vocab, vocab - 5, kMaxDrafts});
    const auto num_runs = static_cast<int32_t>((few_launches() ? 1 : 3) * kinds.size() + 2);
    SlotTables slots = make_slots(bed, num_runs, kMaxDrafts, 1);
    SamplerTables tables;
    tables.params = bed.zeros(DType::kU8, {num_runs, sizeof(SlotSampling)});
    tables.counts = bed.zeros(DType::kI32, {num_runs, vocab});
    tables.in_prompt = bed.zeros(DType::kU8, {num_runs, vocab});
    std::vector<SampleRun> runs;
    int32_t num_rows = 0, num_masks = 0;
    for (int32_t r = 0; r < num_runs; ++r) {
      const auto slot = static_cast<int32_t>((int64_t{r} * 5 + 2) % num_runs);
      tables.params.data<SlotSampling>()[slot] = to_slot_sampling(kinds[static_cast<size_t>(r) % kinds.size()]);
      slots.cursor.data<int32_t>()[slot] = static_cast<int32_t>(random.below(100));
      for (int64_t id = 0; id < vocab; ++id) {
        tables.counts.data<int32_t>()[slot * vocab + id] = static_cast<int32_t>(std::max<int64_t>(random.below(20) - 16, 0));
        tables.in_prompt.data<uint8_t>()[slot * vocab + id] = random.below(8) == 0 ? 1 : 0;
      }
      for (int64_t i = 0; i < kMaxDrafts; ++i) slots.drafts.data<int32_t>()[slot * kMaxDrafts + i] = static_cast<int32_t>(random.below(vocab - 5));
      SampleRun run{.slot = r % 11 == 7 ? -1 : slot, .num_rows = 1 + r % 4, .first_logits_row = num_rows};
      if (r % 5 == 3) run.verify = r % 2 == 0 ? 1 : kSyntheticAcceptance + r % 4;
      if (r % 13 == 5) run.first_logits_row = -1;
      const int32_t draws = run.verify != 0 ? run.num_rows : 1;
      if (run.first_logits_row >= 0) num_rows += draws + (r % 9 == 4 ? 2 : 0);  // rows of nobody
      if (r % 3 == 1) run.first_mask_row = std::exchange(num_masks, num_masks + draws);
      runs.push_back(run);
    }
    EXPECT_EQ(std::gcd(5, num_runs), 1) << "each has a slot of its own";
    std::vector<float> logits = random.normals(num_rows * vocab, 3);
    for (const auto& [run, value] : {std::pair{20, NAN}, {23, INFINITY}, {38, -INFINITY}})
      std::fill_n(logits.begin() + std::max(runs[static_cast<size_t>(run % num_runs)].first_logits_row, 0) * vocab, run == 20 ? vocab : 1, value);
    const int64_t words = (vocab + 31) / 32;
    const TensorView masks = bed.tensor(DType::kI32, {num_masks, words});
    for (int64_t i = 0; i < num_masks * words; ++i) masks.data<uint32_t>()[i] = static_cast<uint32_t>(random.below(int64_t{1} << 32));
    std::fill_n(masks.data<uint32_t>(), words, 0u);  // the first allows nothing

    const std::vector<TensorView> state = {tables.params, tables.counts, slots.cursor, slots.boundary, slots.last_token};
    std::vector<std::string> before;
    for (const TensorView& view : state) before.push_back(Bed::bytes(view));
    /// What becomes of each run, as bytes, and of its slot.
    const auto sample = [&](std::span<const SampleRun> some, const std::vector<float>& rows) {
      for (size_t i = 0; i < state.size(); ++i) std::memcpy(state[i].data<std::byte>(), before[i].data(), before[i].size());
      const auto count = std::ssize(some);
      const TensorView table = bed.tensor(DType::kI32, {count, kSampleRunFields});
      std::memcpy(table.data<std::byte>(), some.data(), some.size_bytes());
      const SampleOutput out{bed.zeros(DType::kI32, {count, kMaxDrafts + 1}), bed.zeros(DType::kI32, {count}), bed.zeros(DType::kI32, {count}), bed.zeros(DType::kF32, {count, kMaxDrafts + 1, 1 + kMaxLogprobs}),
                             bed.zeros(DType::kI32, {count, kMaxDrafts + 1, 1 + kMaxLogprobs}), bed.zeros(DType::kI32, {count, kMaxDrafts + 1})};
      const int64_t n = std::ssize(rows) / vocab;
      Launch launch = bed.launch(*kernel, n);
      kernel->enqueue(table, bed.tensor(DType::kF32, {n, vocab}, rows), masks, tables, slots, out, launch);
      std::vector<std::string> result;
      for (int64_t i = 0; i < count; ++i) {
        std::string& bytes = result.emplace_back();
        const int32_t num_tokens = out.num_tokens.data<int32_t>()[i];
        bytes += Bed::bytes(out.num_tokens.at(i)) + Bed::bytes(out.non_finite.at(i)) + Bed::bytes(out.tokens.at(i).first(num_tokens));
        for (int32_t draw = 0; draw < num_tokens; ++draw) bytes += Bed::bytes(out.logprobs.at(i).at(draw)) + Bed::bytes(out.logprob_ids.at(i).at(draw)) + Bed::bytes(out.chosen_rank.at(i).at(draw));
        if (const int32_t slot = some[static_cast<size_t>(i)].slot; slot >= 0)
          for (const TensorView& view : state) bytes += Bed::bytes(view.at(slot));
      }
      return result;
    };
    const std::vector<std::string> together = sample(runs, logits);
    int failed = 0;
    for (int32_t r = 0; r < num_runs; ++r) {
      if (few_launches() && r % 40 != 0) continue;
      SampleRun run = runs[static_cast<size_t>(r)];
      std::vector<float> own;
      if (run.first_logits_row >= 0) {
        const auto first = logits.begin() + run.first_logits_row * vocab;
        own.assign(first, first + (run.verify != 0 ? run.num_rows : 1) * vocab);
        run.first_logits_row = 0;
      }
      const Bed::Temporaries here(bed);
      const std::string alone = sample({&run, 1}, own).at(0);
      EXPECT_TRUE(alone == together[static_cast<size_t>(r)]) << "run " << r << ", vocabulary " << vocab;
      failed += alone.substr(0, 8) == std::string("\0\0\0\0\1\0\0\0", 8) ? 1 : 0;
    }
    if (few_launches()) continue;
    EXPECT_GE(failed, 3);
    EXPECT_LE(failed, 5);
  }
}

TEST(Sample, FindsTheArgmaxOfManyRowsOfALargeVocabulary) {
  Random random(34);
  for (const int64_t vocab : kLargeVocabs) {
    Bed bed;
    const auto kernel = make_kernel<Sample>(bed, {vocab, vocab - 3, 0});
    constexpr int64_t kRows = 5;
    std::vector<float> logits = random.normals(kRows * vocab);
    std::vector<int32_t> expected;
    for (int64_t row = 0; row < kRows; ++row) {
      const auto at = static_cast<int32_t>(row * (vocab - 4) / (kRows - 1));
      for (int64_t id = at; id < vocab; id += vocab / 9) logits[static_cast<size_t>(row * vocab + id)] = 9;
      logits[static_cast<size_t>(row * vocab + vocab - 2)] = 10;  // no text
      expected.push_back(at);
    }
    const TensorView ids = bed.tensor(DType::kI32, {kRows});
    Launch launch = bed.launch(*kernel, kRows);
    kernel->enqueue_argmax(bed.tensor(DType::kF32, {kRows, vocab}, logits), ids, launch);
    EXPECT_EQ((std::vector<int32_t>(ids.data<int32_t>(), ids.data<int32_t>() + kRows)), expected);
    // The same by three ranks, the last of which has no text.
    const std::vector<int64_t> cut = {0, vocab / 3, vocab - 2, vocab};
    const TensorView gathered = bed.tensor(DType::kI32, {kRows, 3 * kKeyWords});
    for (size_t part = 0; part < 3; ++part) {
      const int64_t first = cut[part], width = cut[part + 1] - first;
      std::vector<float> own;
      for (int64_t row = 0; row < kRows; ++row) own.insert(own.end(), logits.begin() + row * vocab + first, logits.begin() + row * vocab + first + width);
      const TensorView keys = bed.tensor(DType::kI32, {kRows, kKeyWords});
      kernel->enqueue_argmax_candidates(bed.tensor(DType::kF32, {kRows, width}, own), static_cast<int32_t>(first), keys, launch);
      for (int64_t row = 0; row < kRows; ++row) gathered.data<uint64_t>()[3 * row + static_cast<int64_t>(part)] = keys.data<uint64_t>()[row];
    }
    const TensorView again = bed.tensor(DType::kI32, {kRows});
    kernel->enqueue_argmax_of(gathered, again, launch);
    EXPECT_EQ((std::vector<int32_t>(again.data<int32_t>(), again.data<int32_t>() + kRows)), expected);
  }
}

TEST(Sample, FindsTheArgmaxOfDraftRows) {
  Bed bed;
  const auto kernel = make_kernel<Sample>(bed, {100, 90, 0});
  std::vector<float> logits = peak(100, 95);
  logits[40] = logits[60] = 5.0f;
  const TensorView ids = bed.tensor(DType::kI32, {1});
  Launch launch = bed.launch(*kernel, 1);
  kernel->enqueue_argmax(bed.tensor(DType::kF32, {1, 100}, logits), ids, launch);
  EXPECT_EQ(ids.data<int32_t>()[0], 40);
}

}  // namespace
}  // namespace quern::ops::testing
