#include "engine/fake_workers.h"

#include <algorithm>
#include <chrono>

#include "base/check.h"

namespace quern::engine::testing {

using worker::RowKind;
using worker::RunResult;
using worker::StateOp;
using worker::StepMasks;
using worker::StepPlan;
using worker::StepResult;
using worker::StepRun;
using worker::Want;

constexpr int32_t kGrid = 64;

void FakeControl::hold() {
  std::lock_guard lock(mutex_);
  held_ = true;
}

void FakeControl::release(int64_t num_steps) {
  {
    std::lock_guard lock(mutex_);
    permits_ += num_steps;
  }
  changed_.notify_all();
}

void FakeControl::open() {
  {
    std::lock_guard lock(mutex_);
    held_ = false;
    permits_ = 0;
  }
  changed_.notify_all();
}

int64_t FakeControl::permits() const {
  std::lock_guard lock(mutex_);
  return permits_;
}

void FakeControl::wait_for_submitted(uint64_t num_steps) {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return plans_.size() >= num_steps; });
}

std::vector<std::string> FakeControl::violations() const {
  std::lock_guard lock(mutex_);
  return violations_;
}

std::vector<StepPlan> FakeControl::plans() const {
  std::lock_guard lock(mutex_);
  return plans_;
}

void FakeControl::begin_step() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [this] { return !held_ || permits_ > 0; });
  if (held_) --permits_;
}

void FakeControl::submitted(const StepPlan& plan) {
  {
    std::lock_guard lock(mutex_);
    plans_.push_back(plan);
  }
  changed_.notify_all();
}

void FakeControl::violation(std::string what) {
  std::lock_guard lock(mutex_);
  violations_.push_back(std::move(what));
}

FakeWorkers::FakeWorkers(const worker::WorkerLimits& limits, const FakeWorkersOptions& options, std::shared_ptr<FakeControl> control)
    : limits_(limits),
      options_(options),
      control_(std::move(control)),
      model_(limits.vocab_size),
      planned_(static_cast<size_t>(limits.num_slots)),
      block_owner_(static_cast<size_t>(limits.num_blocks), -1),
      slots_(static_cast<size_t>(limits.num_slots)),
      snapshots_(static_cast<size_t>(limits.num_snapshots)),
      host_snapshots_(static_cast<size_t>(limits.num_host_snapshots)),
      host_kv_(static_cast<size_t>(limits.num_host_blocks) * kGrid, -1),
      kv_(static_cast<size_t>(limits.num_blocks) * kGrid, -1) {
  if (!options_.own_thread) return;
  thread_ = std::jthread([this] {
    while (const std::optional<StepPlan> plan = plans_.pop()) {
      if (options_.max_delay_us > 0 && delays_.next() % 16 == 0)
        std::this_thread::sleep_for(std::chrono::microseconds(delays_.next() % static_cast<uint64_t>(options_.max_delay_us)));
      results_.push(execute(*plan));
    }
  });
}

FakeWorkers::~FakeWorkers() {
  expect(in_flight_.empty(), "the engine ended with steps in flight");
  plans_.close();
  masks_.close();
}

void FakeWorkers::expect(bool condition, const std::string& what) {
  if (!condition) control_->violation(fmt::format("step {}: {}", num_submitted_, what));
}

void FakeWorkers::submit(StepPlan plan) {
  check(plan);
  control_->submitted(plan);
  ++num_submitted_;
  plans_.push(std::move(plan));
}

void FakeWorkers::submit_masks(StepMasks masks) {
  expect(masks_awaited_.erase(masks.step) == 1, fmt::format("masks of step {} that nobody waits for", masks.step));
  masks_.push(std::move(masks));
}

StepResult FakeWorkers::wait() {
  CHECK(!in_flight_.empty());
  expect(options_.own_thread || !masks_awaited_.contains(num_submitted_ - in_flight_.size()),
         "waiting for a step whose masks were not sent");
  StepResult result = options_.own_thread ? *results_.pop() : execute(*plans_.pop());
  retire(result);
  return result;
}

std::optional<StepResult> FakeWorkers::poll() {
  std::optional<StepResult> result = results_.try_pop();
  if (result) retire(*result);
  return result;
}

/// The caller now knows how far verifies went.
void FakeWorkers::retire(const StepResult& result) {
  for (const Verify& verify : in_flight_.front().verifies) {
    PlannedSlot& slot = planned_[static_cast<size_t>(verify.slot)];
    if (slot.owner == verify.owner && !result.error) slot.cursor -= verify.num_rows - static_cast<int32_t>(result.runs[verify.run].tokens.size());
  }
  in_flight_.pop_front();
}

// The plan, as the caller may know it.

void FakeWorkers::check(const StepPlan& plan) {
  expect(plan.step == num_submitted_, "steps are numbered in order");
  expect(static_cast<int32_t>(in_flight_.size()) < options_.max_steps_in_flight, "too many steps in flight");
  expect(!plan.runs.empty(), "a step without rows");
  const auto named_in_flight = [this](auto member, int32_t id) {
    return std::any_of(in_flight_.begin(), in_flight_.end(), [&](const StepInFlight& step) { return (step.*member).contains(id); });
  };
  std::set<int32_t> cleared;
  for (const StateOp& op : plan.state_ops) check_state_op(op, cleared);
  for (const worker::SlotUpdate& update : plan.slot_updates) {
    expect(cleared.contains(update.slot), "parameters for a slot that keeps its owner");
    expect(update.prompt_ids.empty() != update.sampling.has_penalties(), "prompt ids are sent if and only if there are penalties");
    planned_[static_cast<size_t>(update.slot)].has_parameters = true;
  }
  for (const worker::BlockTableUpdate& update : plan.block_table_updates) {
    PlannedSlot& slot = planned_[static_cast<size_t>(update.slot)];
    expect(update.first_block == static_cast<int32_t>(slot.blocks.size()), "a block table with a hole");
    expect(!update.blocks.empty(), "an empty block table update");
    for (const int32_t block : update.blocks) {
      CHECK(block >= 0 && block < limits_.num_blocks);
      expect(std::count(slot.blocks.begin(), slot.blocks.end(), block) == 0, "a block twice in one table");
      slot.blocks.push_back(block);
      if (static_cast<int32_t>(slot.blocks.size()) <= slot.num_shared) continue;
      expect(!named_in_flight(&StepInFlight::blocks, block), fmt::format("block {} changes hands while a step in flight names it", block));
      block_owner_[static_cast<size_t>(block)] = update.slot;
    }
  }

  StepInFlight in_flight;
  int32_t num_rows = 0, num_logit_rows = 0;
  bool decodes = false, masks = false;
  for (size_t i = 0; i < plan.runs.size(); ++i) {
    const StepRun& run = plan.runs[i];
    if (run.verify()) in_flight.verifies.push_back({i, run.slot, run.num_rows, planned_[static_cast<size_t>(run.slot)].owner});
    check_run(run, in_flight);
    num_rows += run.num_rows;
    num_logit_rows += run.want == Want::kNothing ? 0 : run.want == Want::kSample && !run.verify() ? 1 : run.num_rows;
    expect(run.kind == RowKind::kDecode || !decodes, "a P run after a D run");
    decodes |= run.kind == RowKind::kDecode;
    masks |= run.mask_pending;
  }
  expect(num_rows <= limits_.max_rows, fmt::format("{} rows in a step", num_rows));
  expect(num_logit_rows <= limits_.max_logit_rows, fmt::format("{} logit rows in a step", num_logit_rows));
  for (const int32_t slot : cleared) expect(in_flight.slots.contains(slot), "a slot is prepared but not used");
  if (masks) masks_awaited_.insert(plan.step);
  in_flight_.push_back(std::move(in_flight));
}

void FakeWorkers::check_state_op(const StateOp& op, std::set<int32_t>& cleared) {
  CHECK(op.slot >= 0 && op.slot < limits_.num_slots);
  PlannedSlot& slot = planned_[static_cast<size_t>(op.slot)];
  switch (op.kind) {
    case StateOp::Kind::kClear:
      expect(std::none_of(in_flight_.begin(), in_flight_.end(), [&](const StepInFlight& step) { return step.slots.contains(op.slot); }),
             fmt::format("slot {} is cleared while a step in flight names it", op.slot));
      slot = {.cleared = true, .owner = ++num_owners_};
      expect(cleared.insert(op.slot).second, "a slot is cleared twice");
      break;
    case StateOp::Kind::kSnapshot:
      CHECK(op.snapshot >= 0 && op.snapshot < limits_.num_snapshots);
      expect(slot.cleared && !cleared.contains(op.slot), "a snapshot of a slot that has nobody");
      break;
    case StateOp::Kind::kRestore:
      CHECK(op.snapshot >= 0 && op.snapshot < limits_.num_snapshots);
      expect(cleared.contains(op.slot) && slot.cursor == 0, "a state is restored into a slot that was not cleared");
      expect(op.boundary > 0 && op.boundary % kGrid == 0, "a state is restored off the grid");
      slot.cursor = op.boundary;
      slot.num_shared = op.boundary / kGrid;
      break;
    case StateOp::Kind::kRewind: expect(false, "an unexpected state op"); break;
    case StateOp::Kind::kBlockToHost: CHECK(op.block < limits_.num_blocks && op.host < limits_.num_host_blocks); break;
    case StateOp::Kind::kBlockFromHost:
      CHECK(op.block < limits_.num_blocks && op.host < limits_.num_host_blocks);
      expect(std::none_of(in_flight_.begin(), in_flight_.end(), [&](const StepInFlight& step) { return step.blocks.contains(op.block); }),
             fmt::format("block {} is loaded while a step in flight names it", op.block));
      break;
    case StateOp::Kind::kSnapshotToHost:
    case StateOp::Kind::kSnapshotFromHost: CHECK(op.snapshot < limits_.num_snapshots && op.host < limits_.num_host_snapshots); break;
  }
}

void FakeWorkers::check_run(const StepRun& run, StepInFlight& in_flight) {
  CHECK(run.slot >= 0 && run.slot < limits_.num_slots && run.num_rows > 0);
  PlannedSlot& slot = planned_[static_cast<size_t>(run.slot)];
  const int32_t begin = slot.cursor, end = begin + run.num_rows;
  const bool samples = run.want == Want::kSample || run.sample_after;
  expect(in_flight.slots.insert(run.slot).second, "two runs of one slot");
  expect(slot.cleared && slot.has_parameters, fmt::format("slot {} is used before it was cleared and got its parameters", run.slot));
  expect(end <= limits_.max_model_len, "rows past the window");
  expect(end <= static_cast<int32_t>(slot.blocks.size()) * kGrid, "rows without a block");
  for (size_t i = 0; i < slot.blocks.size(); ++i) {
    in_flight.blocks.insert(slot.blocks[i]);
    if (static_cast<int32_t>(i) < slot.num_shared) continue;  // what it holds is compared with the state whenever a token is drawn
    expect(block_owner_[static_cast<size_t>(slot.blocks[i])] == run.slot,
           fmt::format("block {} of slot {} belongs to another", slot.blocks[i], run.slot));
  }
  expect(begin / kGrid >= slot.num_shared, "a run writes to a shared block");
  if (run.kind == RowKind::kPrompt) {
    expect(static_cast<int32_t>(run.tokens.size()) == run.num_rows, "a P run without its tokens");
    expect(!slot.prompt_ended, "a P run after the prompt's end");
    expect(begin % kGrid == 0, "a P run starts off the grid");
    expect(run.position == std::array<int32_t, 3>{begin, begin, begin}, "a P run's position is not its index");
    expect(run.want != Want::kPromptLogprobs || run.sample_after || run.following_token >= 0 || run.num_rows > 0, "no following token");
    slot.prompt_ended = end % kGrid != 0 || samples;
  } else {
    expect(run.want != Want::kPromptLogprobs, "prompt log-probabilities of D rows");
    if (run.tokens.empty()) {
      const int32_t num_drafts = run.drafts.empty() ? slot.num_drafts : static_cast<int32_t>(run.drafts.size());
      expect(run.num_rows - 1 <= num_drafts && run.num_rows - 1 <= limits_.k_max, "a verify without drafts");
      expect(slot.next_token_known, "a decode of a token that was not sampled");
    } else {
      expect(static_cast<int32_t>(run.tokens.size()) == run.num_rows, "a replay without its tokens");
      expect(begin / kGrid == (end - 1) / kGrid, "a replay crosses a boundary");
      expect(!slot.next_token_known, "a replay of a token that the device sampled");
    }
    slot.prompt_ended = true;
  }
  expect(!run.mask_pending || samples, "a mask for nothing");
  expect(run.drafts.empty() || run.verify(), "drafts for nothing");
  if (!run.tokens.empty()) {
    expect(!slot.next_given || *slot.next_given == run.tokens[0], "another token follows than was said");
    slot.next_given.reset();
    if (!samples && run.following_token >= 0) slot.next_given = run.following_token;
  }
  slot.has_mtp_rows &= run.fill_mtp;
  expect(run.propose == worker::DraftMethod::kNone || (samples && slot.has_mtp_rows), "drafts of an MTP layer that has not seen all rows");
  slot.num_drafts = run.propose_depth;
  slot.cursor = end;
  slot.next_token_known = samples;
}

// The plan, as the device carries it out.

StepResult FakeWorkers::execute(const StepPlan& plan) {
  control_->begin_step();
  StepResult result{.step = plan.step};
  for (const StateOp& op : plan.state_ops) apply(op);
  for (const worker::SlotUpdate& update : plan.slot_updates) {
    DeviceSlot& slot = slots_[static_cast<size_t>(update.slot)];
    slot.sampling = update.sampling;
    slot.prompt_ids = update.prompt_ids;
    slot.output = update.output_ids;
  }
  for (const worker::BlockTableUpdate& update : plan.block_table_updates) {
    std::vector<int32_t>& table = slots_[static_cast<size_t>(update.slot)].block_table;
    table.resize(static_cast<size_t>(update.first_block));
    table.insert(table.end(), update.blocks.begin(), update.blocks.end());
  }
  result.runs.resize(plan.runs.size());
  for (size_t i = 0; i < plan.runs.size(); ++i) {
    compute(plan.runs[i], result.runs[i]);
    result.computed_rows += plan.runs[i].num_rows;
  }

  std::map<int32_t, std::vector<uint32_t>> masks;
  if (std::any_of(plan.runs.begin(), plan.runs.end(), [](const StepRun& run) { return run.mask_pending; })) {
    std::optional<StepMasks> message = options_.own_thread ? masks_.pop() : masks_.try_pop();
    if (!message || message->step != plan.step) control_->violation(fmt::format("step {} did not get its masks", plan.step));
    if (message)
      for (auto& [slot, mask] : message->rows) masks[slot] = std::move(mask);
  }
  for (size_t i = 0; i < plan.runs.size(); ++i) {
    const StepRun& run = plan.runs[i];
    if (run.mask_pending && !masks.contains(run.slot))
      control_->violation(fmt::format("step {}: no mask for slot {}", plan.step, run.slot));
    DeviceSlot& slot = slots_[static_cast<size_t>(run.slot)];
    const std::vector<uint32_t>* mask = run.mask_pending ? &masks[run.slot] : nullptr;
    if (run.verify()) {
      verify(run, slot, mask, result.runs[i]);
    } else if (run.want == Want::kSample || run.sample_after) {
      draw(run, slot, mask, result.runs[i]);
    }
    propose(run, slot, result.runs[i]);
  }
  if (plan.step == options_.failing_step) {
    result.runs.clear();
    result.error = make_error(ErrorCode::kInternal, "the device fell off the bus");
  }
  return result;
}

void FakeWorkers::apply(const StateOp& op) {
  DeviceSlot& slot = slots_[static_cast<size_t>(op.slot)];
  if (op.kind == StateOp::Kind::kClear) {
    slot.cursor = slot.boundary = 0;
    slot.state = slot.boundary_state = FakeModel::kEmptyState;
    slot.last_token.reset();
    return;
  }
  if (op.kind == StateOp::Kind::kBlockToHost || op.kind == StateOp::Kind::kBlockFromHost) {
    const auto device = kv_.begin() + op.block * kGrid, host = host_kv_.begin() + op.host * kGrid;
    op.kind == StateOp::Kind::kBlockToHost ? std::copy_n(device, kGrid, host) : std::copy_n(host, kGrid, device);
    return;
  }
  Snapshot& snapshot = snapshots_[static_cast<size_t>(op.snapshot)];
  if (op.kind == StateOp::Kind::kSnapshotToHost || op.kind == StateOp::Kind::kSnapshotFromHost) {
    Snapshot& host = host_snapshots_[static_cast<size_t>(op.host)];
    op.kind == StateOp::Kind::kSnapshotToHost ? host = snapshot : snapshot = host;
    return;
  }
  if (op.kind == StateOp::Kind::kSnapshot) {
    if (slot.boundary != op.boundary)
      control_->violation(fmt::format("slot {} is copied at {}, but its state stands at {}", op.slot, op.boundary, slot.boundary));
    snapshot = {slot.boundary, slot.boundary_state};
    return;
  }
  if (snapshot.boundary != op.boundary)
    control_->violation(fmt::format("snapshot {} of {} is restored as {}", op.snapshot, snapshot.boundary, op.boundary));
  slot.cursor = slot.boundary = op.boundary;
  slot.state = slot.boundary_state = snapshot.state;
}

void FakeWorkers::compute(const StepRun& run, RunResult& result) {
  DeviceSlot& slot = slots_[static_cast<size_t>(run.slot)];
  result.slot = run.slot;
  if (run.kind == RowKind::kPrompt && run.position[0] != slot.cursor)
    control_->violation("the device's cursor is not where the plan has it");
  if (slot.cursor / kGrid * kGrid > slot.boundary) {  // a fold that a verify has left
    slot.boundary = slot.cursor / kGrid * kGrid;
    slot.boundary_state = state_in_kv(slot, slot.boundary);
  }
  if (run.verify()) return;
  for (int32_t row = 0; row < run.num_rows; ++row) {
    const int32_t token = run.tokens.empty() ? slot.last_token.value_or(-1) : run.tokens[static_cast<size_t>(row)];
    if (token < 0 || token >= limits_.vocab_size) control_->violation(fmt::format("token {} is computed", token));
    const int32_t block = slot.block_table[static_cast<size_t>(slot.cursor / kGrid)];
    kv_[static_cast<size_t>(block * kGrid + slot.cursor % kGrid)] = token;
    slot.state = FakeModel::grow(slot.state, token);
    ++slot.cursor;
    if (slot.cursor % kGrid == 0) {
      slot.boundary = slot.cursor;
      slot.boundary_state = slot.state;
    }
    if (run.want != Want::kPromptLogprobs) continue;
    const int32_t following = row + 1 < run.num_rows ? run.tokens[static_cast<size_t>(row) + 1] : run.following_token;
    if (following >= 0) result.prompt_logprobs.push_back(model_.logprobs(slot.state, following, run.num_prompt_logprobs));
  }
  slot.last_token.reset();
}

/// The state once more, from the KV blocks: a block that was lost or overwritten shows here.
uint64_t FakeWorkers::state_in_kv(const DeviceSlot& slot, int32_t num_rows) const {
  uint64_t state = FakeModel::kEmptyState;
  for (int32_t i = 0; i < num_rows; ++i)
    state = FakeModel::grow(state, kv_[static_cast<size_t>(slot.block_table[static_cast<size_t>(i / kGrid)] * kGrid + i % kGrid)]);
  return state;
}

void FakeWorkers::draw(const StepRun& run, DeviceSlot& slot, const std::vector<uint32_t>* mask, RunResult& result) {
  const uint64_t state = state_in_kv(slot, slot.cursor);
  if (state != slot.state) control_->violation(fmt::format("slot {}: KV and recurrent state are not of the same tokens", run.slot));
  if (is_non_finite(slot)) {
    result.non_finite = true;
    slot.last_token = 0;
    return;
  }
  const int32_t token = model_.next(slot.state, {slot.sampling, slot.prompt_ids, slot.output}, [&](int32_t candidate) {
    return mask == nullptr || ((*mask)[static_cast<size_t>(candidate / 32)] >> (candidate % 32) & 1) != 0;
  });
  result.tokens = {token};
  if (slot.sampling.num_logprobs >= 0) result.logprobs = {model_.logprobs(slot.state, token, slot.sampling.num_logprobs)};
  slot.output.push_back(token);
  slot.last_token = token;
}

bool FakeWorkers::is_non_finite(const DeviceSlot& slot) const {
  const int32_t first_token = kv_[static_cast<size_t>(slot.block_table[0] * kGrid)];
  return options_.non_finite == std::pair{first_token, static_cast<int32_t>(slot.output.size())};
}

/// Drafts behind the last token: each is compared with what is drawn in its place.
void FakeWorkers::verify(const StepRun& run, DeviceSlot& slot, const std::vector<uint32_t>* masks, RunResult& result) {
  if (state_in_kv(slot, slot.cursor) != slot.state)
    control_->violation(fmt::format("slot {}: KV and recurrent state are not of the same tokens", run.slot));
  const std::vector<int32_t>& drafts = run.drafts.empty() ? slot.drafts : run.drafts;
  std::vector<int32_t> tokens = {slot.last_token.value_or(-1)};
  tokens.insert(tokens.end(), drafts.begin(), drafts.begin() + (run.num_rows - 1));
  for (int32_t i = 0; i < run.num_rows; ++i) {
    const int32_t index = slot.cursor + i;
    kv_[static_cast<size_t>(slot.block_table[static_cast<size_t>(index / kGrid)] * kGrid + index % kGrid)] = tokens[static_cast<size_t>(i)];
  }
  const size_t num_words = (static_cast<size_t>(limits_.vocab_size) + 31) / 32, known = slot.output.size();
  uint64_t state = slot.state;
  for (size_t i = 0; i < tokens.size(); ++i) {
    if (is_non_finite(slot)) {
      slot.output.resize(known);
      result = {.slot = run.slot, .non_finite = true};
      slot.last_token = 0;
      return;
    }
    state = FakeModel::grow(state, tokens[i]);
    const int32_t token = model_.next(state, {slot.sampling, slot.prompt_ids, slot.output}, [&](int32_t candidate) {
      return masks == nullptr || ((*masks)[i * num_words + static_cast<size_t>(candidate / 32)] >> (candidate % 32) & 1) != 0;
    });
    result.tokens.push_back(token);
    if (slot.sampling.num_logprobs >= 0) result.logprobs.push_back(model_.logprobs(state, token, slot.sampling.num_logprobs));
    slot.output.push_back(token);
    slot.last_token = token;
    const std::vector<int32_t>& stops = slot.sampling.stop_ids;
    if (std::find(stops.begin(), stops.end(), token) != stops.end()) break;
    if (i + 1 < tokens.size() && token != tokens[i + 1]) break;
  }
  result.num_draft_rows = run.num_rows - 1;
  slot.state = state;
  slot.cursor += static_cast<int32_t>(result.tokens.size());
}

/// Drafts as a head would make them: most of them are what the model says.
void FakeWorkers::propose(const StepRun& run, DeviceSlot& slot, RunResult& result) {
  slot.drafts.clear();
  if (run.propose == worker::DraftMethod::kNone || result.non_finite) return;
  uint64_t state = slot.state;
  std::vector<int32_t> output = slot.output;
  int32_t last = slot.last_token.value_or(0);
  for (int32_t i = 0; i < run.propose_depth; ++i) {
    state = FakeModel::grow(state, last);
    last = model_.next(state, {slot.sampling, slot.prompt_ids, output}, [](int32_t) { return true; });
    if (mix64(state) % 4 == 0) last = (last + 1) % limits_.vocab_size;
    output.push_back(last);
    slot.drafts.push_back(last);
  }
  result.drafts = slot.drafts;
}

}  // namespace quern::engine::testing
