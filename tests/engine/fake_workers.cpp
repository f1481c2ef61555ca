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
      planned_(static_cast<size_t>(limits.num_slots)),
      block_owner_(static_cast<size_t>(limits.num_blocks), -1),
      num_learnt_(static_cast<size_t>(limits.num_stages), 0) {
  for (int32_t stage = 0; stage < limits.num_stages; ++stage) {
    stages_.emplace_back(limits, options.non_finite, [this](std::string what) { control_->violation(std::move(what)); });
    work_.push_back(std::make_unique<BoundedQueue<Work>>(64));
    learning_.push_back(std::make_unique<BoundedQueue<Drawn>>(64));
  }
  if (!options_.own_thread) return;
  for (size_t stage = 0; stage < stages_.size(); ++stage) {
    threads_.emplace_back([this, stage] {
      SplitMix64 delays(7 + stage);
      while (std::optional<Work> work = work_[stage]->pop()) {
        if (options_.max_delay_us > 0 && delays.next() % 16 == 0)
          std::this_thread::sleep_for(std::chrono::microseconds(delays.next() % static_cast<uint64_t>(options_.max_delay_us)));
        if (stage == last()) {
          results_.push(finish(*std::move(work)));
        } else if (pass_stage(stage, *work)) {
          work_[stage + 1]->push(*std::move(work));
        }
      }
    });
  }
}

FakeWorkers::~FakeWorkers() {
  expect(in_flight_.empty(), "the engine ended with steps in flight");
  for (const auto& queue : work_) queue->close();
  for (const auto& queue : learning_) queue->close();
  masks_.close();
}

void FakeWorkers::expect(bool condition, const std::string& what) {
  if (!condition) control_->violation(fmt::format("step {}: {}", num_submitted_, what));
}

void FakeWorkers::submit(StepPlan plan) {
  Work work{.plan = plan, .num_results = num_submitted_ - in_flight_.size()};
  check(plan);
  ++num_submitted_;
  for (size_t stage = 0; stage < last() && !options_.own_thread; ++stage) pass_stage(stage, work);
  work_[options_.own_thread ? 0 : last()]->push(std::move(work));
  control_->submitted(plan);
}

void FakeWorkers::submit_masks(StepMasks masks) {
  expect(masks_awaited_.erase(masks.step) == 1, fmt::format("masks of step {} that nobody waits for", masks.step));
  masks_.push(std::move(masks));
}

StepResult FakeWorkers::wait() {
  CHECK(!in_flight_.empty());
  expect(options_.own_thread || !masks_awaited_.contains(num_submitted_ - in_flight_.size()),
         "waiting for a step whose masks were not sent");
  StepResult result = options_.own_thread ? *results_.pop() : finish(*work_[last()]->pop());
  retire(result);
  return result;
}

std::optional<StepResult> FakeWorkers::wait_or_wake() {
  if (!options_.own_thread) return wait();
  std::optional<StepResult> result = results_.pop_or_wake();
  if (result) retire(*result);
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
  int32_t num_rows = 0;
  bool decodes = false, masks = false;
  for (size_t i = 0; i < plan.runs.size(); ++i) {
    const StepRun& run = plan.runs[i];
    if (run.verify()) in_flight.verifies.push_back({i, run.slot, run.num_rows, planned_[static_cast<size_t>(run.slot)].owner});
    check_run(run, in_flight);
    num_rows += run.num_rows;
    expect(run.kind == RowKind::kDecode || !decodes, "a P run after a D run");
    decodes |= run.kind == RowKind::kDecode;
    masks |= run.mask_pending;
  }
  expect(num_rows <= limits_.max_rows, fmt::format("{} rows in a step", num_rows));
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
  const auto names = [&](const StepInFlight& step) { return step.slots.contains(run.slot); };
  expect(limits_.num_stages == 1 || std::none_of(in_flight_.begin(), in_flight_.end(), names),
         fmt::format("slot {} has two steps in flight in a pipeline", run.slot));
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

// The plan, as the stages carry it out.

/// A step passes one of the stages before the last. False when the test ends.
bool FakeWorkers::pass_stage(size_t stage, Work& work) {
  for (; num_learnt_[stage] < work.num_results; ++num_learnt_[stage]) {
    const std::optional<Drawn> drawn = learning_[stage]->pop();
    if (!drawn) return false;
    stages_[stage].learn(drawn->plan, drawn->result);
  }
  StepResult result;
  stages_[stage].compute(work.plan, result);
  return true;
}

StepResult FakeWorkers::finish(Work work) {
  control_->begin_step();
  const StepPlan& plan = work.plan;
  StepResult result{.step = plan.step};
  stages_[last()].compute(plan, result);

  FakeStage::Masks masks;
  if (std::any_of(plan.runs.begin(), plan.runs.end(), [](const StepRun& run) { return run.mask_pending; })) {
    std::optional<StepMasks> message = options_.own_thread ? masks_.pop() : masks_.try_pop();
    if (!message || message->step != plan.step) control_->violation(fmt::format("step {} did not get its masks", plan.step));
    if (message)
      for (auto& [slot, mask] : message->rows) masks[slot] = std::move(mask);
  }
  stages_[last()].draw(plan, masks, result);
  for (size_t stage = 0; stage < last(); ++stage) learning_[stage]->push({plan, result});
  if (plan.step == options_.failing_step) {
    result.runs.clear();
    result.error = make_error(ErrorCode::kInternal, "the device fell off the bus");
  }
  return result;
}

}  // namespace quern::engine::testing
