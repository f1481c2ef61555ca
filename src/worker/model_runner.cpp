#include "worker/model_runner.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <numeric>

#include "base/float_convert.h"
#include "worker/logprobs.h"

namespace quern::worker {
namespace {

/// Whether a run ends in a sampled token, and from how many of its rows tokens are drawn.
bool samples(const StepRun& run) { return run.want == Want::kSample || (run.want == Want::kPromptLogprobs && run.sample_after); }
int32_t sampled_rows(const StepRun& run) { return !samples(run) ? 0 : run.verify() ? run.num_rows : 1; }

/// Rows of the run whose logits go to the host.
std::vector<int32_t> exported_rows(const StepRun& run) {
  if (run.want == Want::kLogits) return run.logit_rows;
  if (run.want != Want::kPromptLogprobs) return {};
  const bool last_has_follower = run.following_token >= 0;
  std::vector<int32_t> rows(static_cast<size_t>(run.num_rows - (last_has_follower ? 0 : 1)));
  std::iota(rows.begin(), rows.end(), 0);
  return rows;
}

}  // namespace

Result<std::unique_ptr<ModelRunner>> ModelRunner::create(const ExecutionPlan& plan, weights::WeightSource& source, const ops::KernelTable& table,
                                                         const ops::SelectionRules& rules, ops::Device& device, const LoadProgress& progress) {
  std::unique_ptr<ModelRunner> runner(new ModelRunner(plan));
  ASSIGN_OR_RETURN(runner->stream_, device.make_stream());
  runner->kernels_ = std::make_unique<KernelCache>(table, device, rules);
  ASSIGN_OR_RETURN(runner->model_, load_model(plan, source, *runner->kernels_, device, *runner->stream_, progress));
  const Numerics numerics{plan.activation, plan.kv, plan.ring, plan.options.k_max};
  const Sizes sizes(plan.config, numerics, plan.with_mtp);
  ASSIGN_OR_RETURN(runner->memory_, SequenceMemory::allocate(plan, sizes, device, *runner->stream_));
  const size_t wanted = runner->kernels_->workspace_bytes(std::max(plan.limits.max_rows, plan.limits.max_logit_rows));
  const size_t workspace = std::max(wanted, kKernelWorkspaceBytes);  // the plan's share, so that what is planned is what is taken
  ASSIGN_OR_RETURN(runner->step_, StepMemory::allocate(plan, sizes, workspace, device));
  runner->cursor_.assign(static_cast<size_t>(plan.limits.num_slots), 0);
  runner->position_delta_.assign(static_cast<size_t>(plan.limits.num_slots), 0);
  runner->num_logprobs_.assign(static_cast<size_t>(plan.limits.num_slots), -1);
  return runner;
}

template <class T>
void ModelRunner::upload(std::vector<T> values, const ops::TensorView& destination) {
  auto bytes = std::make_unique<std::vector<std::byte>>(values.size() * sizeof(T));
  std::memcpy(bytes->data(), values.data(), bytes->size());
  CHECK(bytes->size() == destination.size_bytes());
  stream_->copy_to_device(bytes->data(), destination);
  uploads_.push_back(std::move(bytes));
}

template <class T>
Result<std::vector<T>> ModelRunner::download(const ops::TensorView& source) {
  std::vector<T> values(source.size_bytes() / sizeof(T));
  stream_->copy_to_host(source, values.data());
  RETURN_IF_ERROR(stream_->finish());
  return values;
}

StepResult ModelRunner::run(const StepPlan& plan, const std::function<StepMasks()>& masks) {
  const auto begin = std::chrono::steady_clock::now();
  StepResult result;
  result.step = plan.step;
  result.runs.resize(plan.runs.size());
  for (size_t i = 0; i < plan.runs.size(); ++i) result.runs[i].slot = plan.runs[i].slot;

  apply_state_ops(plan);
  apply_slot_updates(plan);
  apply_block_tables(plan);
  make_rows(plan);
  Result<void> done;
  if (rows_.num_rows > 0) {
    ops::Launch l = launch();
    const ops::TensorView x = step_.x.first(rows_.num_rows);
    model_.embed.kernel->enqueue(rows_, inputs_, *model_.embed.packed, x, l);
    forward(rows_, x);
    done = read_logits(plan, result);
    if (done) done = sample(plan, masks, result);
    if (done && model_.mtp) done = propose(plan, result);
  }
  if (done) done = stream_->finish();
  uploads_.clear();
  if (!done) result.error = done.error();
  result.computed_rows = rows_.num_rows;
  result.device_seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  return result;
}

void ModelRunner::apply_state_ops(const StepPlan& plan) {
  for (const StateOp& op : plan.state_ops) {
    std::vector<ops::StateCopy::Copy> copies;
    const ops::TensorView cursor = memory_.tables.cursor.at(op.slot), boundary = memory_.tables.boundary.at(op.slot);
    const auto slot = static_cast<size_t>(op.slot);
    switch (op.kind) {
      case StateOp::Kind::kClear:
        memory_.clear(op.slot, copies);
        cursor_[slot] = 0;
        break;
      case StateOp::Kind::kSnapshot: memory_.snapshot(op.slot, op.snapshot, copies); break;
      case StateOp::Kind::kRestore:
        memory_.restore(op.slot, op.snapshot, op.boundary, copies);
        cursor_[slot] = op.boundary;
        break;
      case StateOp::Kind::kRewind:
        memory_.rewind(op.slot, op.boundary, copies);
        cursor_[slot] = op.boundary;
        break;
    }
    ops::Launch l = launch();
    model_.state_copy.kernel->enqueue(copies, l);
    if (op.kind == StateOp::Kind::kRestore || op.kind == StateOp::Kind::kRewind) {
      upload(std::vector<int32_t>{op.boundary}, cursor);
      upload(std::vector<int32_t>{op.boundary}, boundary);
    }
  }
}

void ModelRunner::apply_slot_updates(const StepPlan& plan) {
  for (const SlotUpdate& update : plan.slot_updates) {
    ops::SlotSampling params = ops::to_slot_sampling(update.sampling);
    params.num_generated = static_cast<int32_t>(update.output_ids.size());
    std::vector<uint8_t> bytes(sizeof params);
    std::memcpy(bytes.data(), &params, sizeof params);
    upload(std::move(bytes), memory_.sampler.params.at(update.slot));
    position_delta_[static_cast<size_t>(update.slot)] = update.position_delta;
    num_logprobs_[static_cast<size_t>(update.slot)] = update.sampling.num_logprobs;
    upload(std::vector<int32_t>{update.position_delta}, memory_.tables.position_delta.at(update.slot));
    if (!update.sampling.has_penalties()) continue;
    const auto vocab = static_cast<size_t>(plan_.config.vocab_size);
    std::vector<int32_t> counts(vocab, 0);
    for (const int32_t id : update.output_ids) ++counts[static_cast<size_t>(id)];
    std::vector<uint8_t> in_prompt(vocab, 0);
    for (const int32_t id : update.prompt_ids) in_prompt[static_cast<size_t>(id)] = 1;
    upload(std::move(counts), memory_.sampler.counts.at(update.slot));
    upload(std::move(in_prompt), memory_.sampler.in_prompt.at(update.slot));
  }
}

void ModelRunner::apply_block_tables(const StepPlan& plan) {
  for (const BlockTableUpdate& update : plan.block_table_updates) {
    ops::TensorView entries = memory_.tables.block_tables.at(update.slot);
    entries.offset_bytes += static_cast<size_t>(update.first_block) * sizeof(int32_t);
    entries.shape = Shape{static_cast<int64_t>(update.blocks.size())};
    CHECK(update.first_block + entries.shape[0] <= memory_.tables.block_tables.shape[1]);
    upload(std::vector<int32_t>(update.blocks), entries);
  }
}

void ModelRunner::make_rows(const StepPlan& plan) {
  runs_.clear();
  inputs_.clear();
  int32_t num_rows = 0;
  for (const StepRun& run : plan.runs) {
    CHECK(run.num_rows > 0 && (run.tokens.empty() || static_cast<int32_t>(run.tokens.size()) == run.num_rows));
    CHECK(run.num_rows <= plan_.options.k_max + 1 || !run.tokens.empty());
    runs_.push_back({.slot = run.slot, .first_row = num_rows, .num_rows = run.num_rows, .kind = run.kind, .committed = !run.verify()});
    ops::Embed::RunInput input;
    input.tokens = run.tokens;
    std::copy(run.position.begin(), run.position.end(), input.position);
    inputs_.push_back(input);
    num_rows += run.num_rows;
  }
  CHECK(num_rows <= plan_.limits.max_rows);
  rows_.num_rows = num_rows;
  rows_.runs = runs_;
  rows_.tokens = step_.tokens.first(num_rows);
  rows_.indices = step_.indices.first(num_rows);
  rows_.positions = step_.positions.first(num_rows);
  rows_.slots = memory_.tables;
}

void ModelRunner::forward(const ops::Rows& rows, const ops::TensorView& x) {
  size_t gdn_index = 0, kv_index = 0;
  for (const LoadedLayer& l : model_.layers) {
    layer(l, rows, x, gdn_index, kv_index, 0);
    ++(l.gdn ? gdn_index : kv_index);
  }
}

void ModelRunner::layer(const LoadedLayer& l, const ops::Rows& rows, const ops::TensorView& x, size_t gdn_index, size_t kv_index, int32_t first_index) {
  ops::Launch go = launch();
  const int64_t n = rows.num_rows;
  if (l.attention) {
    const ops::TensorView query = step_.query(n), gate = step_.gate(n);
    const ops::Activation out = step_.attention_out(n);
    l.attention->in.kernel->enqueue(rows, x, *l.attention->in.packed, query, gate, memory_.kv[kv_index], go);
    l.attention->attention.kernel->enqueue(rows, query, gate, memory_.kv[kv_index], first_index, out, go);
    l.out.kernel->enqueue(rows, out, *l.out.packed, x, go);
  } else {
    const ops::GdnInputs inputs = step_.gdn_inputs(n);
    const ops::Activation out = step_.gdn_out(n);
    l.gdn->in.kernel->enqueue(rows, x, *l.gdn->in.packed, inputs, go);
    l.gdn->mix.kernel->enqueue(rows, inputs, *l.gdn->mix.packed, memory_.gdn[gdn_index], out, go);
    l.out.kernel->enqueue(rows, out, *l.out.packed, x, go);
  }
  const ops::Activation mlp = step_.mlp(n);
  l.mlp_in.kernel->enqueue(rows, x, *l.mlp_in.packed, mlp, go);
  l.mlp_down.kernel->enqueue(rows, mlp, *l.mlp_down.packed, x, go);
}

/// Logits that the host wants to see, at most max_logit_rows at a time.
Result<void> ModelRunner::read_logits(const StepPlan& plan, StepResult& result) {
  struct Wanted {
    size_t run;
    int32_t row;  // of the run
  };
  std::vector<Wanted> wanted;
  for (size_t i = 0; i < plan.runs.size(); ++i)
    for (const int32_t row : exported_rows(plan.runs[i])) wanted.push_back({i, row});
  const auto group_size = static_cast<size_t>(plan_.limits.max_logit_rows);
  for (size_t first = 0; first < wanted.size(); first += group_size) {
    const size_t count = std::min(group_size, wanted.size() - first);
    std::vector<int32_t> rows;
    for (size_t i = 0; i < count; ++i) rows.push_back(runs_[wanted[first + i].run].first_row + wanted[first + i].row);
    const ops::TensorView logits = step_.logits.first(static_cast<int64_t>(count));
    ops::Launch go = launch();
    model_.head.kernel->enqueue(rows_, step_.x.first(rows_.num_rows), model_.norm_view, rows, model_.head_weights(), step_.hidden.first(rows_.num_rows), logits, go);
    ASSIGN_OR_RETURN(const std::vector<float> values, download<float>(logits));
    const auto vocab = static_cast<size_t>(plan_.config.vocab_size);
    for (size_t i = 0; i < count; ++i) {
      const std::span<const float> row(values.data() + i * vocab, vocab);
      const StepRun& run = plan.runs[wanted[first + i].run];
      RunResult& out = result.runs[wanted[first + i].run];
      if (std::any_of(row.begin(), row.end(), [](float v) { return !std::isfinite(v); })) out.non_finite = true;
      if (run.want == Want::kLogits) {
        out.logits.emplace_back(row.begin(), row.end());
      } else {
        const int32_t next = wanted[first + i].row + 1;
        const int32_t token = next < run.num_rows ? run.tokens[static_cast<size_t>(next)] : run.following_token;
        out.prompt_logprobs.push_back(token_logprobs(row, token, run.num_prompt_logprobs));
      }
    }
  }
  return {};
}

Result<void> ModelRunner::sample(const StepPlan& plan, const std::function<StepMasks()>& masks, StepResult& result) {
  ops::Launch go = launch();
  const ops::TensorView x = step_.x.first(rows_.num_rows), hidden = step_.hidden.first(rows_.num_rows);
  const bool masked = std::any_of(plan.runs.begin(), plan.runs.end(), [](const StepRun& run) { return run.mask_pending; });
  StepMasks step_masks;

  // Groups of runs whose logits fit; runs that sample nothing advance with the first.
  size_t first = 0;
  bool hidden_stored = false;
  while (first < plan.runs.size()) {
    std::vector<ops::SampleRun> group;
    std::vector<int32_t> logit_rows;
    std::vector<uint32_t> mask_rows;
    int32_t num_mask_rows = 0;
    size_t last = first;
    for (; last < plan.runs.size(); ++last) {
      const StepRun& run = plan.runs[last];
      const int32_t count = sampled_rows(run);
      if (static_cast<int32_t>(logit_rows.size()) + count > plan_.limits.max_logit_rows) break;
      ops::SampleRun entry{.slot = run.slot, .num_rows = run.num_rows, .first_logits_row = -1, .sample_last_only = !run.verify(), .first_mask_row = -1};
      if (count > 0) {
        entry.first_logits_row = static_cast<int32_t>(logit_rows.size());
        for (int32_t i = run.num_rows - count; i < run.num_rows; ++i) logit_rows.push_back(runs_[last].first_row + i);
      }
      group.push_back(entry);
    }
    CHECK(last > first);
    const ops::TensorView logits = step_.logits.first(static_cast<int64_t>(logit_rows.size()));
    model_.head.kernel->enqueue(rows_, x, model_.norm_view, logit_rows, model_.head_weights(), hidden, logits, go);
    if (!hidden_stored) {
      model_.state_copy.kernel->store_hidden(rows_, hidden, memory_.hidden_window, memory_.boundary_hidden, go);
      hidden_stored = true;
    }
    if (masked && step_masks.rows.empty()) step_masks = masks();
    for (size_t i = first; i < last; ++i) {
      if (!plan.runs[i].mask_pending) continue;
      for (const auto& [slot, words] : step_masks.rows) {
        if (slot != plan.runs[i].slot) continue;
        group[i - first].first_mask_row = num_mask_rows;
        mask_rows.insert(mask_rows.end(), words.begin(), words.end());
        num_mask_rows += static_cast<int32_t>(words.size() / static_cast<size_t>(step_.masks.shape[1]));
      }
    }
    const ops::TensorView mask_view = step_.masks.first(num_mask_rows);
    if (num_mask_rows > 0) upload(std::move(mask_rows), mask_view);

    const auto num_runs = static_cast<int64_t>(group.size());
    ops::SampleOutput out = step_.sampled;
    model_.sample.kernel->enqueue(group, logits, mask_view, memory_.sampler, memory_.tables, out, go);
    ASSIGN_OR_RETURN(const auto tokens, download<int32_t>(out.tokens.first(num_runs)));
    ASSIGN_OR_RETURN(const auto num_tokens, download<int32_t>(out.num_tokens.first(num_runs)));
    ASSIGN_OR_RETURN(const auto non_finite, download<int32_t>(out.non_finite.first(num_runs)));
    ASSIGN_OR_RETURN(const auto logprobs, download<float>(out.logprobs.first(num_runs)));
    ASSIGN_OR_RETURN(const auto logprob_ids, download<int32_t>(out.logprob_ids.first(num_runs)));
    ASSIGN_OR_RETURN(const auto ranks, download<int32_t>(out.chosen_rank.first(num_runs)));
    const auto per_run = static_cast<size_t>(plan_.limits.k_max + 1), width = static_cast<size_t>(1 + ops::kMaxLogprobs);
    for (size_t i = first; i < last; ++i) {
      const StepRun& run = plan.runs[i];
      RunResult& entry = result.runs[i];
      const size_t g = i - first;
      const auto slot = static_cast<size_t>(run.slot);
      if (!samples(run)) {
        cursor_[slot] += run.num_rows;
        continue;
      }
      entry.non_finite = entry.non_finite || non_finite[g] != 0;
      entry.num_draft_rows = run.verify() ? run.num_rows - 1 : 0;
      for (size_t t = 0; t < static_cast<size_t>(num_tokens[g]); ++t) {
        entry.tokens.push_back(tokens[g * per_run + t]);
        if (num_logprobs_[slot] < 0) continue;
        const size_t at = (g * per_run + t) * width;
        TokenLogprobs l;
        l.chosen = logprobs[at];
        l.chosen_rank = ranks[g * per_run + t];
        for (size_t k = 1; k <= static_cast<size_t>(num_logprobs_[slot]); ++k) l.top.emplace_back(logprob_ids[at + k], logprobs[at + k]);
        entry.logprobs.push_back(std::move(l));
      }
      cursor_[slot] += run.verify() ? std::max(num_tokens[g], 1) : run.num_rows;
    }
    first = last;
  }
  return {};
}

Result<void> ModelRunner::propose(const StepPlan& plan, StepResult& result) {
  // The pairs (x_j, h_{j-1}) of the rows that were committed; the last one's token may be the sampled one.
  std::vector<int32_t> tokens, indices, positions;
  std::vector<ops::RowRun> runs;
  std::vector<size_t> owners;
  std::vector<ops::StateCopy::Copy> copies;
  for (size_t i = 0; i < plan.runs.size(); ++i) {
    const StepRun& run = plan.runs[i];
    const RunResult& out = result.runs[i];
    if (!run.fill_mtp || out.non_finite) continue;
    const int32_t committed = run.verify() ? static_cast<int32_t>(out.tokens.size()) : run.num_rows;
    const int32_t begin = cursor_[static_cast<size_t>(run.slot)] - committed;
    const int32_t last_token = !out.tokens.empty() ? out.tokens.back() : run.following_token;
    const int32_t pairs = last_token >= 0 ? committed : committed - 1;
    if (pairs <= 0) continue;
    const auto first_row = static_cast<int32_t>(tokens.size());
    for (int32_t p = 0; p < pairs; ++p) {
      int32_t token = last_token;
      if (p + 1 < committed) token = run.verify() ? out.tokens[static_cast<size_t>(p)] : run.tokens[static_cast<size_t>(p + 1)];
      tokens.push_back(token);
      indices.push_back(begin + 1 + p);
    }
    for (int32_t p = 0; p < pairs; ++p) {
      const int32_t index = begin + 1 + p;
      const int32_t position = run.kind == RowKind::kPrompt ? run.position[0] + 1 + p : index + position_delta_[static_cast<size_t>(run.slot)];
      positions.insert(positions.end(), 3, position);
    }
    runs.push_back({.slot = run.slot, .first_row = first_row, .num_rows = pairs, .kind = run.kind, .committed = true});
    owners.push_back(i);
    ops::TensorView source = step_.hidden.at(runs_[i].first_row), destination = step_.mtp_hidden.at(first_row);
    source.shape = destination.shape = Shape{pairs, plan_.config.hidden_size};
    copies.push_back({source, destination});
  }
  if (tokens.empty()) return {};

  ops::Launch go = launch();
  model_.state_copy.kernel->enqueue(copies, go);
  std::vector<int32_t> remaining(owners.size());
  for (size_t r = 0; r < owners.size(); ++r)
    remaining[r] = plan.runs[owners[r]].propose == DraftMethod::kMtp && runs[r].num_rows > 0 ? plan.runs[owners[r]].propose_depth : 0;

  for (;;) {
    // One pass over the MTP layer; afterwards mtp_hidden holds the head's own outputs.
    ops::Rows rows;
    rows.num_rows = static_cast<int32_t>(tokens.size());
    rows.runs = runs;
    rows.tokens = step_.tokens.first(rows.num_rows);
    rows.indices = step_.indices.first(rows.num_rows);
    rows.positions = step_.positions.first(rows.num_rows);
    rows.slots = memory_.tables;
    upload(tokens, rows.tokens);
    upload(indices, rows.indices);
    upload(positions, rows.positions);
    const ops::TensorView embedding = step_.mtp_embedding.first(rows.num_rows), hidden = step_.mtp_hidden.first(rows.num_rows), x = step_.x.first(rows.num_rows);
    model_.embed.kernel->enqueue_lookup(rows.tokens, *model_.embed.packed, embedding, go);
    model_.mtp->in.kernel->enqueue(rows, embedding, hidden, *model_.mtp->in.packed, x, go);
    layer(model_.mtp->layer, rows, x, 0, memory_.kv.size() - 1, 1);

    std::vector<int32_t> logit_rows;
    std::vector<size_t> drafting;
    for (size_t r = 0; r < runs.size(); ++r) {
      if (remaining[r] == 0) continue;
      logit_rows.push_back(runs[r].first_row + runs[r].num_rows - 1);
      drafting.push_back(r);
    }
    if (logit_rows.empty()) return stream_->finish();
    const auto num_drafting = static_cast<int64_t>(drafting.size());
    if (num_drafting > plan_.limits.max_logit_rows) return make_error(ErrorCode::kInternal, "{} sequences draft in one step, {} fit", num_drafting, plan_.limits.max_logit_rows);
    const ops::TensorView logits = step_.logits.first(num_drafting), drafts = step_.sampled.num_tokens.first(num_drafting);
    model_.head.kernel->enqueue(rows, x, model_.mtp->norm_view, logit_rows, model_.head_weights(), hidden, logits, go);
    model_.sample.kernel->enqueue_argmax(logits, drafts, go);
    ASSIGN_OR_RETURN(const auto ids, download<int32_t>(drafts));

    // The next pass: one row per sequence that drafts on.
    std::vector<int32_t> next_tokens, next_indices, next_positions, next_remaining;
    std::vector<ops::RowRun> next_runs;
    std::vector<size_t> next_owners;
    std::vector<ops::StateCopy::Copy> moves;
    for (size_t d = 0; d < drafting.size(); ++d) {
      const size_t r = drafting[d];
      const size_t owner = owners[r];
      RunResult& out = result.runs[owner];
      if (plan.runs[owner].want == Want::kLogits) {
        ASSIGN_OR_RETURN(auto row, download<float>(logits.at(static_cast<int64_t>(d))));
        out.draft_logits.push_back(std::move(row));
      }
      ops::TensorView entry = memory_.tables.drafts.at(runs[r].slot);
      entry.offset_bytes += out.drafts.size() * sizeof(int32_t);
      entry.shape = Shape{1};
      upload(std::vector<int32_t>{ids[d]}, entry);
      out.drafts.push_back(ids[d]);
      if (remaining[r] == 1) continue;
      const int32_t row = logit_rows[d], target = static_cast<int32_t>(next_tokens.size());
      next_tokens.push_back(ids[d]);
      next_indices.push_back(indices[static_cast<size_t>(row)] + 1);
      next_positions.insert(next_positions.end(), 3, positions[static_cast<size_t>(row) * 3] + 1);
      next_runs.push_back({.slot = runs[r].slot, .first_row = target, .num_rows = 1, .kind = RowKind::kDecode, .committed = true});
      next_owners.push_back(owner);
      next_remaining.push_back(remaining[r] - 1);
      if (row != target) moves.push_back({hidden.at(row), hidden.at(target)});  // target <= row, in ascending order: no source is overwritten early
    }
    if (next_tokens.empty()) return stream_->finish();
    model_.state_copy.kernel->enqueue(moves, go);
    tokens = std::move(next_tokens);
    indices = std::move(next_indices);
    positions = std::move(next_positions);
    runs = std::move(next_runs);
    owners = std::move(next_owners);
    remaining = std::move(next_remaining);
  }
}

Result<ModelRunner::StateDump> ModelRunner::dump_state(int32_t slot, int32_t gdn_layer) {
  const ops::GdnStateView& g = memory_.gdn[static_cast<size_t>(gdn_layer)];
  const model::ModelConfig& c = plan_.config;
  const int64_t nk = c.linear_num_key_heads, nv = c.linear_num_value_heads, dk = c.linear_key_head_dim, dv = c.linear_value_head_dim;
  StateDump dump;
  ASSIGN_OR_RETURN(dump.state, download<float>(g.state.at(slot)));
  ASSIGN_OR_RETURN(const auto boundary_value, download<int32_t>(memory_.tables.boundary.at(slot)));
  const auto widen = [&](const ops::TensorView& view) -> Result<std::vector<float>> {
    if (view.dtype == DType::kF32) return download<float>(view);
    ASSIGN_OR_RETURN(const auto stored, download<bf16>(view));
    std::vector<float> wide(stored.size());
    std::transform(stored.begin(), stored.end(), wide.begin(), [](bf16 v) { return to_f32(v); });
    return wide;
  };
  ASSIGN_OR_RETURN(const auto k, widen(g.ring_k.at(slot)));
  ASSIGN_OR_RETURN(const auto u, widen(g.ring_u.at(slot)));
  ASSIGN_OR_RETURN(const auto gates, download<float>(g.ring_g.at(slot)));
  const int64_t ring = g.ring_k.shape[1];
  const int32_t begin = boundary_value[0], end = cursor_[static_cast<size_t>(slot)];
  CHECK(end - begin <= ops::kGrid);
  for (int64_t h = 0; h < nv && end > begin; ++h) {
    const float total = gates[static_cast<size_t>((end - 1) % ring * nv + h)];
    for (int64_t i = 0; i < dv * dk; ++i) dump.state[static_cast<size_t>(h * dv * dk + i)] *= std::exp(total);
    for (int32_t p = begin; p < end; ++p) {
      const float decay = std::exp(total - gates[static_cast<size_t>(p % ring * nv + h)]);
      const float* kp = k.data() + (p % ring * nk + h / (nv / nk)) * dk;
      const float* up = u.data() + (p % ring * nv + h) * dv;
      for (int64_t v = 0; v < dv; ++v)
        for (int64_t i = 0; i < dk; ++i) dump.state[static_cast<size_t>((h * dv + v) * dk + i)] += decay * up[v] * kp[i];
    }
  }
  ASSIGN_OR_RETURN(const auto window, widen(g.conv_window.at(slot)));
  const int64_t columns = g.conv_window.shape[1], channels = g.conv_window.shape[2];
  for (int32_t p = end - 3; p < end; ++p)
    for (int64_t i = 0; i < channels; ++i) dump.columns.push_back(p < 0 ? 0.0f : window[static_cast<size_t>(p % columns * channels + i)]);
  return dump;
}

}  // namespace quern::worker
