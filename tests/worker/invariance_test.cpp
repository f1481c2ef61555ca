// Bits of a sequence do not depend on what runs beside it, on cuts, on threads, on who had the slot before (architecture.md section 3).

#include <cmath>
#include <cstring>
#include <limits>

#include "base/hash.h"
#include "worker/runner_fixture.h"

namespace quern::worker {
namespace {

using quern::testing::Scheme;

/// A request as the engine would run it: prompt in chunks, then one decode row a step with tokens from the device.
struct Job {
  std::vector<int32_t> prompt;
  int32_t max_tokens = 0, chunk = 64, slot = 0;
  SamplingParams sampling;
  int32_t done = 0;                 // prompt rows computed
  std::vector<int32_t> output;
  std::vector<float> logprobs;

  [[nodiscard]] bool finished() const { return static_cast<int32_t>(output.size()) == max_tokens; }
  StepRun next() const {
    const auto size = static_cast<int32_t>(prompt.size());
    if (done < size) {
      const int32_t end = std::min(size, done + chunk);
      StepRun run = given_rows(slot, RowKind::kPrompt, std::span(prompt).subspan(static_cast<size_t>(done), static_cast<size_t>(end - done)), done);
      run.want = end == size ? Want::kSample : Want::kNothing;
      return run;
    }
    StepRun run;
    run.slot = slot;
    run.kind = RowKind::kDecode;
    run.num_rows = 1;
    run.want = Want::kSample;
    return run;
  }
  void take(const StepRun& run, const RunResult& result) {
    if (!run.tokens.empty()) done += run.num_rows;
    EXPECT_FALSE(result.non_finite);
    for (size_t i = 0; i < result.tokens.size(); ++i) {
      output.push_back(result.tokens[i]);
      logprobs.push_back(result.logprobs.at(i).chosen);
    }
  }
};

Job make_job(uint64_t seed, int32_t prompt_len, int32_t max_tokens, bool greedy) {
  Job job;
  job.prompt = random_tokens(seed, prompt_len);
  job.max_tokens = max_tokens;
  job.sampling.temperature = greedy ? 0.0f : 0.9f;
  job.sampling.seed = seed;
  job.sampling.num_logprobs = 0;
  return job;
}

/// Runs jobs together: job i joins at step arrivals[i]; steps hold P runs first.
void run_together(TestRunner& runner, std::vector<Job*> jobs, const std::vector<int32_t>& arrivals) {
  for (int32_t now = 0;; ++now) {
    std::vector<Job*> active;
    for (size_t i = 0; i < jobs.size(); ++i) {
      if (arrivals[i] == now) runner.start(jobs[i]->slot, jobs[i]->sampling);
      if (arrivals[i] <= now && !jobs[i]->finished()) active.push_back(jobs[i]);
    }
    if (active.empty() && now > *std::max_element(arrivals.begin(), arrivals.end())) return;
    std::stable_sort(active.begin(), active.end(), [](const Job* a, const Job* b) { return a->next().kind < b->next().kind; });
    StepPlan step;
    for (const Job* job : active) step.runs.push_back(job->next());
    if (step.runs.empty()) continue;
    const StepResult result = runner.run(step);
    for (size_t i = 0; i < active.size(); ++i) active[i]->take(step.runs[i], result.runs[i]);
  }
}

void expect_same(const Job& a, const Job& b) {
  EXPECT_EQ(a.output, b.output);
  ASSERT_EQ(a.logprobs.size(), b.logprobs.size());
  EXPECT_EQ(0, std::memcmp(a.logprobs.data(), b.logprobs.data(), a.logprobs.size() * sizeof(float)));
}

/// The ranks that a model is shared out to; what is the same is the same within one number of them.
struct Setting {
  const char* name;
  ModelDType dtype;
  int32_t tp_size = 1, pp_size = 1;
};

class Invariance : public ::testing::TestWithParam<Setting> {
 protected:
  void SetUp() override {
    if (!has_devices(GetParam().tp_size * GetParam().pp_size)) GTEST_SKIP() << "this machine has fewer devices like " << device_under_test();
  }
  [[nodiscard]] WorkerOptions options(int32_t threads = 2, int32_t seqs = 16) const {
    WorkerOptions o;
    o.dtype = GetParam().dtype;
    o.tp_size = GetParam().tp_size;
    o.pp_size = GetParam().pp_size;
    o.num_threads = o.tp_size * o.pp_size == 1 ? threads : 1;
    o.max_num_seqs = seqs;
    o.max_num_batched_tokens = 4096;
    return o;
  }
};

TEST_P(Invariance, SixteenSequencesInAnyOrderEqualEachAlone) {
  TestRunner alone(tiny_fp8(), options()), together(tiny_fp8(), options());
  std::vector<Job> single, batch, shuffled;
  for (uint64_t i = 0; i < 16; ++i) {
    Job job = make_job(100 + i, static_cast<int32_t>(1 + i * 13 % 150), 24, i % 2 == 0);
    job.slot = static_cast<int32_t>(i);
    single.push_back(job);
    batch.push_back(job);
    job.slot = static_cast<int32_t>(15 - i);
    shuffled.push_back(job);
  }
  for (Job& job : single) run_together(alone, {&job}, {0});
  std::vector<Job*> in_order, any_order;
  std::vector<int32_t> at_once(16, 0), staggered;
  for (size_t i = 0; i < 16; ++i) {
    in_order.push_back(&batch[i]);
    any_order.push_back(&shuffled[(i * 7) % 16]);
    staggered.push_back(static_cast<int32_t>((i * 5) % 11));
  }
  run_together(together, in_order, at_once);
  run_together(together, any_order, staggered);  // the slots served others before
  for (size_t i = 0; i < 16; ++i) {
    SCOPED_TRACE(i);
    expect_same(single[i], batch[i]);
    expect_same(single[i], shuffled[i]);
  }
}

TEST_P(Invariance, ChunksOnTheGridAndThreadsDoNotMatter) {
  Job base = make_job(7, 333, 40, false);
  {
    TestRunner runner(tiny_fp8(), options(1));
    run_together(runner, {&base}, {0});
  }
  for (const int32_t threads : {2, 3}) {
    TestRunner runner(tiny_fp8(), options(threads));
    for (const int32_t chunk : {64, 128, 192, 448}) {
      Job job = make_job(7, 333, 40, false);
      job.chunk = chunk;
      run_together(runner, {&job}, {0});
      SCOPED_TRACE(::testing::Message() << "chunk " << chunk << ", threads " << threads);
      expect_same(base, job);
    }
  }
}

TEST_P(Invariance, APreemptedSequenceThatIsRecomputedContinuesWithTheSameBits) {
  TestRunner runner(tiny_fp8(), options());
  Job whole = make_job(9, 100, 90, false);
  run_together(runner, {&whole}, {0});
  for (const int32_t generated : {1, 27, 28, 29, 70}) {  // 128 = 100 + 28 is a boundary
    SCOPED_TRACE(generated);
    Job job = make_job(9, 100, generated, false);
    job.slot = 3;
    run_together(runner, {&job}, {0});
    // Preempted: another slot, prompt as P, generated tokens but the last as committed D rows cut on the grid, then on.
    job.slot = 5;
    runner.start(job.slot, job.sampling);
    job.done = 0;
    job.max_tokens = 90;
    std::vector<int32_t> output = job.output;
    while (job.done < 100) {
      StepPlan step;
      step.runs.push_back(job.next());
      step.runs[0].want = Want::kNothing;
      runner.run(step);
      job.done += step.runs[0].num_rows;
    }
    for (int32_t at = 100; at < 100 + generated - 1;) {
      const int32_t end = std::min(100 + generated - 1, (at / 64 + 1) * 64);
      StepPlan step;
      step.runs.push_back(given_rows(job.slot, RowKind::kDecode, std::span(output).subspan(static_cast<size_t>(at - 100), static_cast<size_t>(end - at)), at));
      runner.run(step);
      at = end;
    }
    StepPlan step;
    step.runs.push_back(given_rows(job.slot, RowKind::kDecode, std::span(output).last(1), 100 + generated - 1));
    step.runs[0].want = Want::kSample;
    const StepResult result = runner.run(step);
    job.take(step.runs[0], result.runs[0]);
    while (!job.finished()) {
      StepPlan more;
      more.runs.push_back(job.next());
      const StepResult r = runner.run(more);
      job.take(more.runs[0], r.runs[0]);
    }
    expect_same(whole, job);
  }
}

TEST_P(Invariance, ASnapshotOfABoundaryRestoredElsewhereContinuesWithTheSameBits) {
  WorkerOptions o = options();
  o.num_snapshots = 2;
  TestRunner runner(tiny_fp8(), o);
  Job whole = make_job(21, 150, 50, false);
  run_together(runner, {&whole}, {0});
  // Slot 0 computes the first 128 tokens; its snapshot goes to slot 6, which borrows the KV blocks.
  runner.start(0);
  StepPlan prefix;
  prefix.runs.push_back(given_rows(0, RowKind::kPrompt, std::span(whole.prompt).first(128), 0));
  runner.run(prefix);
  StepPlan store;
  store.state_ops.push_back({.kind = StateOp::Kind::kSnapshot, .slot = 0, .snapshot = 1});
  runner.run(store);
  runner.start(6, whole.sampling);
  StepPlan restore;
  restore.state_ops.push_back({.kind = StateOp::Kind::kRestore, .slot = 6, .snapshot = 1, .boundary = 128});
  restore.block_table_updates.push_back({.slot = 6, .first_block = 0, .blocks = {0, runner.plan.limits.num_slots}});
  runner.run(restore);
  Job job = make_job(21, 150, 50, false);
  job.slot = 6;
  job.done = 128;
  while (!job.finished()) {
    StepPlan step;
    step.runs.push_back(job.next());
    const StepResult result = runner.run(step);
    job.take(step.runs[0], result.runs[0]);
  }
  expect_same(whole, job);
}

TEST_P(Invariance, SpeculationWithDraftsOfAnyQualityGivesTheSameTextAsNone) {
  TestRunner runner(tiny_fp8(), options());
  Job plain = make_job(33, 70, 120, false);
  run_together(runner, {&plain}, {0});
  int32_t accepted = 0, rejected = 0;
  for (const int32_t depth : {1, 2, 4}) {
    SCOPED_TRACE(depth);
    Job job = make_job(33, 70, 120, false);
    job.slot = 2;
    runner.start(2, job.sampling);
    while (!job.finished()) {
      StepPlan step;
      StepRun run = job.next();
      run.fill_mtp = true;
      if (run.want == Want::kSample) {
        run.propose = DraftMethod::kMtp;
        run.propose_depth = depth;
      } else {
        run.following_token = job.prompt[static_cast<size_t>(job.done + run.num_rows)];
      }
      const int32_t left = job.max_tokens - static_cast<int32_t>(job.output.size());
      if (run.tokens.empty() && !job.output.empty()) run.num_rows = std::min(1 + depth, left);
      step.runs.push_back(run);
      const StepResult result = runner.run(step);
      if (run.verify()) {
        accepted += static_cast<int32_t>(result.runs[0].tokens.size()) - 1;
        rejected += run.num_rows - static_cast<int32_t>(result.runs[0].tokens.size());
      }
      job.take(run, result.runs[0]);
    }
    expect_same(plain, job);
  }
  EXPECT_GT(rejected, 0);
  ::testing::Test::RecordProperty("accepted", accepted);
}

/// Sequences that decode and that verify drafts of different depths, in one step.
TEST_P(Invariance, StepsThatAreLaidOutForReplayGiveTheSameBits) {
  constexpr int32_t kNumJobs = 5;
  std::vector<Job> results[2];
  for (const bool records : {false, true}) {
    TestRunner runner(tiny_fp8(), options(), records);
    std::vector<Job>& jobs = results[records ? 1 : 0];
    for (int32_t i = 0; i < kNumJobs; ++i) {
      Job& job = jobs.emplace_back(make_job(200 + static_cast<uint64_t>(i), 60 + i, 40 + 10 * i, i % 2 == 0));
      job.slot = 3 * i;
      runner.start(job.slot, job.sampling);
    }
    for (;;) {
      StepPlan step;
      std::vector<Job*> active;
      for (int32_t i = 0; i < kNumJobs; ++i) {
        Job& job = jobs[static_cast<size_t>(i)];
        if (job.finished()) continue;
        StepRun run = job.next();
        run.fill_mtp = true;
        if (run.want == Want::kSample) {
          run.propose = i == 0 ? DraftMethod::kNone : DraftMethod::kMtp;
          run.propose_depth = i;
        } else {
          run.following_token = job.prompt[static_cast<size_t>(job.done + run.num_rows)];
        }
        if (run.tokens.empty() && !job.output.empty()) run.num_rows = std::min(1 + i, job.max_tokens - static_cast<int32_t>(job.output.size()));
        step.runs.push_back(run);
        active.push_back(&job);
      }
      if (active.empty()) break;
      const StepResult result = runner.run(step);
      for (size_t i = 0; i < active.size(); ++i) active[i]->take(step.runs[i], result.runs[i]);
    }
  }
  for (size_t i = 0; i < kNumJobs; ++i) expect_same(results[0][i], results[1][i]);
}

INSTANTIATE_TEST_SUITE_P(Settings, Invariance,
                         ::testing::Values(Setting{"bfloat16", ModelDType::kBFloat16}, Setting{"float32", ModelDType::kFloat32}, Setting{"tp2", ModelDType::kBFloat16, 2},
                                           Setting{"tp3", ModelDType::kBFloat16, 3}, Setting{"tp2_pp2", ModelDType::kBFloat16, 2, 2}),
                         [](const auto& test) { return std::string(test.param.name); });

}  // namespace
}  // namespace quern::worker
