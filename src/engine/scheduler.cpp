#include "engine/scheduler.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "base/check.h"
#include "engine/ngram.h"

namespace quern::engine {

using worker::RowKind;
using worker::StepRun;
using worker::Want;

namespace {

/// Rows of a step whose log-probabilities prompts may want: the host reads a whole vocabulary of each, and other sequences wait for it.
constexpr int32_t kMostPromptLogprobs = 128;

/// What the device must know of a sequence that takes a slot.
worker::SlotUpdate slot_update(const Sequence& sequence) {
  const GenerationRequest& request = sequence.request;
  worker::SlotUpdate update{.slot = sequence.slot->index(), .sampling = request.sampling, .output_ids = sequence.generated};
  if (request.sampling.has_penalties()) update.prompt_ids = request.prompt;
  return update;
}

/// The token after the run's last row is drawn, of a verify one after every row.
void sample(StepRun& run, PlannedRun& planned) {
  run.want = Want::kSample;
  planned.samples = true;
  run.mask_pending = planned.mask_pending = planned.sequence->request.constraint != nullptr;
  planned.sequence->planned_tokens += run.verify() ? run.num_rows : 1;
}

/// Of `num` things over `num_shares`.
int32_t even_share(int32_t num, int32_t num_shares) { return (num + num_shares - 1) / num_shares; }

/// Rows whose tokens the host gives and that are in no step yet.
int64_t given_rows_left(const Sequence& sequence) { return std::max(sequence.num_given() - sequence.planned_rows, 0); }

template <class T>
void append(std::vector<T>& to, std::vector<T>& from) {
  to.insert(to.end(), std::make_move_iterator(from.begin()), std::make_move_iterator(from.end()));
}

}  // namespace

/// A step in the making.
struct Scheduler::Draft {
  PlannedStep step;  // P runs
  std::vector<StepRun> decode_runs;
  std::vector<PlannedRun> decode_owners;
  int32_t rows_left = 0, prompt_logprobs_left = kMostPromptLogprobs;
  int32_t num_places = 1;          // steps that can be planned now, this one included
  int32_t depth = 0;               // drafts to be made for the next step
  int32_t num_blocks_claimed = 0;  // of those that will come back, by decodes that wait for them
  bool stalled = false;            // a decode waits for a block
};

Scheduler::Scheduler(const worker::WorkerLimits& limits, const Budget& budget, const PrefixCacheOptions& prefix_cache,
                     const SpeculationOptions& speculation)
    : limits_(limits),
      budget_(budget),
      blocks_(limits.num_blocks),
      slots_(limits.num_slots),
      prefix_cache_(limits, prefix_cache, budget.max_num_seqs, blocks_),
      speculator_(speculation, limits) {
  running_.reserve(static_cast<size_t>(budget.max_num_seqs));
}

void Scheduler::add(std::unique_ptr<Sequence> sequence) {
  sequence->token_limit = sequence->request.max_tokens;
  waiting_.insert(sequence.get());
  const uint64_t id = sequence->id;
  const bool added = sequences_.emplace(id, std::move(sequence)).second;
  CHECK(added);
}

Sequence* Scheduler::find(uint64_t id) {
  const auto it = sequences_.find(id);
  return it == sequences_.end() || it->second->state == SequenceState::kFinished ? nullptr : it->second.get();
}

std::optional<PlannedStep> Scheduler::plan(int32_t num_in_flight) {
  Draft draft{.rows_left = budget_.max_num_batched_tokens};
  if (pipelined()) {
    // A step more than there are stages waits for its turn. For decodes that is a longer way to the next token, and each step with fewer of them.
    const auto decodes = [](const Sequence* s) { return s->can_decode(); };
    const bool one_more = std::none_of(running_.begin(), running_.end(), decodes);
    draft.num_places = budget_.num_micro_batches + (one_more ? 1 : 0) - num_in_flight;
    if (draft.num_places <= 0) return std::nullopt;
  }
  plan_decodes(draft);
  if (!draft.stalled) admit(draft);
  plan_given_tokens(draft);

  PlannedStep& step = draft.step;
  append(step.plan.runs, draft.decode_runs);
  append(step.runs, draft.decode_owners);
  if (step.runs.empty()) return std::nullopt;
  step.plan.state_ops = std::exchange(prefix_cache_.ops(), {});
  step.decode_depth = decode_depth(step.plan);
  step.plan.step = num_planned_++;
  return std::move(step);
}

/// Of many sequences some are always near their end, where they verify fewer drafts: a step takes as long as with all of them.
int32_t Scheduler::decode_depth(const worker::StepPlan& plan) const {
  int32_t most = 0, most_made = 0;
  for (const StepRun& run : plan.runs) {
    if (run.kind != RowKind::kDecode || !run.tokens.empty()) return -1;
    most = std::max(most, run.num_rows - 1);
    most_made = std::max(most_made, run.propose_depth);
  }
  if (speculator_.method() == SpeculationMethod::kMtp && most_made != most) return -1;
  const auto num_with_most = std::count_if(plan.runs.begin(), plan.runs.end(), [&](const StepRun& run) { return run.num_rows == most + 1; });
  return 4 * num_with_most >= 3 * std::ssize(plan.runs) ? most : -1;
}

void Scheduler::plan_decodes(Draft& draft) {
  // Depth is lowered first where rows are short; a chunk of a prompt shall always fit.
  const bool guesses = speculator_.method() != SpeculationMethod::kNone;
  const auto can_decode = [](const Sequence* s) { return s->can_decode(); };
  auto num_decodes = static_cast<int32_t>(std::count_if(running_.begin(), running_.end(), can_decode));
  if (pipelined()) {
    const auto num_ready = std::count_if(running_.begin(), running_.end(), [&](const Sequence* s) { return can_decode(s) && ready(*s); });
    num_decodes = std::min(even_share(num_decodes, budget_.num_micro_batches), even_share(static_cast<int32_t>(num_ready), draft.num_places));
  }
  const int32_t kept_rows = !given_in_order().empty() || !waiting_.empty() ? kBlockSize : 0;
  int32_t most_rows = 1;
  if (guesses) {
    most_rows = (draft.rows_left - kept_rows) / std::max(num_decodes, 1);
    draft.depth = speculator_.choose_depth(num_decodes, std::max(most_rows, 1) - 1);
  }
  for (size_t i = 0; i < running_.size() && std::ssize(draft.decode_runs) < num_decodes; ++i) {  // grow() may shorten the list behind i
    if (!running_[i]->can_decode() || !ready(*running_[i])) continue;
    plan_decode(*running_[i], most_rows, draft);
  }
}

void Scheduler::plan_decode(Sequence& sequence, int32_t most_rows, Draft& draft) {
  const bool ngram = speculator_.method() == SpeculationMethod::kNgram;
  if (ngram && !sequence.in_flight.empty()) return;  // its last tokens must be known to look for them
  if (!grow(sequence, draft)) return;
  CHECK(sequence.planned_rows == sequence.num_prompt() + sequence.planned_tokens - 1);
  StepRun run{.kind = RowKind::kDecode, .num_rows = 1};
  PlannedRun planned{.sequence = &sequence};

  int32_t num_drafts = std::min(most_rows, sequence.token_limit - sequence.planned_tokens) - 1;
  if (ngram) {
    const SpeculationOptions& options = speculator_.options();
    run.drafts = ngram_drafts(sequence.request.prompt, sequence.generated, options.prompt_lookup_min, options.prompt_lookup_max,
                              std::min(num_drafts, draft.depth));
    num_drafts = static_cast<int32_t>(run.drafts.size());
  } else {
    num_drafts = std::min(num_drafts, sequence.num_drafts);
  }
  // The last run of an output stores what it folds, so that a follow-up finds it; a verify would leave that to a run that never comes.
  const int32_t lowest = sequence.known_rows + static_cast<int32_t>(sequence.in_flight.size());
  const bool may_be_last = sequence.planned_tokens + 1 + num_drafts >= sequence.token_limit;
  if (may_be_last && boundary_before(lowest) != boundary_before(sequence.planned_rows + 1 + num_drafts)) num_drafts = 0;
  // Drafts are no reason to preempt anybody.
  while (sequence.planned_rows + 1 + num_drafts > sequence.num_blocks() * kBlockSize) {
    if (auto block = acquire_block()) {
      sequence.blocks.push_back(*std::move(block));
    } else {
      num_drafts = sequence.num_blocks() * kBlockSize - sequence.planned_rows - 1;
    }
  }
  if (num_drafts > 0) run.num_rows += num_drafts;
  run.drafts.resize(std::min(run.drafts.size(), static_cast<size_t>(run.num_rows - 1)));
  if (run.verify()) run.synthetic_acceptance = speculator_.synthetic_acceptance(run.num_rows - 1);
  planned.num_rows = run.num_rows;
  planned.verify = run.verify();
  planned.drafts = run.drafts;
  sample(run, planned);
  speculate(run, planned, draft);
  add_run(std::move(run), planned, draft);
}

/// Drafts for the sequence's next run are made behind this one; the MTP layer sees every row, so that it can do so at any time.
void Scheduler::speculate(StepRun& run, const PlannedRun& planned, const Draft& draft) {
  Sequence& sequence = *planned.sequence;
  sequence.num_drafts = 0;
  if (speculator_.method() != SpeculationMethod::kMtp) return;
  run.fill_mtp = true;
  if (!planned.samples) return;
  sequence.num_drafts = std::clamp(sequence.token_limit - sequence.planned_tokens - 1, 0, draft.depth);
  if (sequence.num_drafts == 0) return;
  run.propose = worker::DraftMethod::kMtp;
  run.propose_depth = sequence.num_drafts;
}

void Scheduler::plan_given_tokens(Draft& draft) {
  const std::vector<Sequence*> sequences = given_in_order();
  auto num_left = static_cast<int32_t>(sequences.size());
  int64_t rows_wanted = 0;
  for (const Sequence* sequence : sequences) rows_wanted += given_rows_left(*sequence);
  if (pipelined()) {  // those who wait may come into the next steps
    int32_t free = budget_.max_num_seqs - num_running();
    for (auto next = waiting_.begin(); next != waiting_.end() && free > 0; ++next, --free, ++num_left) rows_wanted += (*next)->num_known();
  }
  const int64_t share = (rows_wanted + draft.num_places - 1) / draft.num_places;
  int64_t rows = 0;
  for (Sequence* sequence : sequences) {
    if (draft.rows_left == 0) return;
    // A few rows take no longer than one. More of them leave something for the other steps that can be planned.
    const bool few = rows + given_rows_left(*sequence) <= kBlockSize;
    if (rows > 0 && !few && (rows >= share || num_left < draft.num_places)) return;
    const int32_t rows_before = draft.rows_left;
    if (sequence->in_prompt()) {
      plan_prompt(*sequence, draft);
    } else {
      plan_replay(*sequence, draft);
    }
    rows += rows_before - draft.rows_left;
    --num_left;
  }
}

/// The sequences that run and have given tokens for the next step, in the order in which they get rows.
std::vector<Sequence*> Scheduler::given_in_order() const {
  std::vector<Sequence*> sequences;
  for (Sequence* sequence : running_)
    if (given_rows_left(*sequence) > 0 && ready(*sequence)) sequences.push_back(sequence);
  if (!pipelined() || sequences.empty()) return sequences;
  const auto longest = std::max_element(sequences.begin(), sequences.end(), [](const Sequence* a, const Sequence* b) { return given_rows_left(*a) < given_rows_left(*b); });
  if ((*longest)->request.priority == sequences[0]->request.priority && lasts_longest(**longest)) std::rotate(sequences.begin(), longest, longest + 1);
  return sequences;
}

/// The rows that a sequence still has to compute, one step after the other, will keep a stage busy for longer than all others have work for the other stages.
bool Scheduler::lasts_longest(const Sequence& sequence) const {
  if (!pipelined()) return false;
  int64_t rows = 0;
  for (const Sequence* other : running_) rows += given_rows_left(*other);
  for (const Sequence* other : waiting_) rows += other->num_known();
  const int64_t own = sequence.state == SequenceState::kRunning ? given_rows_left(sequence) : sequence.num_known();
  return own * (budget_.num_micro_batches + 1) >= rows;
}

/// A chunk that ends on the grid, or with the prompt, and where a state is to be kept.
void Scheduler::plan_prompt(Sequence& sequence, Draft& draft) {
  const std::vector<int32_t>& prompt = sequence.request.prompt;
  const bool logprobs = sequence.wants_prompt_logprobs();
  const bool samples_at_end = sequence.num_replayed == 0 && sequence.token_limit > 0;
  int32_t most = logprobs ? std::min(draft.rows_left, draft.prompt_logprobs_left) : draft.rows_left;
  if (budget_.max_prompt_rows > 0) most = std::min(most, budget_.max_prompt_rows);
  const int32_t begin = sequence.planned_rows, remaining = sequence.num_prompt() - begin;
  int32_t num_rows = remaining;
  if (remaining > most) num_rows = most / kBlockSize * kBlockSize;
  num_rows = prefix_cache_.cut(sequence, begin + num_rows) - begin;
  if (num_rows == 0) return;

  const int32_t end = begin + num_rows;
  const bool ends = end == sequence.num_prompt();
  StepRun run{.kind = RowKind::kPrompt,
              .num_rows = num_rows,
              .tokens = {prompt.begin() + begin, prompt.begin() + end},
              .position = {begin, begin, begin}};
  PlannedRun planned{.sequence = &sequence, .num_rows = num_rows, .ends_prompt = ends && sequence.num_replayed == 0};
  if (!ends) run.following_token = prompt[static_cast<size_t>(end)];
  if (ends && sequence.num_replayed > 0) run.following_token = sequence.generated[0];
  if (ends && samples_at_end) sample(run, planned);
  if (logprobs) {
    run.sample_after = planned.samples;
    run.want = Want::kPromptLogprobs;
    run.num_prompt_logprobs = sequence.request.prompt_logprobs;
    draft.prompt_logprobs_left -= num_rows;
  }
  speculate(run, planned, draft);
  add_run(std::move(run), planned, draft);
}

/// Generated tokens once more, as D rows up to the next boundary; the last of them goes on to a new token.
void Scheduler::plan_replay(Sequence& sequence, Draft& draft) {
  const int32_t begin = sequence.planned_rows, remaining = sequence.num_given() - begin;
  int32_t num_rows = std::min({remaining, kBlockSize - begin % kBlockSize, draft.rows_left});
  if (num_rows == 0) return;

  const auto first = sequence.generated.begin() + (begin - sequence.num_prompt());
  StepRun run{.kind = RowKind::kDecode, .num_rows = num_rows, .tokens = {first, first + num_rows}};
  PlannedRun planned{.sequence = &sequence, .num_rows = num_rows};
  if (num_rows == remaining) {
    sample(run, planned);
  } else {
    run.following_token = *(first + num_rows);
  }
  speculate(run, planned, draft);
  add_run(std::move(run), planned, draft);
}

/// Adds the run, before it what the device must know to compute it, and moves the sequence's plan on.
void Scheduler::add_run(StepRun run, const PlannedRun& planned, Draft& draft) {
  Sequence& sequence = *planned.sequence;
  worker::StepPlan& plan = draft.step.plan;
  run.slot = sequence.slot->index();
  if (!std::exchange(sequence.slot_sent, true)) {
    std::vector<worker::StateOp>& ops = prefix_cache_.ops();
    ops.push_back({.kind = worker::StateOp::Kind::kClear, .slot = run.slot});
    if (const auto snapshot = std::exchange(sequence.prefix.restore, std::nullopt))
      ops.push_back(
          {.kind = worker::StateOp::Kind::kRestore, .slot = run.slot, .snapshot = snapshot->index(), .boundary = sequence.planned_rows});
    plan.slot_updates.push_back(slot_update(sequence));
  } else {
    prefix_cache_.before_run(sequence, run.num_rows, run.verify());
  }
  if (sequence.num_blocks_sent < sequence.num_blocks()) {
    worker::BlockTableUpdate update{.slot = run.slot, .first_block = sequence.num_blocks_sent};
    for (int32_t i = sequence.num_blocks_sent; i < sequence.num_blocks(); ++i)
      update.blocks.push_back(sequence.blocks[static_cast<size_t>(i)].index());
    plan.block_table_updates.push_back(std::move(update));
    sequence.num_blocks_sent = sequence.num_blocks();
  }
  sequence.planned_rows += run.num_rows;
  sequence.in_flight.push_back({.step = num_planned_, .num_rows = run.num_rows, .verify = run.verify(), .samples = planned.samples});
  draft.rows_left -= run.num_rows;
  const bool prompt = run.kind == RowKind::kPrompt;
  (prompt ? plan.runs : draft.decode_runs).push_back(std::move(run));
  (prompt ? draft.step.runs : draft.decode_owners).push_back(planned);
}

/// Takes in waiting sequences, in order, as long as this step has rows for them.
void Scheduler::admit(const Draft& draft) {
  int64_t rows_wanted = 0;
  for (const Sequence* sequence : running_)
    if (ready(*sequence)) rows_wanted += given_rows_left(*sequence);
  for (auto next = waiting_.begin(); next != waiting_.end() && (rows_wanted < draft.rows_left || lasts_longest(**next));) {
    Sequence& sequence = **next++;  // admission takes it out
    const Admission admission = admit_one(sequence);
    if (admission == Admission::kNoRoom) return;
    if (admission == Admission::kDone) rows_wanted += sequence.num_given() - sequence.planned_rows;
  }
}

Scheduler::Admission Scheduler::admit_one(Sequence& sequence) {
  if (num_running() >= budget_.max_num_seqs || slots_.num_free() == 0) return Admission::kNoRoom;
  PrefixIndex::Hit hit = prefix_cache_.find(sequence);
  const auto keeps_more = [&](const Sequence* other) {
    return (other->state == SequenceState::kFinished || runs_before(*other, sequence)) && prefix_cache_.will_keep_more(*other, sequence, hit.num_rows());
  };
  if (hit.pending || std::any_of(running_.begin(), running_.end(), keeps_more) || std::any_of(departing_.begin(), departing_.end(), keeps_more))
    return Admission::kLater;
  if (!prefix_cache_.prepare(hit)) hit = prefix_cache_.find(sequence, true);
  const auto may_grow = [](const Sequence* s) { return s->num_blocks() < s->num_blocks_at_most(); };
  const int64_t needed = num_blocks_for(sequence.num_known());
  const int64_t fresh = needed - std::ssize(hit.blocks);
  const int64_t headroom = std::count_if(running_.begin(), running_.end(), may_grow) + (needed < sequence.num_blocks_at_most() ? 1 : 0);
  bool has_room = blocks_.num_free() + blocks_.num_idle() >= fresh + headroom;
  while (has_room && blocks_.num_free() < fresh) has_room = prefix_cache_.evict_blocks();
  if (!has_room) {
    prefix_cache_.let_go(hit);
    return Admission::kNoRoom;
  }

  waiting_.erase(&sequence);
  running_.insert(std::upper_bound(running_.begin(), running_.end(), &sequence, RunsBefore{}), &sequence);
  sequence.state = SequenceState::kRunning;
  if (!sequence.first_admitted) sequence.first_admitted = std::chrono::steady_clock::now();
  sequence.num_replayed = sequence.planned_tokens = sequence.num_generated();
  sequence.slot = slots_.acquire();
  prefix_cache_.admit(sequence, std::move(hit));
  sequence.blocks.reserve(static_cast<size_t>(sequence.num_blocks_at_most()));
  while (sequence.num_blocks() < needed) sequence.blocks.push_back(*blocks_.acquire());
  return Admission::kDone;
}

/// Makes sure that the next row has a place in the KV cache. False when it must wait for a block.
bool Scheduler::grow(Sequence& sequence, Draft& draft) {
  if (sequence.planned_rows < sequence.num_blocks() * kBlockSize) return true;
  while (true) {
    if (auto block = acquire_block()) {
      sequence.blocks.push_back(*std::move(block));
      return true;
    }
    int32_t returning = blocks_.num_idle();  // of cached prefixes that will be complete with a step in flight
    for (const Sequence* s : departing_) returning += s->num_blocks();
    if (draft.num_blocks_claimed < returning) {
      ++draft.num_blocks_claimed;
      break;
    }
    if (running_.back() == &sequence) break;  // those before it go on, and one day return theirs
    preempt_last();
  }
  draft.stalled = true;
  return false;
}

std::optional<BlockRef> Scheduler::acquire_block() {
  while (blocks_.num_free() == 0 && prefix_cache_.evict_blocks()) {
  }
  return blocks_.acquire();
}

void Scheduler::preempt_last() {
  Sequence& sequence = *running_.back();
  running_.pop_back();
  ++num_preemptions_;
  if (sequence.in_flight.empty()) return park(sequence);
  sequence.state = SequenceState::kLeaving;
  departing_.push_back(&sequence);
}

/// Gives back what the sequence holds; it will be computed anew.
void Scheduler::park(Sequence& sequence) {
  prefix_cache_.keep_preempted(sequence);
  sequence.blocks.clear();
  sequence.slot.reset();
  sequence.slot_sent = false;
  sequence.num_blocks_sent = 0;
  sequence.num_drafts = 0;
  sequence.planned_rows = sequence.known_rows = sequence.known_boundary = 0;
  sequence.prompt_logprobs.clear();
  sequence.state = SequenceState::kWaiting;
  waiting_.insert(&sequence);
}

void Scheduler::retire(Sequence& sequence, int32_t num_sampled) {
  CHECK(!sequence.in_flight.empty());
  const RunInFlight run = sequence.in_flight.front();
  sequence.in_flight.pop_front();
  const int32_t before = sequence.known_rows;
  sequence.known_rows += run.verify ? num_sampled : run.num_rows;
  sequence.known_boundary = boundary_before(run.verify ? before : sequence.known_rows);
  sequence.planned_rows = sequence.known_rows;
  if (num_sampled > 0) prefix_cache_.prove(sequence);
  sequence.planned_tokens = sequence.num_generated();
  for (const RunInFlight& later : sequence.in_flight) {
    sequence.planned_rows += later.num_rows;
    sequence.planned_tokens += later.num_tokens_at_most();
  }
  if (run.verify && num_sampled > 0) speculator_.observe_verify(run.num_rows - 1, num_sampled - 1, boundary_before(before) != boundary_before(before + run.num_rows - 1));
  if (sequence.state == SequenceState::kRunning) return;
  if (!sequence.in_flight.empty()) return;
  std::erase(departing_, &sequence);
  if (sequence.state == SequenceState::kLeaving) return park(sequence);
  destroy(sequence);
}

void Scheduler::remove(Sequence& sequence) {
  if (sequence.faulty) prefix_cache_.withdraw(sequence);
  if (sequence.state == SequenceState::kWaiting) waiting_.erase(&sequence);
  if (sequence.state == SequenceState::kRunning) {
    std::erase(running_, &sequence);
    if (!sequence.in_flight.empty()) departing_.push_back(&sequence);
  }
  sequence.state = SequenceState::kFinished;
  if (sequence.in_flight.empty()) destroy(sequence);
}

/// Its last boundary may go on living in the prefix cache.
void Scheduler::destroy(Sequence& sequence) {
  prefix_cache_.keep_output(sequence);
  sequences_.erase(sequences_.find(sequence.id));
}

std::vector<uint64_t> Scheduler::unfinished() const {
  std::vector<uint64_t> ids;
  for (const auto& [id, sequence] : sequences_)
    if (sequence->state != SequenceState::kFinished) ids.push_back(id);
  std::sort(ids.begin(), ids.end());
  return ids;
}

int32_t Scheduler::num_waiting() const {
  const auto preempted =
      std::count_if(departing_.begin(), departing_.end(), [](const Sequence* s) { return s->state == SequenceState::kLeaving; });
  return static_cast<int32_t>(waiting_.size()) + static_cast<int32_t>(preempted);
}

}  // namespace quern::engine
