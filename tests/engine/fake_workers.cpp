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
  in_flight_.pop_front();
  return result;
}

std::optional<StepResult> FakeWorkers::poll() {
  std::optional<StepResult> result = results_.try_pop();
  if (result) in_flight_.pop_front();
  return result;
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
  for (const StateOp& op : plan.state_ops) {
    CHECK(op.slot >= 0 && op.slot < limits_.num_slots);
    expect(op.kind == StateOp::Kind::kClear, "an unexpected state op");
    expect(!named_in_flight(&StepInFlight::slots, op.slot), fmt::format("slot {} is cleared while a step in flight names it", op.slot));
    planned_[static_cast<size_t>(op.slot)] = {.cleared = true};
    expect(cleared.insert(op.slot).second, "a slot is cleared twice");
  }
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
      expect(!named_in_flight(&StepInFlight::blocks, block), fmt::format("block {} changes hands while a step in flight names it", block));
      expect(std::count(slot.blocks.begin(), slot.blocks.end(), block) == 0, "a block twice in one table");
      block_owner_[static_cast<size_t>(block)] = update.slot;
      slot.blocks.push_back(block);
    }
  }

  StepInFlight in_flight;
  int32_t num_rows = 0, num_logit_rows = 0;
  bool decodes = false, masks = false;
  for (const StepRun& run : plan.runs) {
    check_run(run, in_flight);
    num_rows += run.num_rows;
    num_logit_rows += run.want == Want::kNothing ? 0 : run.want == Want::kSample ? 1 : run.num_rows;
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
    expect(block_owner_[static_cast<size_t>(slot.blocks[i])] == run.slot,
           fmt::format("block {} of slot {} belongs to another", slot.blocks[i], run.slot));
    in_flight.blocks.insert(slot.blocks[i]);
  }
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
      expect(run.num_rows == 1, "a verify without drafts");
      expect(slot.next_token_known, "a decode of a token that was not sampled");
    } else {
      expect(static_cast<int32_t>(run.tokens.size()) == run.num_rows, "a replay without its tokens");
      expect(begin / kGrid == (end - 1) / kGrid, "a replay crosses a boundary");
      expect(!slot.next_token_known, "a replay of a token that the device sampled");
    }
    slot.prompt_ended = true;
  }
  expect(!run.mask_pending || samples, "a mask for nothing");
  slot.cursor = end;
  slot.next_token_known = samples;
}

// The plan, as the device carries it out.

StepResult FakeWorkers::execute(const StepPlan& plan) {
  control_->begin_step();
  StepResult result{.step = plan.step};
  for (const StateOp& op : plan.state_ops) {
    DeviceSlot& slot = slots_[static_cast<size_t>(op.slot)];
    slot.cursor = 0;
    slot.state = FakeModel::kEmptyState;
    slot.last_token.reset();
  }
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
    if (run.want == Want::kSample || run.sample_after)
      draw(run, slots_[static_cast<size_t>(run.slot)], run.mask_pending ? &masks[run.slot] : nullptr, result.runs[i]);
  }
  if (plan.step == options_.failing_step) {
    result.runs.clear();
    result.error = make_error(ErrorCode::kInternal, "the device fell off the bus");
  }
  return result;
}

void FakeWorkers::compute(const StepRun& run, RunResult& result) {
  DeviceSlot& slot = slots_[static_cast<size_t>(run.slot)];
  result.slot = run.slot;
  if (run.kind == RowKind::kPrompt && run.position[0] != slot.cursor)
    control_->violation("the device's cursor is not where the plan has it");
  for (int32_t row = 0; row < run.num_rows; ++row) {
    const int32_t token = run.tokens.empty() ? slot.last_token.value_or(-1) : run.tokens[static_cast<size_t>(row)];
    if (token < 0 || token >= limits_.vocab_size) control_->violation(fmt::format("token {} is computed", token));
    const int32_t block = slot.block_table[static_cast<size_t>(slot.cursor / kGrid)];
    kv_[static_cast<size_t>(block * kGrid + slot.cursor % kGrid)] = token;
    slot.state = FakeModel::grow(slot.state, token);
    ++slot.cursor;
    if (run.want != Want::kPromptLogprobs) continue;
    const int32_t following = row + 1 < run.num_rows ? run.tokens[static_cast<size_t>(row) + 1] : run.following_token;
    if (following >= 0) result.prompt_logprobs.push_back(model_.logprobs(slot.state, following, run.num_prompt_logprobs));
  }
  slot.last_token.reset();
}

/// The state once more, from the KV blocks: a block that was lost or overwritten shows here.
uint64_t FakeWorkers::state_in_kv(const DeviceSlot& slot) const {
  uint64_t state = FakeModel::kEmptyState;
  for (int32_t i = 0; i < slot.cursor; ++i)
    state = FakeModel::grow(state, kv_[static_cast<size_t>(slot.block_table[static_cast<size_t>(i / kGrid)] * kGrid + i % kGrid)]);
  return state;
}

void FakeWorkers::draw(const StepRun& run, DeviceSlot& slot, const std::vector<uint32_t>* mask, RunResult& result) {
  const uint64_t state = state_in_kv(slot);
  if (state != slot.state) control_->violation(fmt::format("slot {}: KV and recurrent state are not of the same tokens", run.slot));
  const int32_t first_token = kv_[static_cast<size_t>(slot.block_table[0] * kGrid)];
  if (options_.non_finite == std::pair{first_token, static_cast<int32_t>(slot.output.size())}) {
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

}  // namespace quern::engine::testing
