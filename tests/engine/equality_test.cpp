// One request, one text: whatever is cached, guessed, cut, preempted or runs beside it (architecture.md sections 3 and 4). The CPU's P and D
// rows share their arithmetic, so that every text here has to be the same bit by bit, log-probabilities included; where they do not, rows that
// were computed one by one and are resumed as a prompt are the documented exception (`--prefix-reuse prompts` excludes them).
//
// Goals: every pair of {prompt cut at 64, 128, 512, not} x {prefix missed, hit, hit in part, evicted, back from host memory} x {no drafts, n-gram,
// MTP 1 .. 4} x {alone, 16 with NaN in the neighbours' rows} x {never preempted, swapped, recomputed} x {greedy, seeded} on a tiny model; the
// whole product with --gtest_also_run_disabled_tests. That nothing passes because nothing happened is asserted on counters.

#include <algorithm>
#include <array>
#include <chrono>
#include <iostream>
#include <map>
#include <span>
#include <thread>

#include "base/hash.h"
#include "base/json.h"
#include "engine/real_engine.h"
#include "support/reference_checkpoint.h"

namespace quern::engine {
namespace {

using namespace testing;  // NOLINT(google-build-using-namespace): the tools of this room

constexpr int32_t kPoison = 319;  // its embedding is NaN; no prompt but the neighbours' has it, and logit_bias keeps it out of outputs
constexpr int32_t kNumTexts = 13;
constexpr int32_t kNumPoisoned = 3;  // of a batch of 16

struct Drafts {
  const char* name;
  SpeculationMethod method;
  int32_t num_tokens;
};
constexpr Drafts kDrafts[] = {{"none", SpeculationMethod::kNone, 0},  {"n-gram", SpeculationMethod::kNgram, 4}, {"MTP 1", SpeculationMethod::kMtp, 1},
                              {"MTP 2", SpeculationMethod::kMtp, 2}, {"MTP 3", SpeculationMethod::kMtp, 3},    {"MTP 4", SpeculationMethod::kMtp, 4}};
constexpr int32_t kCuts[] = {64, 128, 512, 0};

enum class Preempted : uint8_t { kNever, kSwapped, kRecomputed };
constexpr Preempted kPreempted[] = {Preempted::kNever, Preempted::kSwapped, Preempted::kRecomputed};
constexpr const char* kPreemptedNames[] = {"never preempted", "swapped", "recomputed"};

/// How many devices share the model's layers, and in how many stages. Texts are the same within one number of ranks that share: stages never change bits.
struct Ranks {
  int32_t tp_size = 1, pp_size = 1;
  bool processes = false;  // every stage is one
};

/// One engine of the product; company, prefixes and sampling are gone through in it.
struct Cell {
  int32_t cut = 0;
  Drafts drafts = kDrafts[0];
  Preempted preempted = Preempted::kNever;
  bool host = false;  // what is evicted goes to host memory
  Ranks ranks = {};
  [[nodiscard]] std::string describe() const {
    return fmt::format("cut {}, drafts {}, {}, {}, tp {}, pp {}{}", cut, drafts.name, kPreemptedNames[static_cast<size_t>(preempted)], host ? "host memory" : "no host memory", ranks.tp_size,
                       ranks.pp_size, ranks.processes ? " in processes" : "");
  }
};

/// Every number of drafts with every kind of preemption, each at another cut, and without preemption with and without host memory.
std::vector<Cell> every_pair() {
  std::vector<Cell> cells;
  size_t cut = 0;
  for (const Drafts& drafts : kDrafts)
    for (const Preempted preempted : kPreempted) {
      const bool host = preempted == Preempted::kSwapped || (preempted == Preempted::kNever && cells.size() % 2 == 0);
      cells.push_back({.cut = kCuts[cut++ % std::size(kCuts)], .drafts = drafts, .preempted = preempted, .host = host});
    }
  return cells;
}

std::vector<int32_t> random_tokens(uint64_t seed, int32_t n) {
  SplitMix64 random(seed);
  std::vector<int32_t> tokens(static_cast<size_t>(n));
  for (int32_t& token : tokens) token = static_cast<int32_t>(random.next() % kPoison);
  return tokens;
}

/// Text `i`; `other_end`: a prompt that goes its own way after the first two thirds.
GenerationRequest make_text(int32_t i, bool other_end) {
  GenerationRequest request;
  const int32_t length = 20 + i * 47 % 260;
  request.prompt = random_tokens(100 + static_cast<uint64_t>(i), length);
  if (other_end) {
    const std::vector<int32_t> end = random_tokens(900 + static_cast<uint64_t>(i), length);
    std::copy(end.begin() + length * 2 / 3, end.end(), request.prompt.begin() + length * 2 / 3);
  }
  if (i % 3 == 0) request.cut_hints = {length / 2};
  request.max_tokens = 50 + i * 29 % 120;
  request.sampling.temperature = i % 2 == 0 ? 0.0f : 0.8f;
  request.sampling.seed = static_cast<uint64_t>(i);
  request.sampling.num_logprobs = i % 3;
  request.sampling.logit_bias = {{kPoison, -1000.0f}};
  // A few tokens only, so that outputs repeat themselves and drafts find something.
  if (i % 4 != 3) for (int32_t token = 0; token < 6; ++token) request.sampling.logit_bias.emplace_back(token * 7 + i, 40.0f);
  if (i % 5 == 1) request.sampling.presence_penalty = 0.6f;
  if (i % 5 == 2) request.sampling.repetition_penalty = 1.2f;
  if (i % 5 == 3) request.sampling.top_k = 20;
  if (i % 5 == 4) request.sampling.stop_ids = {7 + i};
  return request;
}

struct Counters {
  uint64_t hits = 0, host_hits = 0, evictions = 0, preemptions = 0, swapped = 0, recomputed = 0, verifies = 0, accepted = 0, partly_accepted = 0, across_boundary = 0, poisoned = 0;
  void add(const EngineStats& stats) {
    hits += stats.prefix_hit_tokens;
    evictions += stats.prefix_evictions;
    host_hits += stats.prefix_host_tokens;
    preemptions += stats.num_preemptions;
    swapped += stats.num_swapped;
    recomputed += stats.num_recomputed;
    verifies += stats.speculation.num_drafts;
    accepted += stats.speculation.num_accepted_tokens;
    partly_accepted += stats.speculation.num_partly_accepted;
    across_boundary += stats.speculation.num_across_boundary;
    poisoned += stats.requests_error;
  }
};

class Equality : public ::testing::Test {
 protected:
  static void SetUpTestSuite() {
    folder_ = new quern::testing::TemporaryFolder();
    ASSERT_OK(quern::testing::tiny_reference(quern::testing::Scheme::kFp8Block, folder_->path() / "tiny"));
  }
  static void TearDownTestSuite() {
    delete folder_;
    folder_ = nullptr;
    expected_.clear();
  }

  using Texts = std::array<std::vector<Text>, 2>;
  /// What all others are compared with: one at a time, the prompt in one piece, nothing cached, nothing guessed, one step at a time, in one stage.
  static const Texts& expected_of(int32_t tp_size) {
    const auto [entry, fresh] = expected_.try_emplace(tp_size);
    if (!fresh) return entry->second;
    RealEngineSetup setup = base_setup({.tp_size = tp_size});
    setup.engine.steps_in_flight = 1;
    setup.engine.prefix_cache.enabled = false;
    setup.engine.speculation.method = SpeculationMethod::kNone;
    const auto engine = start_real_engine(setup);
    for (const bool other_end : {false, true})
      for (int32_t i = 0; i < kNumTexts; ++i) entry->second[other_end].push_back(read_outcome(**engine->submit(make_text(i, other_end))).text);
    return entry->second;
  }

  static RealEngineSetup base_setup(const Ranks& ranks = {}) {
    RealEngineSetup setup{.model_dir = folder_->path() / "tiny", .poison = kPoison};
    setup.worker.tp_size = ranks.tp_size;
    setup.worker.pp_size = ranks.pp_size;
    if (ranks.processes) setup.num_processes = ranks.pp_size;
    if (ranks.tp_size * ranks.pp_size > 1) setup.worker.num_threads = 1;
    setup.worker.max_num_seqs = 16;
    setup.worker.max_model_len = 512;
    setup.worker.max_num_batched_tokens = 1024;
    setup.worker.max_logit_rows = 80;
    setup.worker.num_snapshots = 16;
    return setup;
  }

  static std::unique_ptr<Engine> start(const Cell& cell) {
    RealEngineSetup setup = base_setup(cell.ranks);
    setup.engine.long_prefill_token_threshold = cell.cut;
    setup.engine.speculation = {
        .method = cell.drafts.method, .num_speculative_tokens = cell.drafts.num_tokens, .prompt_lookup_min = 1, .prompt_lookup_max = 3, .adaptive = false};
    setup.num_blocks = cell.preempted == Preempted::kNever ? 104 : 8;
    setup.worker.host_cache_bytes = cell.host ? 64 << 20 : 0;
    return start_real_engine(setup);
  }

  static void check(int32_t i, bool other_end, const Outcome& outcome, const Ranks& ranks) {
    const Text& expected = expected_of(ranks.tp_size)[other_end][static_cast<size_t>(i)];
    EXPECT_FALSE(outcome.finish.error.has_value()) << outcome.finish.error->message;
    EXPECT_TRUE(outcome.text == expected) << "text " << i << (other_end ? " with another end" : "") << ": they differ at "
                                          << difference(expected, outcome.text);
  }
  static int32_t run_alone(Engine& engine, int32_t i, bool other_end, const Ranks& ranks) {
    const Outcome outcome = read_outcome(**engine.submit(make_text(i, other_end)));
    check(i, other_end, outcome, ranks);
    return outcome.finish.usage.cached_tokens;
  }

  /// One request at a time: nothing cached, all of it, a part, and nothing again.
  static void go_through_alone(Engine& engine, const Ranks& ranks) {
    for (const int32_t i : {4, 9}) {
      const auto length = static_cast<int32_t>(make_text(i, false).prompt.size());
      EXPECT_EQ(run_alone(engine, i, false, ranks), 0);
      EXPECT_GE(run_alone(engine, i, false, ranks), (length - 1) / 64 * 64);
      EXPECT_LE(run_alone(engine, i, true, ranks), length * 2 / 3) << "as far as the prompts agree";
      EXPECT_GE(run_alone(engine, i, true, ranks), (length - 1) / 64 * 64);
    }
    // Others until nothing is left of the first on the device.
    const bool host = engine.stats().num_host_blocks > 0;
    for (uint64_t seed = 0; host ? seed < 70 : engine.stats().prefix_evictions < 24; ++seed) {
      GenerationRequest other;
      other.prompt = random_tokens(5000 + seed, 130);
      other.max_tokens = 1;
      read_outcome(**engine.submit(std::move(other)));
    }
    const int32_t cached = run_alone(engine, 4, false, ranks);
    if (host) {
      EXPECT_GT(engine.stats().prefix_host_tokens, 0u);
    } else {
      EXPECT_EQ(cached, 0) << "it was meant to be evicted";
    }
  }

  /// Sixteen at once, three of them with NaN in all rows, which fail and come again as long as there is anybody to disturb.
  static void go_through_together(Engine& engine, bool other_end, const Ranks& ranks) {
    std::vector<std::unique_ptr<RequestStream>> streams, poisoned(kNumPoisoned);
    uint64_t num_poisoned = 0;
    const auto poison = [&](std::unique_ptr<RequestStream>& stream) {
      GenerationRequest request;
      request.prompt = random_tokens(7000 + num_poisoned, 10 + static_cast<int32_t>(num_poisoned * 37 % 150));
      request.prompt[request.prompt.size() / 2] = kPoison;
      request.max_tokens = 5;
      ++num_poisoned;
      stream = std::move(*engine.submit(std::move(request)));
    };
    for (int32_t i = 0; i < kNumTexts; ++i) {
      if (i % 5 == 0) poison(poisoned[static_cast<size_t>(i / 5)]);
      streams.push_back(std::move(*engine.submit(make_text(i, other_end))));
    }
    std::vector<Outcome> outcomes;
    for (const auto& stream : streams) {
      for (auto& neighbour : poisoned) {
        while (const auto event = neighbour->try_next()) {
          if (!event->finish) continue;
          EXPECT_EQ(event->finish->reason, FinishReason::kError) << "NaN must not become text";
          poison(neighbour);
          break;
        }
      }
      outcomes.push_back(read_outcome(*stream));
    }
    for (int32_t i = 0; i < kNumTexts; ++i) check(i, other_end, outcomes[static_cast<size_t>(i)], ranks);
  }

  static void go_through(const Cell& cell, Counters& counters) {
    SCOPED_TRACE(cell.describe());
    const auto engine = start(cell);
    if (cell.preempted == Preempted::kNever) go_through_alone(*engine, cell.ranks);
    for (const bool other_end : {false, false, true}) go_through_together(*engine, other_end, cell.ranks);  // missed, hit, hit in part
    const EngineStats stats = settled(*engine);
    EXPECT_EQ(stats.num_free_blocks, stats.num_blocks);
    EXPECT_EQ(stats.num_preemptions > 0, cell.preempted != Preempted::kNever);
    if (cell.preempted == Preempted::kSwapped) {
      EXPECT_GT(stats.num_swapped, 0u);
    }
    if (cell.preempted == Preempted::kRecomputed) {
      EXPECT_GT(stats.num_recomputed, 0u);
    }
    if (cell.preempted == Preempted::kNever) {
      EXPECT_GT(stats.prefix_hit_tokens, 0u);
    }
    counters.add(stats);
    std::cout << fmt::format("{}: {} rows\n", cell.describe(), stats.computed_rows) << std::flush;
  }

  static void expect_that_it_happened(const Counters& counters) {
    EXPECT_GT(counters.hits, 0u);
    EXPECT_GT(counters.evictions, 0u);
    EXPECT_GT(counters.host_hits, 0u);
    EXPECT_GT(counters.swapped, 0u);
    EXPECT_GT(counters.recomputed, 0u);
    EXPECT_GT(counters.verifies, 0u);
    EXPECT_GT(counters.accepted, 0u);
    EXPECT_GT(counters.partly_accepted, 0u);
    EXPECT_GT(counters.across_boundary, 0u);
    EXPECT_GT(counters.poisoned, 0u);
    std::cout << fmt::format("{} cached tokens ({} from host memory), {} evictions, {} swapped, {} recomputed, {} verifies ({} across a boundary, {} accepted in part), {} drafts "
                             "accepted, {} poisoned\n",
                             counters.hits, counters.host_hits, counters.evictions, counters.swapped, counters.recomputed, counters.verifies, counters.across_boundary,
                             counters.partly_accepted, counters.accepted, counters.poisoned);
  }

  static inline quern::testing::TemporaryFolder* folder_ = nullptr;
  static inline std::map<int32_t, Texts> expected_;  // by tp_size
};

TEST_F(Equality, OfEveryPair) {
  Counters counters;
  for (const Cell& cell : every_pair()) go_through(cell, counters);
  expect_that_it_happened(counters);
}

/// On several devices: with every kind of preemption, and together with several kinds of draft; three ranks once. Where there are
/// stages, several micro-batches are in flight.
TEST_F(Equality, OfModelsSharedOutAndInStages) {
  Counters counters;
  size_t number = 0;
  for (const Ranks& ranks : {Ranks{2, 1}, Ranks{3, 1}, Ranks{2, 2}, Ranks{1, 4}})
    for (const Preempted preempted : kPreempted) {
      if (ranks.tp_size == 3 && preempted != Preempted::kSwapped) continue;
      if (ranks.pp_size == 4 && preempted == Preempted::kRecomputed) continue;
      constexpr Drafts kOwn[] = {kDrafts[4], kDrafts[1], kDrafts[5], kDrafts[2]};
      go_through({.cut = kCuts[number % std::size(kCuts)], .drafts = kOwn[number % std::size(kOwn)], .preempted = preempted, .host = preempted != Preempted::kRecomputed, .ranks = ranks},
                 counters);
      ++number;
    }
  expect_that_it_happened(counters);
}

/// The same where every stage is a process: steps, values of slots, masks and results are bytes then, and rows messages.
TEST_F(Equality, OfStagesInProcesses) {
  Counters counters;
  for (const Cell& cell : {Cell{.cut = 128, .drafts = kDrafts[4], .preempted = Preempted::kNever, .host = true, .ranks = {1, 2, true}},
                           Cell{.cut = 64, .drafts = kDrafts[1], .preempted = Preempted::kSwapped, .host = true, .ranks = {2, 2, true}},
                           Cell{.cut = 0, .drafts = kDrafts[5], .preempted = Preempted::kRecomputed, .ranks = {1, 3, true}}})
    go_through(cell, counters);
  expect_that_it_happened(counters);
}

/// Token t may come at place n where t + n is no multiple of three.
class TwoOfThree final : public TokenConstraint {
 public:
  bool fill_mask(std::span<uint32_t> mask) override {
    for (int32_t t = 0; t <= kPoison; ++t)
      if ((t + num_tokens_) % 3 != 0) mask[static_cast<size_t>(t / 32)] |= 1u << t % 32;
    return true;
  }
  bool accept(int32_t token) override { return (token + num_tokens_++) % 3 != 0; }
  void rollback(int32_t num_tokens) override { num_tokens_ -= num_tokens; }
  [[nodiscard]] bool finished() const override { return false; }

 private:
  int32_t num_tokens_ = 0;
};

/// Thirteen at once with up to five rows each, where there is a place for the logits of five to seven rows: samples, verifies, masks and log-probabilities of outputs and prompts go in
/// groups, on one device, on several that share the vocabulary, in stages and in processes.
TEST_F(Equality, OfMoreRowsThanHaveAPlaceForTheirLogits) {
  const auto make = [](int32_t i) {
    GenerationRequest request = make_text(i, false);
    request.max_tokens = 80;
    if (i % 3 == 1) request.prompt_logprobs = i % 4;
    if (i % 3 == 2) request.constraint = std::make_unique<TwoOfThree>();
    return request;
  };
  const auto start = [](const Ranks& ranks, const Drafts& drafts, int32_t logit_rows, int32_t steps_in_flight) {
    RealEngineSetup setup = base_setup(ranks);
    setup.worker.max_logit_rows = logit_rows;
    setup.worker.max_recorded_steps = logit_rows;  // most kinds of step come again when they are recorded no more
    setup.engine.steps_in_flight = steps_in_flight;
    setup.engine.prefix_cache.enabled = false;
    setup.engine.speculation = {.method = drafts.method, .num_speculative_tokens = drafts.num_tokens, .prompt_lookup_min = 1, .prompt_lookup_max = 3, .adaptive = false};
    return start_real_engine(setup);
  };
  std::map<int32_t, std::vector<Text>> alone;  // by tp_size
  for (const int32_t tp_size : {1, 2}) {
    const auto engine = start({.tp_size = tp_size}, kDrafts[0], 512, 1);
    for (int32_t i = 0; i < kNumTexts; ++i) alone[tp_size].push_back(read_outcome(**engine->submit(make(i))).text);
  }
  struct Case {
    Ranks ranks;
    Drafts drafts;
    int32_t logit_rows;
  };
  std::map<SpeculationMethod, uint64_t> accepted;  // of the head's drafts, which are no better than chance here, few
  for (const Case& c : {Case{{1, 1}, kDrafts[5], 5}, Case{{1, 1}, kDrafts[4], 7}, Case{{1, 1}, kDrafts[1], 6}, Case{{1, 1}, kDrafts[0], 5}, Case{{2, 1}, kDrafts[5], 7}, Case{{1, 2}, kDrafts[5], 6},
                        Case{{2, 2}, kDrafts[3], 5}, Case{{1, 2, true}, kDrafts[5], 7}, Case{{2, 2, true}, kDrafts[1], 6}}) {
    SCOPED_TRACE(fmt::format("tp {}, pp {}{}, drafts {}, {} rows of logits", c.ranks.tp_size, c.ranks.pp_size, c.ranks.processes ? " in processes" : "", c.drafts.name, c.logit_rows));
    const auto engine = start(c.ranks, c.drafts, c.logit_rows, 2);
    std::vector<std::unique_ptr<RequestStream>> streams;
    for (int32_t i = 0; i < kNumTexts; ++i) streams.push_back(std::move(*engine->submit(make(i))));
    for (int32_t i = 0; i < kNumTexts; ++i) {
      const Outcome outcome = read_outcome(*streams[static_cast<size_t>(i)]);
      EXPECT_FALSE(outcome.finish.error.has_value()) << outcome.finish.error->message;
      const Text& expected = alone[c.ranks.tp_size][static_cast<size_t>(i)];
      EXPECT_TRUE(outcome.text == expected) << "text " << i << ": they differ at " << difference(expected, outcome.text);
    }
    accepted[c.drafts.method] += settled(*engine).speculation.num_accepted_tokens;
  }
  for (const SpeculationMethod method : {SpeculationMethod::kNgram, SpeculationMethod::kMtp}) EXPECT_GT(accepted[method], 0u) << static_cast<int>(method);
}

TEST_F(Equality, DISABLED_OfTheWholeProduct) {
  Counters counters;
  for (const int32_t cut : kCuts)
    for (const Drafts& drafts : kDrafts)
      for (const Preempted preempted : kPreempted)
        for (const bool host : {false, true})
          if (preempted == Preempted::kNever || host == (preempted == Preempted::kSwapped))
            go_through({.cut = cut, .drafts = drafts, .preempted = preempted, .host = host}, counters);
  expect_that_it_happened(counters);
}

/// Requests come, are cancelled, go on where earlier ones stopped, push each other out of memory and cache; in the end every text is the one
/// that the model gives a request alone.
TEST_F(Equality, OfARandomWalk) {
  constexpr int32_t kNumOperations = 2000;
  SplitMix64 random(11);
  const auto below = [&](size_t n) { return static_cast<int32_t>(random.next() % n); };
  RealEngineSetup plain = base_setup();
  plain.engine.prefix_cache.enabled = false;
  plain.engine.speculation.method = SpeculationMethod::kNone;
  const auto reference = start_real_engine(plain);
  RealEngineSetup setup = base_setup();
  setup.worker.num_snapshots = 12;
  setup.num_blocks = 8;
  setup.worker.host_cache_bytes = 4 << 20;
  setup.engine.speculation = {.num_speculative_tokens = 3, .adaptive = false};
  const auto engine = start_real_engine(setup);

  struct Live {
    std::vector<int32_t> prompt;
    std::unique_ptr<RequestStream> stream, expected;
    bool cancelled = false;
  };
  std::vector<Live> live;
  std::vector<std::vector<int32_t>> conversations;  // prompts and outputs of those that ended
  uint64_t num_checked = 0, num_cancelled = 0, num_extended = 0;
  const auto finish = [&](size_t which) {
    Live& one = live[which];
    const Outcome outcome = read_outcome(*one.stream), expected = read_outcome(*one.expected);
    if (one.cancelled) {
      ++num_cancelled;
    } else {
      ASSERT_TRUE(outcome.text == expected.text) << "they differ at " << difference(expected.text, outcome.text);
      EXPECT_EQ(outcome.finish.reason, expected.finish.reason);
      ++num_checked;
    }
    std::vector<int32_t> whole = std::move(one.prompt);
    whole.insert(whole.end(), expected.text.tokens.begin(), expected.text.tokens.end());
    if (whole.size() < 330) conversations.push_back(std::move(whole));
    live.erase(live.begin() + static_cast<ptrdiff_t>(which));
  };
  for (int32_t operation = 0; operation < kNumOperations && !HasFatalFailure(); ++operation) {
    const int32_t kind = below(10);
    if (kind < 5) {
      GenerationRequest request = make_text(below(kNumTexts), false);
      request.max_tokens = 1 + below(24);
      request.sampling.seed = random.next();
      if (kind < 2 || conversations.empty()) {
        request.prompt = random_tokens(random.next(), 1 + below(90));
        if (below(2) == 0) request.max_tokens = 100 + below(100);
      } else {
        const std::vector<int32_t>& earlier = conversations[static_cast<size_t>(below(conversations.size()))];
        const std::vector<int32_t> fresh = random_tokens(random.next(), 1 + below(30));
        request.prompt.assign(earlier.begin(), earlier.begin() + 1 + below(earlier.size()));
        request.prompt.insert(request.prompt.end(), fresh.begin(), fresh.end());
        ++num_extended;
      }
      GenerationRequest same = make_text(0, false);
      same.prompt = request.prompt;
      same.max_tokens = request.max_tokens;
      same.sampling = request.sampling;
      request.cut_hints = {below(request.prompt.size() + 1)};
      request.priority = below(3);
      live.push_back({.prompt = request.prompt});
      live.back().stream = std::move(*engine->submit(std::move(request)));
      live.back().expected = std::move(*reference->submit(std::move(same)));
    } else if (kind == 5 && !live.empty()) {
      Live& one = live[static_cast<size_t>(below(live.size()))];
      one.cancelled = true;
      one.stream->cancel();
    } else if (!live.empty()) {
      finish(static_cast<size_t>(below(live.size())));
    }
    if (live.size() > 14) finish(0);
  }
  while (!live.empty()) finish(0);
  const EngineStats stats = settled(*engine);
  EXPECT_EQ(stats.num_free_blocks, stats.num_blocks);
  EXPECT_EQ(stats.requests_error, 0u);
  EXPECT_GT(num_checked, 300u);
  EXPECT_GT(num_cancelled, 30u);
  EXPECT_GT(num_extended, 100u);
  EXPECT_GT(stats.prefix_hit_tokens, 1000u);
  EXPECT_GT(stats.prefix_host_tokens, 0u);
  EXPECT_GT(stats.num_preemptions, 0u);
  std::cout << fmt::format("{} texts, {} cancelled, {} extended, {} cached tokens, {} evictions, {} preemptions\n", num_checked, num_cancelled,
                           num_extended, stats.prefix_hit_tokens, stats.prefix_evictions, stats.num_preemptions);
}

/// A thousand requests on a pool for a few: nothing is lost, nobody starves.
TEST_F(Equality, OfAThousandRequestsOnASmallPool) {
  RealEngineSetup setup = base_setup();
  setup.worker.max_num_seqs = 6;
  setup.worker.num_snapshots = 8;
  setup.num_blocks = 10;
  setup.engine.speculation = {.num_speculative_tokens = 2};
  const auto engine = start_real_engine(setup);
  SplitMix64 random(17);
  std::vector<std::unique_ptr<RequestStream>> streams;
  const auto end_first = [&] {
    const Outcome outcome = read_outcome(*streams.front());
    EXPECT_FALSE(outcome.finish.error.has_value());
    streams.erase(streams.begin());
  };
  for (int32_t i = 0; i < 1000; ++i) {
    GenerationRequest request = make_text(i % kNumTexts, i % 2 == 0);
    request.prompt.resize(1 + random.next() % std::min<size_t>(request.prompt.size(), 120));
    request.max_tokens = static_cast<int32_t>(random.next() % 12);
    streams.push_back(std::move(*engine->submit(std::move(request))));
    if (random.next() % 8 == 0) streams[random.next() % streams.size()]->cancel();
    if (streams.size() > 20) end_first();
  }
  while (!streams.empty()) end_first();
  const EngineStats stats = settled(*engine);
  EXPECT_EQ(stats.num_free_blocks, stats.num_blocks);
  EXPECT_EQ(stats.num_free_slots, stats.num_slots);
  EXPECT_LE(stats.num_snapshots_used, stats.num_snapshots);
  EXPECT_EQ(stats.requests_stop + stats.requests_length + stats.requests_cancelled, 1000u);
}

/// The shipped model, whose head guesses well, on prompts of its own kind: every pair again.
class DemoEquality : public ::testing::Test {
 protected:
  static std::vector<GenerationRequest> make_texts() {
    const Result<Json> prompts = read_json_file(quern::testing::data_path("demo/token_prompts.json"));
    EXPECT_OK(prompts);
    std::vector<GenerationRequest> texts;
    for (const Json& prompt : *prompts) {
      GenerationRequest request;
      request.prompt = prompt.at("tokens").get<std::vector<int32_t>>();
      request.max_tokens = texts.size() < 4 ? 200 : 70;  // some grow to several blocks
      request.sampling.temperature = texts.size() % 2 == 0 ? 0.0f : 0.6f;
      request.sampling.seed = texts.size();
      request.sampling.num_logprobs = 0;
      texts.push_back(std::move(request));
    }
    return texts;
  }
  static std::unique_ptr<Engine> start(const Cell& cell, bool cached, worker::DraftHead draft_head = worker::DraftHead::kAuto) {
    RealEngineSetup setup{.model_dir = std::filesystem::path(QUERN_SOURCE_DIR) / "models" / "quern-demo"};
    setup.worker.draft_head = draft_head;
    setup.worker.max_num_seqs = 16;
    setup.worker.max_model_len = 384;
    setup.worker.max_num_batched_tokens = 1024;
    setup.worker.max_logit_rows = 80;
    setup.worker.num_snapshots = 32;
    setup.num_blocks = cell.preempted == Preempted::kNever ? 96 : 6;
    setup.worker.host_cache_bytes = cell.host ? 256 << 20 : 0;
    setup.engine.prefix_cache.enabled = cached;
    setup.engine.long_prefill_token_threshold = cell.cut;
    setup.engine.speculation = {.method = cell.drafts.method, .num_speculative_tokens = cell.drafts.num_tokens, .adaptive = false};
    return start_real_engine(setup);
  }
};

TEST_F(DemoEquality, OfEveryPair) {
  std::vector<Text> expected;
  {
    const auto engine = start({}, false);
    for (GenerationRequest& request : make_texts()) expected.push_back(read_outcome(**engine->submit(std::move(request))).text);
  }
  uint64_t accepted_by_head = 0;
  Counters counters;
  const auto go_through = [&](const Cell& cell) {
    SCOPED_TRACE(cell.describe());
    const auto engine = start(cell, true);
    const auto check = [&](size_t i, const Outcome& outcome) {
      EXPECT_TRUE(outcome.text == expected[i]) << "text " << i << ": they differ at " << difference(expected[i], outcome.text);
    };
    for (int32_t round = 0; round < 2; ++round) {  // missed, then hit
      std::vector<std::unique_ptr<RequestStream>> streams;
      for (GenerationRequest& request : make_texts()) streams.push_back(std::move(*engine->submit(std::move(request))));
      for (size_t i = 0; i < streams.size(); ++i) check(i, read_outcome(*streams[i]));
    }
    std::vector<GenerationRequest> alone = make_texts();
    for (const size_t i : {size_t{4}, alone.size() - 1}) check(i, read_outcome(**engine->submit(std::move(alone[i]))));
    const EngineStats stats = settled(*engine);
    EXPECT_EQ(stats.num_free_blocks, stats.num_blocks);
    EXPECT_EQ(stats.num_preemptions > 0, cell.preempted != Preempted::kNever);
    counters.add(stats);
    if (cell.drafts.method == SpeculationMethod::kMtp) accepted_by_head += stats.speculation.num_accepted_tokens;
  };
  for (const Cell& cell : every_pair()) go_through(cell);
  EXPECT_GT(accepted_by_head, 100u);
  EXPECT_GT(counters.hits, 0u);
  EXPECT_GT(counters.partly_accepted, 0u);
  EXPECT_GT(counters.across_boundary, 0u);
  EXPECT_GT(counters.swapped, 0u);
  EXPECT_GT(counters.recomputed, 0u);
  std::cout << fmt::format("{} of the head's guesses stood; {} cached tokens, {} preemptions, {} verifies across a boundary\n", accepted_by_head, counters.hits,
                           counters.preemptions, counters.across_boundary);
}

TEST_F(DemoEquality, OfDraftsThatAreLookedUpInAnFp8CopyOfLmHead) {
  std::vector<Text> expected;
  {
    const auto engine = start({}, false);
    for (GenerationRequest& request : make_texts()) expected.push_back(read_outcome(**engine->submit(std::move(request))).text);
  }
  std::map<worker::DraftHead, uint64_t> accepted;
  for (const worker::DraftHead draft_head : {worker::DraftHead::kModel, worker::DraftHead::kFp8}) {
    Cell cell;
    cell.drafts = {.name = "mtp 3", .method = SpeculationMethod::kMtp, .num_tokens = 3};
    const auto engine = start(cell, false, draft_head);
    std::vector<std::unique_ptr<RequestStream>> streams;
    for (GenerationRequest& request : make_texts()) streams.push_back(std::move(*engine->submit(std::move(request))));
    for (size_t i = 0; i < streams.size(); ++i) {
      const Outcome outcome = read_outcome(*streams[i]);
      EXPECT_TRUE(outcome.text == expected[i]) << "text " << i << ": they differ at " << difference(expected[i], outcome.text);
    }
    accepted[draft_head] = settled(*engine).speculation.num_accepted_tokens;
  }
  const auto with_model = static_cast<double>(accepted[worker::DraftHead::kModel]), with_copy = static_cast<double>(accepted[worker::DraftHead::kFp8]);
  std::cout << fmt::format("{} drafts stood that lm_head picked, {} of its FP8 copy\n", with_model, with_copy);
  EXPECT_GT(with_model, 100);
  EXPECT_GT(with_copy, 0.97 * with_model);
}

}  // namespace
}  // namespace quern::engine
