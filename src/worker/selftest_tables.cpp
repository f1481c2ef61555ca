#include <algorithm>
#include <limits>

#include "worker/selftest_ops.h"

// embed, sample and state_copy: look-ups, decisions and copies, which agree exactly.

namespace quern::worker::selftest {

Result<void> run(const ops::Embed::Problem& p, const ops::Embed::Kernel& kernel, Trial& trial) {
  ASSIGN_OR_RETURN(const ops::LinearSource table, trial.linear({.out_features = p.vocab_size, .in_features = p.hidden, .scheme = p.scheme}));
  ASSIGN_OR_RETURN(const ops::Buffer* packed, trial.pack(kernel, [&](ops::Buffer& buffer) {
    if (p.vocab_size > 0) kernel.pack(table, buffer, trial.stream());
  }));
  const Positions positions{.cursor = {1150, 0, 579}, .boundary = {1088, 0, 576}};
  const auto vocab = static_cast<int32_t>(p.end_of_ids());
  return trial.for_each_batch([&](ops::RowKind kind, int32_t n, const std::string& label) -> Result<void> {
    ASSIGN_OR_RETURN(Step step, trial.step(two_runs(kind, n), positions));
    ops::Rows& rows = step.rows;
    ASSIGN_OR_RETURN(rows.tokens, trial.unwritten(DType::kI32, rows.tokens.shape));
    ASSIGN_OR_RETURN(rows.indices, trial.unwritten(DType::kI32, rows.indices.shape));
    ASSIGN_OR_RETURN(rows.positions, trial.unwritten(DType::kI32, rows.positions.shape));
    std::vector<int32_t> given, run_positions;
    for (const ops::RowRun& run : rows.runs) {
      const bool from_device = run.kind == ops::RowKind::kDecode && run.num_rows <= kDrafts + 1;
      for (int32_t row = 0; row < run.num_rows; ++row) given.push_back(from_device ? -1 : trial.below(vocab));
      run_positions.insert(run_positions.end(), {600, 7, 31});
    }
    ASSIGN_OR_RETURN(rows.given_tokens, trial.ints({n}, given));
    ASSIGN_OR_RETURN(rows.run_positions, trial.ints(rows.run_positions.shape, run_positions));
    for (const ops::TensorView& ids : {rows.slots.last_token, rows.slots.drafts}) {
      ASSIGN_OR_RETURN(const ops::TensorView valid, trial.tensor(DType::kI32, ids.shape, [&](int64_t) { return trial.below(vocab); }));
      trial.stream().copy(valid, ids);
    }
    ASSIGN_OR_RETURN(const ops::TensorView x, trial.unwritten(p.activation, {n, p.hidden}));
    ASSIGN_OR_RETURN(ops::Launch launch, trial.launch(kernel, n));
    kernel.enqueue(rows, *packed, x, launch);
    RETURN_IF_ERROR(trial.keep("tokens of " + label, rows.tokens, 0));
    RETURN_IF_ERROR(trial.keep("indices of " + label, rows.indices, 0));
    RETURN_IF_ERROR(trial.keep("positions of " + label, rows.positions, 0));
    RETURN_IF_ERROR(trial.keep(label, x, 0));
    ASSIGN_OR_RETURN(const ops::TensorView ids, trial.tensor(DType::kI32, {n}, [&](int64_t i) { return (i * 37 + 11) % vocab; }));
    ASSIGN_OR_RETURN(const ops::TensorView looked_up, trial.unwritten(p.activation, {n, p.hidden}));
    kernel.enqueue_lookup(ids, *packed, looked_up, launch);
    return trial.keep("look-up of " + label, looked_up, 0);
  });
}

Result<void> run(const ops::Combine::Problem& p, const ops::Combine::Kernel& kernel, Trial& trial) {
  return trial.for_each_batch([&](ops::RowKind, int32_t n, const std::string& label) -> Result<void> {
    std::vector<ops::TensorView> partials;
    for (int32_t rank = 0; rank < p.num_ranks; ++rank) {
      ASSIGN_OR_RETURN(partials.emplace_back(), trial.uniform(p.activation, {n, p.hidden}, -1.0f, 1.0f));
    }
    ASSIGN_OR_RETURN(const ops::TensorView x, trial.uniform(p.activation, {n, p.hidden}, -1.0f, 1.0f));
    ASSIGN_OR_RETURN(ops::Launch launch, trial.launch(kernel, n));
    kernel.enqueue(partials, x, launch);
    return trial.keep(label, x, 0);
  });
}

Result<void> run(const ops::DraftRows::Problem& p, const ops::DraftRows::Kernel& kernel, Trial& trial) {
  // A prompt whose next token is sampled, a verify that accepts some of its drafts, one of a failed sequence, a prompt that goes on, and padding.
  const auto drafts = static_cast<int32_t>(p.k_max);
  const std::vector<ops::RowRun> runs = {{.slot = 2, .num_rows = 9, .kind = ops::RowKind::kPrompt},
                                         {.slot = 0, .num_rows = drafts + 1, .kind = ops::RowKind::kDecode, .committed = false},
                                         {.slot = 1, .num_rows = 1, .kind = ops::RowKind::kDecode},
                                         {.slot = 2, .num_rows = 5, .kind = ops::RowKind::kPrompt},
                                         {.slot = -1, .num_rows = 0, .kind = ops::RowKind::kDecode}};
  const auto num_runs = static_cast<int64_t>(runs.size());
  ASSIGN_OR_RETURN(const Step step, trial.step(runs, {.cursor = {200, 70, 40}, .boundary = {192, 64, 0}}));
  const std::vector<ops::DraftRun> wanted = {{2, 1, -1, drafts}, {0, 1, -1, drafts}, {1, 1, -1, drafts}, {2, 1, 17, 0}, {}};
  ASSIGN_OR_RETURN(const ops::TensorView draft_runs, trial.upload(std::as_bytes(std::span(wanted)), DType::kI32, {num_runs, ops::kDraftRunFields}));
  ops::SampleOutput sampled;
  ASSIGN_OR_RETURN(sampled.tokens, trial.tensor(DType::kI32, {num_runs, p.k_max + 1}, [](int64_t i) { return 20 + i; }));
  ASSIGN_OR_RETURN(sampled.num_tokens, trial.ints({num_runs}, {1, std::max(drafts, 1), 0, 0, 0}));
  ASSIGN_OR_RETURN(sampled.non_finite, trial.ints({num_runs}, {0, 0, 1, 0, 0}));
  const int64_t n = step.rows.num_rows;
  ASSIGN_OR_RETURN(const ops::TensorView last_rows, trial.unwritten(DType::kI32, {num_runs}));
  ASSIGN_OR_RETURN(const ops::TensorView found, trial.tensor(DType::kI32, {num_runs, std::max<int64_t>(p.k_max, 1)}, [](int64_t) { return -1; }));
  ASSIGN_OR_RETURN(const ops::TensorView hidden, trial.uniform(p.activation, {n, p.hidden}, -2, 2));
  ASSIGN_OR_RETURN(ops::Launch launch, trial.launch(kernel, n));
  const auto with_own_tokens = [&](ops::Rows rows, int64_t num_rows) -> Result<ops::Rows> {
    rows.num_rows = static_cast<int32_t>(num_rows);
    ASSIGN_OR_RETURN(rows.tokens, trial.unwritten(DType::kI32, {num_rows}));
    ASSIGN_OR_RETURN(rows.indices, trial.unwritten(DType::kI32, {num_rows}));
    ASSIGN_OR_RETURN(rows.positions, trial.unwritten(DType::kI32, {num_rows, 3}));
    return rows;
  };
  const auto keep = [&](const std::string& label, const ops::Rows& rows) -> Result<void> {
    RETURN_IF_ERROR(trial.keep("tokens of " + label, rows.tokens, 0));
    RETURN_IF_ERROR(trial.keep("indices of " + label, rows.indices, 0));
    RETURN_IF_ERROR(trial.keep("positions of " + label, rows.positions, 0));
    return trial.keep("last rows of " + label, last_rows, 0);
  };
  ASSIGN_OR_RETURN(ops::Rows rows, with_own_tokens(step.rows, n));
  kernel.enqueue_first(draft_runs, step.rows, sampled, rows, last_rows, launch);
  RETURN_IF_ERROR(keep("the first pass", rows));
  for (int32_t pass = 0; pass < drafts; ++pass) {
    ASSIGN_OR_RETURN(const ops::TensorView ids, trial.tensor(DType::kI32, {num_runs}, [&](int64_t i) { return 7 * pass + i; }));
    ASSIGN_OR_RETURN(const ops::Rows next, with_own_tokens(step.rows, num_runs));
    ASSIGN_OR_RETURN(const ops::TensorView hidden_out, trial.unwritten(p.activation, {num_runs, p.hidden}));
    kernel.enqueue_next(draft_runs, pass, ids, rows, hidden, next, hidden_out, last_rows, found, launch);
    RETURN_IF_ERROR(keep(fmt::format("pass {}", pass + 1), next));
    RETURN_IF_ERROR(trial.keep(fmt::format("hidden of pass {}", pass + 1), hidden_out.first(2), 0));
    rows = next;
  }
  RETURN_IF_ERROR(trial.keep("drafts of the slots", step.rows.slots.drafts, 0));
  return trial.keep("drafts", found, 0);
}

Result<void> run(const ops::StateCopy::Problem&, const ops::StateCopy::Kernel& kernel, Trial& trial) {
  // Entries that begin on no round address among them.
  std::vector<ops::StateCopy::Copy> copies;
  std::vector<ops::TensorView> destinations;
  for (const auto& [dtype, length] : {std::pair{DType::kU8, 1021}, {DType::kI32, 1}, {DType::kBF16, 3 * 81}, {DType::kF32, 6 * 1024}}) {
    ASSIGN_OR_RETURN(const ops::TensorView source, trial.uniform(dtype, {3, length}, 0, 200));
    ASSIGN_OR_RETURN(const ops::TensorView destination, trial.uniform(dtype, {4, length}, 0, 200));
    copies.push_back({source.at(1), destination.at(2)});
    copies.push_back({source.at(2), destination.at(0)});
    copies.push_back({{}, destination.at(1)});
    destinations.push_back(destination);
  }
  ASSIGN_OR_RETURN(ops::Launch launch, trial.launch(kernel, 64));
  kernel.enqueue(copies, launch);
  for (const ops::TensorView& destination : destinations)
    RETURN_IF_ERROR(trial.keep(fmt::format("copies of {}", dtype_name(destination.dtype)), destination, 0));

  // Hidden states: slot 2's fold is due, slot 0 ends on a boundary, then crosses one; at last drafts that store no fold.
  constexpr int64_t kHidden = 136, kWindow = kDrafts + 2;
  const auto store_hidden = [&](const std::vector<ops::RowRun>& runs, const Positions& positions) -> Result<void> {
    ASSIGN_OR_RETURN(const Step step, trial.step(runs, positions));
    ASSIGN_OR_RETURN(const ops::TensorView hidden, trial.uniform(DType::kBF16, {step.rows.num_rows, kHidden}, -2, 2));
    ASSIGN_OR_RETURN(const ops::TensorView window, trial.uniform(DType::kBF16, {kNumSlots, kWindow, kHidden}, -2, 2));
    ASSIGN_OR_RETURN(const ops::TensorView boundary_hidden, trial.uniform(DType::kBF16, {kNumSlots, kHidden}, -2, 2));
    kernel.store_hidden(step.rows, hidden, window, boundary_hidden, launch);
    RETURN_IF_ERROR(trial.keep("hidden window", window, 0));
    return trial.keep("boundary hidden", boundary_hidden, 0);
  };
  const auto runs = [](ops::RowKind kind, int32_t in_slot_2, int32_t in_slot_0, bool committed) {
    return std::vector<ops::RowRun>{{.slot = 2, .num_rows = in_slot_2, .kind = kind, .committed = committed},
                                    {.slot = 0, .num_rows = in_slot_0, .kind = kind, .committed = committed}};
  };
  RETURN_IF_ERROR(store_hidden(runs(ops::RowKind::kPrompt, 2, 5, true), {.cursor = {1147, 0, 577}, .boundary = {1088, 0, 512}}));
  RETURN_IF_ERROR(store_hidden(runs(ops::RowKind::kPrompt, 50, 5, true), {.cursor = {1149, 0, 640}, .boundary = {1088, 0, 640}}));
  return store_hidden(runs(ops::RowKind::kDecode, 5, 3, false), {.cursor = {1150, 0, 640}, .boundary = {1088, 0, 576}});
}

namespace {

/// Runs of one sampling step, by slot. From kBiased to kTooEarly one transform each takes the most likely token out of the race.
enum SampledSlot : int32_t {
  kGreedy, kBiased, kPresence, kFrequency, kRepetition, kMasked, kTooEarly, kVerified, kDrawn, kSilent, kNotFinite, kNumSampledSlots
};

struct SamplerInputs {
  ops::SamplerTables sampler;
  ops::SlotTables slots;
  ops::TensorView logits, masks, run_table;
  std::vector<ops::SampleRun> runs;
};

/// The token at index `cursor` + 1 of a slot is drawn from its row of logits; a verify has k_max + 1 rows.
Result<SamplerInputs> sampler_inputs(const ops::Sample::Problem& p, Trial& trial) {
  SamplerInputs in;
  const auto text = static_cast<int32_t>(p.num_tokens), drafts = static_cast<int32_t>(p.k_max);
  std::vector<int32_t> cursor, boundary;
  int32_t num_rows = 0;
  for (int32_t slot = 0; slot < kNumSampledSlots; ++slot) {
    ops::SampleRun run{.slot = slot, .num_rows = slot == kGreedy ? 70 : slot == kVerified ? drafts + 1 : 1};
    run.verify = slot == kVerified ? 1 : 0;
    if (slot != kSilent) {
      run.first_logits_row = num_rows;
      num_rows += slot == kVerified ? drafts + 1 : 1;
    }
    if (slot == kMasked) run.first_mask_row = 0;
    in.runs.push_back(run);
    cursor.push_back(64 * slot + 63 - slot % 2);
    boundary.push_back(64 * slot);
  }
  ASSIGN_OR_RETURN(in.run_table, trial.upload(std::as_bytes(std::span(in.runs)), DType::kI32, {kNumSampledSlots, ops::kSampleRunFields}));
  // A most likely token per row, all of which occur in the output and in the prompt; its rivals are close behind, and some are in neither.
  constexpr float kBest = 9, kRival = 8;
  std::vector<int32_t> best;
  for (int32_t row = 0; row < num_rows; ++row) best.push_back(trial.below(text / 4) * 4 + 3);
  ASSIGN_OR_RETURN(in.logits, trial.tensor(DType::kF32, {num_rows, p.vocab_size}, [&](int64_t i) {
    const auto row = static_cast<int32_t>(i / p.vocab_size), id = static_cast<int32_t>(i % p.vocab_size);
    if (row == num_rows - 1 && id == text / 2) return std::numeric_limits<float>::infinity();
    if (id >= text) return 2 * kBest;  // ids without text are never drawn
    const bool tied = row == 0 && id > best[0] && id % 1000 == 7;
    return id == best[static_cast<size_t>(row)] || tied ? kBest : trial.uniform(-kRival, kRival);
  }));
  const auto best_of = [&](int32_t slot, int32_t row = 0) { return best[static_cast<size_t>(in.runs[static_cast<size_t>(slot)].first_logits_row + row)]; };
  ASSIGN_OR_RETURN(in.sampler.counts, trial.tensor(DType::kI32, {kNumSampledSlots, p.vocab_size}, [&](int64_t i) { return i % p.vocab_size % 4; }));
  ASSIGN_OR_RETURN(in.sampler.in_prompt, trial.tensor(DType::kU8, {kNumSampledSlots, p.vocab_size}, [&](int64_t i) { return i % p.vocab_size % 2; }));
  std::vector<int32_t> mask(static_cast<size_t>(ceil_div(p.vocab_size, 32)), -1);
  mask[static_cast<size_t>(best_of(kMasked) / 32)] &= static_cast<int32_t>(~(1u << (best_of(kMasked) % 32)));
  ASSIGN_OR_RETURN(in.masks, trial.ints({1, static_cast<int64_t>(mask.size())}, mask));

  // Drafts: accepted but for the last, which only is so where there is no other.
  std::vector<int32_t> proposed(static_cast<size_t>(kNumSampledSlots * drafts), 0);
  for (int32_t i = 0; i < drafts; ++i) proposed[static_cast<size_t>(kVerified * drafts + i)] = best_of(kVerified, i) - (i > 0 && i + 1 == drafts ? 1 : 0);
  ASSIGN_OR_RETURN(in.slots.drafts, trial.ints({kNumSampledSlots, drafts}, proposed));
  ASSIGN_OR_RETURN(in.slots.cursor, trial.ints({kNumSampledSlots}, cursor));
  ASSIGN_OR_RETURN(in.slots.boundary, trial.ints({kNumSampledSlots}, boundary));
  ASSIGN_OR_RETURN(in.slots.last_token, trial.unwritten(DType::kI32, {kNumSampledSlots}));
  ASSIGN_OR_RETURN(in.slots.position_delta, trial.unwritten(DType::kI32, {kNumSampledSlots}));
  ASSIGN_OR_RETURN(in.slots.block_tables, trial.unwritten(DType::kI32, {kNumSampledSlots, 1}));

  std::array<ops::SamplingParams, kNumSampledSlots> params;
  for (ops::SamplingParams& slot : params) slot.temperature = 0;
  params[kGreedy].num_logprobs = 5;
  params[kBiased].logit_bias = {{best_of(kBiased) / 2, 4 * kRival}, {best_of(kBiased), -kBest}};
  params[kPresence].presence_penalty = 2;
  params[kFrequency].frequency_penalty = 0.75f;
  params[kRepetition].repetition_penalty = 1.5f;
  params[kTooEarly].stop_ids = {text / 2, best_of(kTooEarly)};
  params[kTooEarly].min_tokens = 3;
  params[kVerified].num_logprobs = 0;
  params[kDrawn].temperature = 0.8f;
  params[kDrawn].top_k = 40;
  params[kDrawn].top_p = 0.9f;
  params[kDrawn].seed = 1234;
  std::vector<ops::SlotSampling> stored;
  for (const ops::SamplingParams& slot : params) stored.push_back(ops::to_slot_sampling(slot));
  const Shape params_shape{kNumSampledSlots, static_cast<int64_t>(sizeof(ops::SlotSampling))};
  ASSIGN_OR_RETURN(in.sampler.params, trial.upload(std::as_bytes(std::span(stored)), DType::kU8, params_shape));
  return in;
}

/// Keeps the entries of `view` [runs, k_max + 1, width] that mean something, the others as zeros.
Result<void> keep_where(Trial& trial, const std::string& name, const ops::TensorView& view, int64_t width, double bound, const auto& means_something) {
  ASSIGN_OR_RETURN(std::vector<float> values, trial.read(view));
  const int64_t per_run = view.shape.num_elements() / view.shape[0];
  for (int64_t i = 0; i < view.shape.num_elements(); ++i)
    if (!means_something(i / per_run, i % per_run / width, i % width)) values[static_cast<size_t>(i)] = 0;
  trial.keep({name, std::move(values), view.shape.num_elements(), bound});
  return {};
}

}  // namespace

Result<void> run(const ops::Sample::Problem& p, const ops::Sample::Kernel& kernel, Trial& trial) {
  ASSIGN_OR_RETURN(const SamplerInputs in, sampler_inputs(p, trial));
  const auto num_runs = static_cast<int64_t>(in.runs.size());
  constexpr int64_t kWidth = 1 + ops::kMaxLogprobs;
  ops::SampleOutput out;
  ASSIGN_OR_RETURN(out.tokens, trial.unwritten(DType::kI32, {num_runs, p.k_max + 1}));
  ASSIGN_OR_RETURN(out.num_tokens, trial.unwritten(DType::kI32, {num_runs}));
  ASSIGN_OR_RETURN(out.non_finite, trial.unwritten(DType::kI32, {num_runs}));
  ASSIGN_OR_RETURN(out.logprobs, trial.unwritten(DType::kF32, {num_runs, p.k_max + 1, kWidth}));
  ASSIGN_OR_RETURN(out.logprob_ids, trial.unwritten(DType::kI32, {num_runs, p.k_max + 1, kWidth}));
  ASSIGN_OR_RETURN(out.chosen_rank, trial.unwritten(DType::kI32, {num_runs, p.k_max + 1}));
  ASSIGN_OR_RETURN(ops::Launch launch, trial.launch(kernel, in.logits.shape[0]));

  ASSIGN_OR_RETURN(const ops::TensorView ids, trial.unwritten(DType::kI32, {in.logits.shape[0] - 1}));
  kernel.enqueue_argmax(in.logits.first(in.logits.shape[0] - 1), ids, launch);
  RETURN_IF_ERROR(trial.keep("most likely tokens", ids, 0));

  kernel.enqueue(in.run_table, in.logits, in.masks, in.sampler, in.slots, out, launch);
  ASSIGN_OR_RETURN(const std::vector<float> num_tokens, trial.read(out.num_tokens));
  RETURN_IF_ERROR(trial.keep("numbers of tokens", out.num_tokens, 0));
  RETURN_IF_ERROR(trial.keep("non-finite flags", out.non_finite, 0));
  const auto drawn = [&](int64_t run, int64_t token, int64_t) { return static_cast<float>(token) < num_tokens[static_cast<size_t>(run)]; };
  const auto with_logprob = [&](int64_t run, int64_t token, int64_t entry) {
    return drawn(run, token, 0) && (run == kGreedy ? entry <= 5 : run == kVerified && entry == 0);
  };
  RETURN_IF_ERROR(keep_where(trial, "tokens", out.tokens, 1, 0, drawn));
  RETURN_IF_ERROR(keep_where(trial, "logprobs", out.logprobs, kWidth, 10 * rounding_error(DType::kF32), with_logprob));
  RETURN_IF_ERROR(keep_where(trial, "logprob ids", out.logprob_ids, kWidth, 0, with_logprob));
  RETURN_IF_ERROR(keep_where(trial, "ranks", out.chosen_rank, 1, 0, [&](int64_t run, int64_t token, int64_t) { return with_logprob(run, token, 0); }));
  // Where the run that is not finite stands does not matter any more: its request fails.
  RETURN_IF_ERROR(trial.keep("cursors", in.slots.cursor.first(kNotFinite), 0));
  RETURN_IF_ERROR(trial.keep("boundaries", in.slots.boundary.first(kNotFinite), 0));
  RETURN_IF_ERROR(trial.keep("last tokens", in.slots.last_token.first(kSilent), 0));
  RETURN_IF_ERROR(trial.keep("counts", in.sampler.counts.first(kNotFinite), 0));
  RETURN_IF_ERROR(trial.keep("sampling parameters", in.sampler.params.first(kNotFinite), 0));

  // The same runs again from half a vocabulary, as a rank has it: what it tells of it, and what is drawn from that alone.
  const int64_t num_rows = in.logits.shape[0], width = p.vocab_size / 2;
  const ops::TensorView half{in.logits.buffer, in.logits.offset_bytes, DType::kF32, {num_rows, width}};
  ASSIGN_OR_RETURN(const ops::TensorView keys, trial.unwritten(DType::kI32, {num_rows, ops::kKeyWords}));
  kernel.enqueue_argmax_candidates(half, 0, keys, launch);
  kernel.enqueue_argmax_of(keys.first(num_rows - 1), ids, launch);
  RETURN_IF_ERROR(trial.keep("most likely tokens of a half", ids, 0));
  ASSIGN_OR_RETURN(const ops::TensorView candidates, trial.unwritten(DType::kI32, {num_rows, ops::candidate_words(ops::kMaxCandidates)}));
  kernel.enqueue_candidates(in.run_table, half, 0, ops::kMaxCandidates, in.masks, in.sampler, in.slots, candidates, launch);
  RETURN_IF_ERROR(trial.keep("candidates", candidates, 0));
  kernel.enqueue_drawing(in.run_table, candidates, ops::kMaxCandidates, in.sampler, in.slots, out, launch);
  ASSIGN_OR_RETURN(const std::vector<float> num_again, trial.read(out.num_tokens));
  RETURN_IF_ERROR(trial.keep("numbers of tokens of a half", out.num_tokens, 0));
  return keep_where(trial, "tokens of a half", out.tokens, 1, 0, [&](int64_t run, int64_t token, int64_t) { return static_cast<float>(token) < num_again[static_cast<size_t>(run)]; });
}

}  // namespace quern::worker::selftest
