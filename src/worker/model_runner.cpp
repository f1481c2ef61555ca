#include "worker/model_runner.h"

#include <algorithm>
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

/// See ops::SampleRun::verify.
int32_t verify_field(const StepRun& run) {
  if (!run.verify()) return 0;
  return run.synthetic_acceptance < 0 ? 1 : ops::kSyntheticAcceptance + run.synthetic_acceptance;
}

/// Rows of the run whose logits go to the host.
std::vector<int32_t> exported_rows(const StepRun& run) {
  if (run.want == Want::kLogits) return run.logit_rows;
  if (run.want != Want::kPromptLogprobs) return {};
  const bool last_has_follower = run.following_token >= 0;
  std::vector<int32_t> rows(static_cast<size_t>(run.num_rows - (last_has_follower ? 0 : 1)));
  std::iota(rows.begin(), rows.end(), 0);
  return rows;
}
bool exports(const StepRun& run) { return run.want == Want::kLogits || run.want == Want::kPromptLogprobs; }

int32_t draft_depth(const StepRun& run) { return run.fill_mtp && run.propose == DraftMethod::kMtp ? run.propose_depth : 0; }

/// Rows of each run where the step is laid out for replay: decode and verify rows alone, none of which the host looks at. 0: it is not.
int32_t rows_for_replay(const StepPlan& plan, int32_t k_max) {
  int32_t longest = 0;
  for (const StepRun& run : plan.runs) {
    if (run.kind != RowKind::kDecode || run.num_rows > k_max + 1 || exports(run)) return 0;
    longest = std::max(longest, run.num_rows);
  }
  return longest;
}
/// A few numbers of runs serve all, so that few graphs are made.
int32_t runs_for_replay(int32_t num_runs) {
  if (num_runs <= 2) return num_runs;
  return static_cast<int32_t>(round_up(num_runs, num_runs <= 4 ? 4 : num_runs <= 64 ? 8 : 16));
}

ops::SampleOutput part(const ops::SampleOutput& out, int64_t first, int64_t count) {
  return {out.tokens.part(first, count),   out.num_tokens.part(first, count),  out.non_finite.part(first, count),
          out.logprobs.part(first, count), out.logprob_ids.part(first, count), out.chosen_rank.part(first, count)};
}

/// The entries of a table in the host's image of the inputs or results.
template <class T>
std::span<T> entries(const ops::Buffer& image, const StepLayout::Table& table) {
  static_assert(sizeof(T) % sizeof(int32_t) == 0);
  auto* first = reinterpret_cast<T*>(image.address() + static_cast<size_t>(table.offset) * sizeof(int32_t));
  return {first, static_cast<size_t>(table.capacity * table.width) * sizeof(int32_t) / sizeof(T)};
}

}  // namespace

Result<std::unique_ptr<ModelRunner>> ModelRunner::create(const ExecutionPlan& plan, size_t rank_number, weights::WeightSource& source, const Setup& setup) {
  std::unique_ptr<ModelRunner> runner(new ModelRunner(plan, rank_number, setup.links));
  const RankPlan& rank = runner->rank_;
  CHECK(plan.options.max_recorded_steps > static_cast<int32_t>(kMaxInFlight));
  CHECK((setup.links.stage != nullptr) == (rank.shard.tp_size > 1));
  CHECK((setup.links.pipeline != nullptr) + (setup.links.processes != nullptr) == (rank.shard.pp_size > 1 ? 1 : 0));
  for (const RankPlan& other : plan.ranks)
    if (other.shard.pp_rank == rank.shard.pp_rank) runner->vocab_shares_.push_back(other.shard.vocab.size());
  static constexpr std::atomic<bool> kGoOn{false};
  ops::Device& device = setup.device;
  ASSIGN_OR_RETURN(runner->stream_, device.make_stream());
  if (plan.options.wrap_stream) runner->stream_ = plan.options.wrap_stream(std::move(runner->stream_));
  runner->kernels_ = std::make_unique<KernelCache>(setup.table, device, setup.rules);
  ASSIGN_OR_RETURN(runner->model_, load_model(plan, rank, source, *runner->kernels_, device, *runner->stream_, setup.progress, setup.stop_loading != nullptr ? *setup.stop_loading : kGoOn));
  ASSIGN_OR_RETURN(RankMemory memory, RankMemory::allocate(plan, rank, *runner->kernels_, device, *runner->stream_));
  runner->memory_ = std::move(memory.sequences);
  runner->host_ = std::move(memory.host);
  runner->step_ = std::move(memory.step);
  runner->staging_ = std::move(memory.staging);
  if (setup.links.processes != nullptr)
    for (size_t i = 0; i < kMaxInFlight; ++i)
      for (const auto& [wanted, rows] : {std::pair{!rank.shard.first_stage(), &runner->arriving_[i]}, {!rank.shard.last_stage(), &runner->leaving_[i]}}) {
        if (!wanted) continue;
        ASSIGN_OR_RETURN(std::unique_ptr<ops::Buffer> host, device.allocate_host(StageRows::room_for(runner->step_.x.size_bytes()), "rows between processes"));
        *rows = StageRows(std::move(host));
      }
  runner->num_logprobs_.assign(static_cast<size_t>(plan.limits.num_slots), -1);
  runner->candidates_needed_.assign(static_cast<size_t>(plan.limits.num_slots), {1, 1});
  runner->candidate_shares_.resize(runner->vocab_shares_.size());
  return runner;
}

std::byte* ModelRunner::staged(size_t size_bytes) {
  StepStaging& staging = staging_[current_->staging];
  if (staging.used + size_bytes <= StepStaging::kUploadBytes) {
    std::byte* memory = staging.uploads->address() + staging.used;
    staging.used += round_up(static_cast<int64_t>(size_bytes), 64);
    return memory;
  }
  return current_->uploads.emplace_back(std::make_unique<std::vector<std::byte>>(size_bytes))->data();
}

template <class T>
void ModelRunner::upload(std::span<const T> values, const ops::TensorView& destination) {
  CHECK(values.size_bytes() == destination.size_bytes());
  std::byte* memory = staged(values.size_bytes());
  std::memcpy(memory, values.data(), values.size_bytes());
  stream_->copy_to_device(memory, destination);
}

template <class T>
Result<std::vector<T>> ModelRunner::download(const ops::TensorView& source) {
  std::vector<T> values(source.size_bytes() / sizeof(T));
  stream_->copy_to_host(source, values.data());
  RETURN_IF_ERROR(stream_->finish());
  return values;
}

void ModelRunner::abort(const Error& error) {
  for (ops::Collective* link : {links_.stage, links_.pipeline})
    if (link != nullptr) link->abort(error);
  if (links_.processes != nullptr) links_.processes->abort(error);
}

ModelRunner::InFlight ModelRunner::submit(const StepPlan& plan, const std::function<StepMasks()>& masks, const SlotValues* slots) {
  InFlight step;
  step.begin = std::chrono::steady_clock::now();
  step.staging = num_submitted_++ % kMaxInFlight;
  step.result.step = plan.step;
  step.result.runs.resize(plan.runs.size());
  current_ = &step;
  staging_[step.staging].used = 0;

  apply_state_ops(plan);
  apply_slot_updates(plan);
  apply_block_tables(plan);
  if (slots != nullptr) apply_slot_values(*slots);
  apply_drafts(plan);
  for (size_t i = 0; i < plan.runs.size(); ++i) {
    const StepRun& run = plan.runs[i];
    step.result.runs[i].slot = run.slot;
    step.result.computed_rows += run.num_rows;
    step.runs.push_back({.samples = samples(run),
                         .verify = run.verify(),
                         .num_rows = run.num_rows,
                         .num_logprobs = samples(run) ? num_logprobs_[static_cast<size_t>(run.slot)] : -1,
                         .num_drafts = model_.mtp ? draft_depth(run) : 0,
                         .following_token = run.following_token});
  }
  if (!plan.runs.empty()) {
    make_rows(plan);
    write_inputs(plan);
    if (const Result<void> done = compute(plan, masks); !done) step.result.error = done.error();
  }
  if (!plan.runs.empty() && reports()) {
    const StepStaging& staging = staging_[step.staging];
    stream_->copy_to_host(step_.results, staging.results->address());
    if (std::any_of(step.runs.begin(), step.runs.end(), [](const InFlight::Run& run) { return run.num_logprobs >= 0; })) {
      const ops::SampleOutput out = part(step_.sampled, 0, num_runs());
      std::byte* to = staging.logprobs->address();
      for (const ops::TensorView& view : {out.logprobs, out.logprob_ids, out.chosen_rank}) {
        stream_->copy_to_host(view, to);
        to += view.size_bytes();
      }
    }
  }
  step.mark = stream_->mark();
  current_ = nullptr;
  return step;
}

StepResult ModelRunner::collect(InFlight step) {
  const Result<void> done = stream_->wait(step.mark);
  StepResult result = std::move(step.result);
  if (!done && !result.error) result.error = done.error();
  if (!result.error && step.row_bytes > 0)
    if (const Result<void> sent = links_.processes->send(result.step, leaving_[step.staging], step.row_bytes); !sent) result.error = sent.error();
  const auto now = std::chrono::steady_clock::now();
  result.device_seconds = std::chrono::duration<double>(now - std::max(step.begin, last_done_)).count();
  last_done_ = now;
  if (result.error || !reports()) return result;

  const StepStaging& staging = staging_[step.staging];
  const auto per_run = static_cast<size_t>(plan_.limits.k_max + 1), width = static_cast<size_t>(1 + ops::kMaxLogprobs);
  const auto tokens = entries<const int32_t>(*staging.results, layout_.tokens), num_tokens = entries<const int32_t>(*staging.results, layout_.num_tokens),
             non_finite = entries<const int32_t>(*staging.results, layout_.non_finite), drafts = entries<const int32_t>(*staging.results, layout_.drafts);
  const size_t num_entries = step.runs.size() * per_run;
  const auto* logprobs = reinterpret_cast<const float*>(staging.logprobs->address());
  const auto* logprob_ids = reinterpret_cast<const int32_t*>(logprobs + num_entries * width);
  const int32_t* ranks = logprob_ids + num_entries * width;
  for (size_t i = 0; i < step.runs.size(); ++i) {
    const InFlight::Run& run = step.runs[i];
    RunResult& out = result.runs[i];
    if (run.samples) {
      out.non_finite = out.non_finite || non_finite[i] != 0;
      out.num_draft_rows = run.verify ? run.num_rows - 1 : 0;
      const std::span<const int32_t> drawn = tokens.subspan(i * per_run, static_cast<size_t>(num_tokens[i]));
      out.tokens.assign(drawn.begin(), drawn.end());
      for (size_t t = 0; run.num_logprobs >= 0 && t < drawn.size(); ++t) {
        const size_t at = (i * per_run + t) * width;
        TokenLogprobs l;
        l.chosen = logprobs[at];
        l.chosen_rank = ranks[i * per_run + t];
        for (size_t k = 1; k <= static_cast<size_t>(run.num_logprobs); ++k) l.top.emplace_back(logprob_ids[at + k], logprobs[at + k]);
        out.logprobs.push_back(std::move(l));
      }
    }
    // A draft continues the committed rows whose following token is known.
    const int32_t num_committed = run.verify ? static_cast<int32_t>(out.tokens.size()) : run.num_rows;
    const int32_t num_pairs = num_committed - (out.tokens.empty() && run.following_token < 0 ? 1 : 0);
    if (run.num_drafts > 0 && num_pairs > 0 && !out.non_finite) {
      const auto proposed = drafts.subspan(i * static_cast<size_t>(plan_.limits.k_max), static_cast<size_t>(run.num_drafts));
      out.drafts.assign(proposed.begin(), proposed.end());
    }
  }
  return result;
}

void ModelRunner::apply_state_ops(const StepPlan& plan) {
  for (const StateOp& op : plan.state_ops) {
    std::vector<ops::StateCopy::Copy> copies;
    switch (op.kind) {
      case StateOp::Kind::kClear: memory_.clear(op.slot, copies); break;
      case StateOp::Kind::kSnapshot: memory_.snapshot(op.slot, op.snapshot, copies); break;
      case StateOp::Kind::kRestore: memory_.restore(op.slot, op.snapshot, op.boundary, copies); break;
      case StateOp::Kind::kRewind: memory_.rewind(op.slot, op.boundary, copies); break;
      case StateOp::Kind::kBlockToHost:
      case StateOp::Kind::kBlockFromHost:
      case StateOp::Kind::kSnapshotToHost:
      case StateOp::Kind::kSnapshotFromHost: host_.apply(op, memory_, *stream_); continue;
    }
    ops::Launch l = launch();
    model_.state_copy.kernel->enqueue(copies, l);
    if (op.kind == StateOp::Kind::kRestore || op.kind == StateOp::Kind::kRewind)
      for (const ops::TensorView& table : {memory_.tables.cursor, memory_.tables.boundary}) upload(std::span<const int32_t>(&op.boundary, 1), table.at(op.slot));
  }
}

void ModelRunner::apply_slot_updates(const StepPlan& plan) {
  for (const SlotUpdate& update : plan.slot_updates) {
    num_logprobs_[static_cast<size_t>(update.slot)] = update.sampling.num_logprobs;
    for (const bool synthetic : {false, true})
      candidates_needed_[static_cast<size_t>(update.slot)][synthetic ? 1 : 0] = ops::candidates_needed(update.sampling, plan_.config.vocab_size, synthetic);
    upload(std::span<const int32_t>(&update.position_delta, 1), memory_.tables.position_delta.at(update.slot));
    if (!rank_.shard.last_stage()) continue;
    ops::SlotSampling params = ops::to_slot_sampling(update.sampling);
    params.num_generated = static_cast<int32_t>(update.output_ids.size());
    upload(std::span<const ops::SlotSampling>(&params, 1), memory_.sampler.params.at(update.slot));
    if (!update.sampling.has_penalties()) continue;
    const auto vocab = static_cast<size_t>(plan_.config.vocab_size);
    std::vector<int32_t> counts(vocab, 0);
    for (const int32_t id : update.output_ids) ++counts[static_cast<size_t>(id)];
    std::vector<uint8_t> in_prompt(vocab, 0);
    for (const int32_t id : update.prompt_ids) in_prompt[static_cast<size_t>(id)] = 1;
    upload(std::span<const int32_t>(counts), memory_.sampler.counts.at(update.slot));
    upload(std::span<const uint8_t>(in_prompt), memory_.sampler.in_prompt.at(update.slot));
  }
}

void ModelRunner::apply_block_tables(const StepPlan& plan) {
  for (const BlockTableUpdate& update : plan.block_table_updates) {
    const ops::TensorView table = memory_.tables.block_tables.at(update.slot);
    CHECK(update.first_block + std::ssize(update.blocks) <= table.shape[0]);
    upload(std::span<const int32_t>(update.blocks), table.part(update.first_block, std::ssize(update.blocks)));
  }
  if (!model_.mtp) return;
  // The MTP layer's entry at the boundary pairs the last restored row with a token that was not known then: it stays empty.
  std::vector<ops::StateCopy::Copy> copies;
  for (const StateOp& op : plan.state_ops) {
    if (op.kind != StateOp::Kind::kRestore) continue;
    const auto block = static_cast<int32_t>(op.boundary / ops::kGrid);
    for (const BlockTableUpdate& update : plan.block_table_updates)
      if (update.slot == op.slot && update.first_block <= block && block < update.first_block + std::ssize(update.blocks))
        memory_.clear_mtp_row(update.blocks[static_cast<size_t>(block - update.first_block)], copies);
  }
  ops::Launch l = launch();
  if (!copies.empty()) model_.state_copy.kernel->enqueue(copies, l);
}

/// Drafts that the host has made, to where those of the MTP head would be.
void ModelRunner::apply_drafts(const StepPlan& plan) {
  for (const StepRun& run : plan.runs) {
    if (run.drafts.empty()) continue;
    CHECK(run.verify() && std::ssize(run.drafts) == run.num_rows - 1);
    upload(std::span<const int32_t>(run.drafts), memory_.tables.drafts.at(run.slot).part(0, std::ssize(run.drafts)));
  }
}

/// The values that sampling has changed, from the device that samples.
void ModelRunner::apply_slot_values(const SlotValues& slots) {
  const ops::SlotTables& tables = memory_.tables;
  for (const auto& [values, table] :
       {std::pair{&slots.cursor, tables.cursor}, {&slots.boundary, tables.boundary}, {&slots.last_token, tables.last_token}, {&slots.drafts, tables.drafts}})
    upload(std::span<const int32_t>(*values), table);
}

/// The rows of the runs, one after the other, and who samples from which rows of logits.
void ModelRunner::make_rows(const StepPlan& plan) {
  runs_.clear();
  draft_runs_.clear();
  sample_runs_.clear();
  logit_rows_.clear();
  groups_.assign(1, {});
  rows_per_run_ = stream_->can_record() && ranges_ == nullptr ? rows_for_replay(plan, plan_.limits.k_max) : 0;
  const int32_t num_runs = rows_per_run_ > 0 ? std::min(runs_for_replay(static_cast<int32_t>(plan.runs.size())), plan_.limits.num_slots)
                                             : static_cast<int32_t>(plan.runs.size());
  int32_t num_rows = 0, num_mask_rows = 0;
  for (int32_t number = 0; number < num_runs; ++number) {
    if (static_cast<size_t>(number) >= plan.runs.size()) {
      add_padding(number, num_rows);
      num_rows += rows_per_run_;
      continue;
    }
    const StepRun& run = plan.runs[static_cast<size_t>(number)];
    CHECK(run.num_rows > 0 && (run.tokens.empty() || static_cast<int32_t>(run.tokens.size()) == run.num_rows));
    CHECK(run.num_rows <= plan_.options.k_max + 1 || !run.tokens.empty());
    runs_.push_back({.slot = run.slot, .first_row = num_rows, .num_rows = run.num_rows, .kind = run.kind, .committed = !run.verify()});
    draft_runs_.push_back({.slot = run.slot, .first_row = number, .num_rows = 1, .kind = RowKind::kDecode, .committed = true});
    const int32_t count = sampled_rows(run), places = rows_per_run_ > 0 ? rows_per_run_ : count;
    if (groups_.back().num_logits + places > plan_.max_logit_rows) {
      groups_.push_back({.first = number, .first_logits = std::ssize(logit_rows_)});
      num_mask_rows = 0;
    }
    SampleGroup& group = groups_.back();
    ops::SampleRun entry{.slot = run.slot, .num_rows = run.num_rows, .verify = verify_field(run)};
    if (count > 0) {
      entry.first_logits_row = static_cast<int32_t>(group.num_logits);
      for (int32_t i = run.num_rows - count; i < run.num_rows; ++i) logit_rows_.push_back(num_rows + i);
      if (run.mask_pending) {
        entry.first_mask_row = num_mask_rows;
        num_mask_rows += count;
      }
    }
    logit_rows_.insert(logit_rows_.end(), static_cast<size_t>(places - count), -1);
    group.num_logits += places;
    ++group.count;
    sample_runs_.push_back(entry);
    num_rows += rows_per_run_ > 0 ? rows_per_run_ : run.num_rows;
  }
  CHECK(num_rows <= plan_.limits.max_rows);
  rows_.num_rows = num_rows;
  rows_.runs = runs_;
  rows_.run_table = StepMemory::table(step_.inputs, layout_.runs, num_runs);
  rows_.run_positions = StepMemory::table(step_.inputs, layout_.run_positions, num_runs);
  rows_.row_runs = StepMemory::table(step_.inputs, layout_.row_runs, num_rows);
  rows_.given_tokens = StepMemory::table(step_.inputs, layout_.given_tokens, num_rows);
  rows_.tokens = step_.tokens.first(num_rows);
  rows_.indices = step_.indices.first(num_rows);
  rows_.positions = step_.positions.first(num_rows);
  rows_.slots = memory_.tables;
  num_candidates_ = candidates_needed(plan);
  if (shares_layers() && num_candidates_ == 0)
    current_->result.gathered_rows = std::count_if(logit_rows_.begin(), logit_rows_.end(), [](int32_t row) { return row >= 0; });
  draft_depth_ = 0;
  for (const InFlight::Run& run : current_->runs) draft_depth_ = std::max(draft_depth_, run.num_drafts);
  fills_mtp_ = model_.mtp.has_value() && std::any_of(plan.runs.begin(), plan.runs.end(), [](const StepRun& run) { return run.fill_mtp; });
}

int32_t ModelRunner::candidates_needed(const StepPlan& plan) const {
  if (!shares_layers()) return 0;
  int32_t most = 1;
  for (const StepRun& run : plan.runs) {
    if (!samples(run)) continue;
    const int32_t needed = candidates_needed_[static_cast<size_t>(run.slot)][run.verify() && run.synthetic_acceptance >= 0 ? 1 : 0];
    if (needed == 0) return 0;
    most = std::max(most, needed);
  }
  return most;
}

/// An entry of no sequence, which makes the number of runs one of few.
void ModelRunner::add_padding(int32_t number, int32_t first_row) {
  if (groups_.back().num_logits + rows_per_run_ > plan_.max_logit_rows) groups_.push_back({.first = number, .first_logits = std::ssize(logit_rows_)});
  runs_.push_back({.slot = -1, .first_row = first_row, .num_rows = 0, .kind = RowKind::kDecode, .committed = true});
  draft_runs_.push_back({.slot = -1, .first_row = number, .num_rows = 0, .kind = RowKind::kDecode, .committed = true});
  sample_runs_.push_back({});
  logit_rows_.insert(logit_rows_.end(), static_cast<size_t>(rows_per_run_), -1);
  groups_.back().num_logits += rows_per_run_;
  ++groups_.back().count;
}

/// All tables of the step, in one copy.
void ModelRunner::write_inputs(const StepPlan& plan) {
  const ops::Buffer& image = *staging_[current_->staging].inputs;
  const auto num_rows = static_cast<size_t>(rows_.num_rows);
  ops::fill_run_tables(runs_, entries<ops::RunEntry>(image, layout_.runs), entries<int32_t>(image, layout_.row_runs).first(num_rows));
  ops::fill_run_tables(draft_runs_, entries<ops::RunEntry>(image, layout_.draft_table), entries<int32_t>(image, layout_.draft_row_runs).first(runs_.size()));
  std::copy(sample_runs_.begin(), sample_runs_.end(), entries<ops::SampleRun>(image, layout_.sample_runs).begin());
  std::copy(logit_rows_.begin(), logit_rows_.end(), entries<int32_t>(image, layout_.logit_rows).begin());
  const auto given = entries<int32_t>(image, layout_.given_tokens).first(num_rows);
  std::fill(given.begin(), given.end(), -1);
  const auto draft_runs = entries<ops::DraftRun>(image, layout_.draft_runs);
  std::fill(draft_runs.begin(), draft_runs.end(), ops::DraftRun{});
  for (size_t i = 0; i < plan.runs.size(); ++i) {
    const StepRun& run = plan.runs[i];
    std::copy(run.tokens.begin(), run.tokens.end(), given.begin() + runs_[i].first_row);
    std::copy(run.position.begin(), run.position.end(), entries<int32_t>(image, layout_.run_positions).begin() + static_cast<int64_t>(3 * i));
    draft_runs[i] = {
        .slot = run.slot, .fill = run.fill_mtp ? 1 : 0, .following_token = run.following_token, .depth = current_->runs[i].num_drafts};
  }
  stream_->copy_to_device(image.address(), step_.inputs);
}

/// What passes between processes is not recorded: the host receives it before the step's launches, and sends it (collect) when the device has computed it.
Result<void> ModelRunner::compute(const StepPlan& plan, const std::function<StepMasks()>& masks) {
  if (links_.processes == nullptr) return replay_or_enqueue(plan, masks);
  const StageRows &arriving = arriving_[current_->staging], &leaving = leaving_[current_->staging];
  const ops::TensorView x = step_.x.first(rows_.num_rows);
  if (!rank_.shard.first_stage()) {
    ops::Launch go = launch();
    model_.embed.kernel->enqueue(rows_, *model_.embed.packed, x, go);  // for what it says of the rows
    RETURN_IF_ERROR(links_.processes->receive(plan.step, arriving, x.size_bytes()));
    stream_->copy_to_device(arriving.rows(), x);
  }
  RETURN_IF_ERROR(replay_or_enqueue(plan, masks));
  if (!rank_.shard.last_stage()) {
    stream_->copy_to_host(x, leaving.rows());
    current_->row_bytes = x.size_bytes();
  }
  return {};
}

Result<void> ModelRunner::replay_or_enqueue(const StepPlan& plan, const std::function<StepMasks()>& masks) {
  const bool masked = std::any_of(plan.runs.begin(), plan.runs.end(), [](const StepRun& run) { return run.mask_pending; });
  if (rows_per_run_ == 0 || masked || plan_.options.enforce_eager) return enqueue_step(plan, masks);
  const GraphKey key{.num_runs = static_cast<int32_t>(num_runs()), .rows_per_run = rows_per_run_, .num_passes = fills_mtp_ ? 1 + draft_depth_ : 0, .num_candidates = num_candidates_};
  std::unique_ptr<ops::Graph>& graph = recorded(key);
  if (graph == nullptr) {
    stream_->begin_recording();
    const Result<void> recorded = enqueue_step(plan, masks);
    ASSIGN_OR_RETURN(graph, stream_->end_recording());
    RETURN_IF_ERROR(recorded);
    if (graph == nullptr) return {};
  }
  stream_->replay(*graph);
  return {};
}

std::unique_ptr<ops::Graph>& ModelRunner::recorded(const GraphKey& key) {
  RecordedStep& step = recorded_[key];
  step.last_used = num_submitted_;
  if (std::ssize(recorded_) > plan_.options.max_recorded_steps) {  // of more than may be in flight, the oldest is in none
    const auto oldest = std::min_element(recorded_.begin(), recorded_.end(), [](const auto& a, const auto& b) { return a.second.last_used < b.second.last_used; });
    recorded_.erase(oldest);
  }
  return step.graph;
}

void ModelRunner::add_up(const ops::TensorView& x) {
  if (!shares_layers()) return;
  ops::Launch go = launch();
  links_.stage->add_partials(*model_.combine.kernel, target(x), x, go);
}

void ModelRunner::embed(const ops::Rows& rows, const ops::TensorView* tokens, const ops::TensorView& x) {
  ops::Launch go = launch();
  const ops::TensorView own = target(x);  // with several ranks one has the row, the others zeros
  if (tokens == nullptr) model_.embed.kernel->enqueue(rows, *model_.embed.packed, own, go);
  else model_.embed.kernel->enqueue_lookup(*tokens, *model_.embed.packed, own, go);
  if (!shares_layers()) return;
  stream_->fill_zero(x);
  add_up(x);
}

Result<void> ModelRunner::enqueue_step(const StepPlan& plan, const std::function<StepMasks()>& masks) {
  ops::Launch go = launch();
  const ops::TensorView x = step_.x.first(rows_.num_rows);
  const Shard& shard = rank_.shard;
  if (shard.first_stage()) {
    embed(rows_, nullptr, x);
  } else if (links_.pipeline != nullptr) {
    model_.embed.kernel->enqueue(rows_, *model_.embed.packed, x, go);  // for what it says of the rows
    links_.pipeline->receive(x, shard.pp_rank - 1, go);
  }
  size_t gdn_index = 0, kv_index = 0;
  for (const LoadedLayer& l : model_.layers) {
    layer(l, rows_, x, gdn_index, kv_index, 0, ranges_, gdn_index + kv_index);
    ++(l.gdn ? gdn_index : kv_index);
  }
  if (!shard.last_stage()) {
    if (links_.pipeline != nullptr) links_.pipeline->send(x, shard.pp_rank + 1, go);
    return {};
  }
  if (std::any_of(plan.runs.begin(), plan.runs.end(), exports)) RETURN_IF_ERROR(export_logits(plan));
  sample(plan, masks);
  return draft(plan);
}

void ModelRunner::layer(const LoadedLayer& l, const ops::Rows& rows, const ops::TensorView& x, size_t gdn_index, size_t kv_index, int32_t first_index,
                        ActivationRanges* ranges, size_t index) {
  ops::Launch go = launch(), mixer = go;
  mixer.next_weights = l.out.packed.get();
  const int64_t n = rows.num_rows;
  if (ranges != nullptr) ranges->see_mixer_in(index, x, *stream_);
  const ops::Activation out = l.attention ? step_.attention_out(n) : step_.gdn_out(n);
  if (l.attention) {
    const ops::TensorView query = step_.query(n), gate = step_.gate(n);
    l.attention->in.kernel->enqueue(rows, x, *l.attention->in.packed, query, gate, memory_.kv[kv_index], go);
    l.attention->attention.kernel->enqueue(rows, query, gate, memory_.kv[kv_index], first_index, out, mixer);
    if (ranges != nullptr) ranges->see_kv(index, memory_.kv[kv_index], *stream_);
  } else {
    const ops::GdnInputs inputs = step_.gdn_inputs(n);
    l.gdn->in.kernel->enqueue(rows, x, *l.gdn->in.packed, inputs, go);
    l.gdn->mix.kernel->enqueue(rows, inputs, *l.gdn->mix.packed, memory_.gdn[gdn_index], out, mixer);
  }
  if (ranges != nullptr) ranges->see_mixer_out(index, out.data, *stream_);
  l.out.kernel->enqueue(rows, out, *l.out.packed, target(x), go);
  add_up(x);
  const ops::Activation mlp = step_.mlp(n);
  if (ranges != nullptr) ranges->see_mlp_in(index, x, *stream_);
  l.mlp_in.kernel->enqueue(rows, x, *l.mlp_in.packed, mlp, go);
  if (ranges != nullptr) ranges->see_mlp_mid(index, mlp.data, *stream_);
  l.mlp_down.kernel->enqueue(rows, mlp, *l.mlp_down.packed, target(x), go);
  add_up(x);
}

ops::TensorView ModelRunner::head(const ops::Rows& rows, const ops::TensorView& x, const ops::TensorView& norm, const ops::TensorView& logit_rows, const ops::TensorView& hidden,
                                  bool for_drafts) {
  ops::Launch go = launch();
  const ops::TensorView own = (shares_layers() ? step_.own_logits : step_.logits).first(logit_rows.shape[0]);
  if (for_drafts && model_.draft_head.kernel != nullptr)
    model_.draft_head.kernel->enqueue(rows, x, norm, logit_rows, *model_.draft_head.packed, hidden, own, go);
  else
    model_.head.kernel->enqueue(rows, x, norm, logit_rows, model_.head_weights(), hidden, own, go);
  return own;
}

ops::TensorView ModelRunner::whole(const ops::TensorView& own_logits) {
  if (!shares_layers()) return own_logits;
  ops::Launch go = launch();
  const ops::TensorView logits = step_.logits.first(own_logits.shape[0]);
  links_.stage->all_gather(own_logits, logits, vocab_shares_, go);
  return logits;
}

ops::TensorView ModelRunner::gather_candidates(const ops::TensorView& own) {
  ops::Launch go = launch();
  const int64_t words = own.shape[1];
  std::fill(candidate_shares_.begin(), candidate_shares_.end(), words);
  const ops::TensorView all{step_.candidates.buffer, step_.candidates.offset_bytes, DType::kI32, {own.shape[0], words * std::ssize(candidate_shares_)}};
  links_.stage->all_gather(own, all, candidate_shares_, go);
  return all;
}

/// Logits that the host wants to see, at most max_logit_rows at a time.
Result<void> ModelRunner::export_logits(const StepPlan& plan) {
  struct Wanted {
    size_t run;
    int32_t row;  // of the run
  };
  std::vector<Wanted> wanted;
  for (size_t i = 0; i < plan.runs.size(); ++i)
    for (const int32_t row : exported_rows(plan.runs[i])) wanted.push_back({i, row});
  const auto group_size = static_cast<size_t>(plan_.max_logit_rows);
  for (size_t first = 0; first < wanted.size(); first += group_size) {
    const size_t count = std::min(group_size, wanted.size() - first);
    std::vector<int32_t> rows;
    for (size_t i = 0; i < count; ++i) rows.push_back(runs_[wanted[first + i].run].first_row + wanted[first + i].row);
    const ops::TensorView row_view = step_.exported_rows.first(static_cast<int64_t>(count));
    upload(std::span<const int32_t>(rows), row_view);
    const ops::TensorView logits = whole(head(rows_, step_.x.first(rows_.num_rows), model_.norm_view, row_view, step_.hidden.first(rows_.num_rows)));
    if (!reports()) continue;
    ASSIGN_OR_RETURN(const std::vector<float> values, download<float>(logits));
    const auto vocab = static_cast<size_t>(plan_.config.vocab_size);
    for (size_t i = 0; i < count; ++i) {
      const std::span<const float> row(values.data() + i * vocab, vocab);
      const StepRun& run = plan.runs[wanted[first + i].run];
      RunResult& out = current_->result.runs[wanted[first + i].run];
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

/// Final norm, logits and sampler, group by group; runs that sample nothing advance as well.
void ModelRunner::sample(const StepPlan& plan, const std::function<StepMasks()>& masks) {
  ops::Launch go = launch();
  const ops::TensorView x = step_.x.first(rows_.num_rows), hidden = step_.hidden.first(rows_.num_rows);
  const bool masked = std::any_of(plan.runs.begin(), plan.runs.end(), [](const StepRun& run) { return run.mask_pending; });
  StepMasks step_masks;
  for (const SampleGroup& group : groups_) {
    const ops::TensorView rows = StepMemory::table(step_.inputs, layout_.logit_rows, std::ssize(logit_rows_)).part(group.first_logits, group.num_logits);
    const ops::TensorView own = head(rows_, x, model_.norm_view, rows, hidden);
    if (group.first == 0) {
      model_.state_copy.kernel->store_hidden(rows_, hidden, memory_.hidden_window, memory_.boundary_hidden, go);
      if (masked) step_masks = masks();
    }
    const ops::TensorView runs = StepMemory::table(step_.inputs, layout_.sample_runs, num_runs()).part(group.first, group.count);
    const ops::SampleOutput out = part(step_.sampled, group.first, group.count);
    const ops::TensorView allowed = upload_masks(group, step_masks);
    if (num_candidates_ == 0) {
      model_.sample.kernel->enqueue(runs, whole(own), allowed, memory_.sampler, memory_.tables, out, go);
      continue;
    }
    const ops::TensorView candidates = step_.own_candidates_of(own.shape[0], ops::candidate_words(num_candidates_));
    model_.sample.kernel->enqueue_candidates(runs, own, first_id(), num_candidates_, allowed, memory_.sampler, memory_.tables, candidates, go);
    model_.sample.kernel->enqueue_drawing(runs, gather_candidates(candidates), num_candidates_, memory_.sampler, memory_.tables, out, go);
  }
}

/// The masks of a group's runs, in the order of first_mask_row; a run without any may draw every token.
ops::TensorView ModelRunner::upload_masks(const SampleGroup& group, const StepMasks& masks) {
  mask_words_.clear();
  const auto row_words = static_cast<size_t>(step_.masks.shape[1]);
  for (int64_t r = group.first; r < group.first + group.count; ++r) {
    const ops::SampleRun& run = sample_runs_[static_cast<size_t>(r)];
    if (run.first_mask_row < 0) continue;
    const size_t num_words = static_cast<size_t>(run.verify != 0 ? run.num_rows : 1) * row_words;
    const auto given = std::find_if(masks.rows.begin(), masks.rows.end(), [&](const auto& entry) { return entry.first == run.slot; });
    CHECK(given == masks.rows.end() || given->second.size() == num_words);
    if (given != masks.rows.end())
      mask_words_.insert(mask_words_.end(), given->second.begin(), given->second.end());
    else
      mask_words_.insert(mask_words_.end(), num_words, ~0u);
  }
  const ops::TensorView view = step_.masks.first(static_cast<int64_t>(mask_words_.size() / row_words));
  if (!mask_words_.empty()) upload(std::span<const uint32_t>(mask_words_), view);
  return view;
}

/// Brings the MTP layer's KV up to date and proposes drafts (ops/draft_rows.h).
Result<void> ModelRunner::draft(const StepPlan& plan) {
  if (!fills_mtp_) return {};
  const LoadedMtp& mtp = *model_.mtp;
  ops::Launch go = launch();
  const ops::TensorView runs = StepMemory::table(step_.inputs, layout_.draft_runs, num_runs());
  const ops::TensorView last_rows = step_.last_rows.first(num_runs()), ids = step_.draft_ids.first(num_runs());
  const auto with_tokens_of = [&](ops::Rows rows, int32_t pass) {
    const StepMemory::DraftPass& own = step_.draft_passes[pass % 2];
    rows.tokens = own.tokens.first(rows.num_rows);
    rows.indices = own.indices.first(rows.num_rows);
    rows.positions = own.positions.first(rows.num_rows);
    return rows;
  };
  ops::Rows rows = with_tokens_of(rows_, 0);
  mtp.rows.kernel->enqueue_first(runs, rows_, part(step_.sampled, 0, num_runs()), rows, last_rows, go);
  // Who looks at a draft's logits wants those of the model.
  const bool shows_logits = std::any_of(plan.runs.begin(), plan.runs.end(), [](const StepRun& run) { return run.want == Want::kLogits; });
  ops::TensorView input = step_.hidden.first(rows.num_rows);
  for (int32_t pass = 0;; ++pass) {
    const ops::TensorView embedding = step_.draft_embedding.first(rows.num_rows), x = step_.x.first(rows.num_rows), hidden = step_.hidden.first(rows.num_rows);
    embed(rows, &rows.tokens, embedding);
    mtp.in.kernel->enqueue(rows, embedding, input, *mtp.in.packed, x, go);
    layer(mtp.layer, rows, x, 0, memory_.kv.size() - 1, 1, nullptr, 0);
    if (pass == draft_depth_) return {};  // depth 0: nothing is proposed
    for (int64_t first = 0; first < num_runs(); first += plan_.max_logit_rows) {
      const int64_t count = std::min<int64_t>(plan_.max_logit_rows, num_runs() - first);
      const ops::TensorView own = head(rows, x, mtp.norm_view, last_rows.part(first, count), hidden, !shows_logits);
      if (shares_layers() && !shows_logits) {
        const ops::TensorView keys = step_.own_candidates_of(count, ops::kKeyWords);
        model_.sample.kernel->enqueue_argmax_candidates(own, first_id(), keys, go);
        model_.sample.kernel->enqueue_argmax_of(gather_candidates(keys), ids.part(first, count), go);
        continue;
      }
      const ops::TensorView logits = whole(own);
      model_.sample.kernel->enqueue_argmax(logits, ids.part(first, count), go);
      for (int64_t r = first; r < std::min(first + count, std::ssize(plan.runs)); ++r) {
        const auto i = static_cast<size_t>(r);
        if (plan.runs[i].want != Want::kLogits || current_->runs[i].num_drafts <= pass || !reports()) continue;
        ASSIGN_OR_RETURN(auto row, download<float>(logits.at(r - first)));
        current_->result.runs[i].draft_logits.push_back(std::move(row));
      }
    }
    ops::Rows next = rows_;
    next.num_rows = static_cast<int32_t>(num_runs());
    next.runs = draft_runs_;
    next.run_table = StepMemory::table(step_.inputs, layout_.draft_table, num_runs());
    next.row_runs = StepMemory::table(step_.inputs, layout_.draft_row_runs, num_runs());
    next = with_tokens_of(next, pass + 1);
    input = step_.draft_hidden.first(num_runs());
    mtp.rows.kernel->enqueue_next(runs, pass, ids, rows, hidden, next, input, last_rows, step_.drafts.first(num_runs()), go);
    if (pass + 1 == draft_depth_) return {};
    rows = next;
  }
}

Result<ModelRunner::StateDump> ModelRunner::dump_state(int32_t slot, int32_t gdn_layer) {
  const ops::GdnStateView& g = memory_.gdn[static_cast<size_t>(gdn_layer)];
  const model::ModelConfig& c = rank_.config;
  const int64_t nk = c.linear_num_key_heads, nv = c.linear_num_value_heads, dk = c.linear_key_head_dim, dv = c.linear_value_head_dim;
  StateDump dump;
  ASSIGN_OR_RETURN(dump.state, download<float>(g.state.at(slot)));
  const auto layer = std::ranges::find_if(model_.layers, [](const LoadedLayer& l) { return l.gdn.has_value(); });
  ops::from_layout(layer->gdn->mix.kernel->state_layout(), dump.state, dv * dk);
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
  ASSIGN_OR_RETURN(const auto cursor, download<int32_t>(memory_.tables.cursor.at(slot)));
  const int32_t begin = boundary_value[0], end = cursor[0];
  CHECK(end - begin <= ops::kGrid);
  for (int64_t h = 0; h < nv && end > begin; ++h) {
    const float total = gates[static_cast<size_t>((end - 1) % ring * nv + h)];
    for (int64_t i = 0; i < dv * dk; ++i) dump.state[static_cast<size_t>(h * dv * dk + i)] *= std::exp(total);
    for (int32_t p = begin; p < end; ++p) {
      const float decay = std::exp(total - gates[static_cast<size_t>(p % ring * nv + h)]);
      const float* kp = k.data() + (p % ring * nk + rank_.shard.k_head[static_cast<size_t>(h)]) * dk;
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
