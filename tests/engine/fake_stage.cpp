#include "engine/fake_stage.h"

#include <algorithm>

#include "base/hash.h"

namespace quern::engine::testing {

using worker::RowKind;
using worker::RunResult;
using worker::StateOp;
using worker::StepPlan;
using worker::StepResult;
using worker::StepRun;
using worker::Want;

namespace {

constexpr int32_t kGrid = 64;

bool samples(const StepRun& run) { return run.want == Want::kSample || run.sample_after; }

}  // namespace

FakeStage::FakeStage(const worker::WorkerLimits& limits, std::optional<std::pair<int32_t, int32_t>> non_finite,
                     std::function<void(std::string)> violation)
    : limits_(limits),
      non_finite_(non_finite),
      violation_(std::move(violation)),
      model_(limits.vocab_size),
      slots_(static_cast<size_t>(limits.num_slots)),
      snapshots_(static_cast<size_t>(limits.num_snapshots)),
      host_snapshots_(static_cast<size_t>(limits.num_host_snapshots)),
      kv_(static_cast<size_t>(limits.num_blocks) * kGrid, -1),
      host_kv_(static_cast<size_t>(limits.num_host_blocks) * kGrid, -1) {}

void FakeStage::compute(const StepPlan& plan, StepResult& result) {
  for (const StateOp& op : plan.state_ops) apply(op);
  for (const worker::SlotUpdate& update : plan.slot_updates) {
    Slot& slot = slots_[static_cast<size_t>(update.slot)];
    slot.sampling = update.sampling;
    slot.prompt_ids = update.prompt_ids;
    slot.output = update.output_ids;
  }
  for (const worker::BlockTableUpdate& update : plan.block_table_updates) {
    std::vector<int32_t>& table = slots_[static_cast<size_t>(update.slot)].block_table;
    table.resize(static_cast<size_t>(update.first_block));
    table.insert(table.end(), update.blocks.begin(), update.blocks.end());
  }
  for (const StepRun& run : plan.runs) {
    compute(run, result.runs.emplace_back());
    result.computed_rows += run.num_rows;
  }
  for (const StepRun& run : plan.runs) {
    const Slot& slot = slots_[static_cast<size_t>(run.slot)];
    if (samples(run) && state_in_kv(slot, slot.cursor) != slot.state)
      violation_(fmt::format("slot {}: KV and recurrent state are not of the same tokens", run.slot));
  }
}

void FakeStage::apply(const StateOp& op) {
  Slot& slot = slots_[static_cast<size_t>(op.slot)];
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
      violation_(fmt::format("slot {} is copied at {}, but its state stands at {}", op.slot, op.boundary, slot.boundary));
    snapshot = {slot.boundary, slot.boundary_state};
    return;
  }
  if (snapshot.boundary != op.boundary)
    violation_(fmt::format("snapshot {} of {} is restored as {}", op.snapshot, snapshot.boundary, op.boundary));
  slot.cursor = slot.boundary = op.boundary;
  slot.state = slot.boundary_state = snapshot.state;
}

void FakeStage::compute(const StepRun& run, RunResult& result) {
  Slot& slot = slots_[static_cast<size_t>(run.slot)];
  result.slot = run.slot;
  if (run.kind == RowKind::kPrompt && run.position[0] != slot.cursor) violation_("the device's cursor is not where the plan has it");
  if (slot.cursor / kGrid * kGrid > slot.boundary) {  // a fold that a verify has left
    slot.boundary = slot.cursor / kGrid * kGrid;
    slot.boundary_state = state_in_kv(slot, slot.boundary);
  }
  if (run.verify()) {
    const std::vector<int32_t>& drafts = run.drafts.empty() ? slot.drafts : run.drafts;
    slot.verified = {slot.last_token.value_or(-1)};
    slot.verified.insert(slot.verified.end(), drafts.begin(), drafts.begin() + (run.num_rows - 1));
    for (int32_t i = 0; i < run.num_rows; ++i) kv_of(slot, slot.cursor + i) = slot.verified[static_cast<size_t>(i)];
    return;
  }
  for (int32_t row = 0; row < run.num_rows; ++row) {
    const int32_t token = run.tokens.empty() ? slot.last_token.value_or(-1) : run.tokens[static_cast<size_t>(row)];
    if (token < 0 || token >= limits_.vocab_size) violation_(fmt::format("token {} is computed", token));
    kv_of(slot, slot.cursor) = token;
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

int32_t& FakeStage::kv_of(const Slot& slot, int32_t row) {
  return kv_[static_cast<size_t>(slot.block_table[static_cast<size_t>(row / kGrid)] * kGrid + row % kGrid)];
}

/// The state once more, from the KV blocks: a block that was lost or overwritten shows here.
uint64_t FakeStage::state_in_kv(const Slot& slot, int32_t num_rows) const {
  uint64_t state = FakeModel::kEmptyState;
  for (int32_t i = 0; i < num_rows; ++i)
    state = FakeModel::grow(state, kv_[static_cast<size_t>(slot.block_table[static_cast<size_t>(i / kGrid)] * kGrid + i % kGrid)]);
  return state;
}

void FakeStage::draw(const StepPlan& plan, const Masks& masks, StepResult& result) {
  for (size_t i = 0; i < plan.runs.size(); ++i) {
    const StepRun& run = plan.runs[i];
    if (run.mask_pending && !masks.contains(run.slot)) violation_(fmt::format("step {}: no mask for slot {}", plan.step, run.slot));
    const auto mask = masks.find(run.slot);
    const std::vector<uint32_t>* allowed = mask == masks.end() || !run.mask_pending ? nullptr : &mask->second;
    Slot& slot = slots_[static_cast<size_t>(run.slot)];
    if (run.verify()) {
      verify(slot, allowed, result.runs[i]);
    } else if (samples(run)) {
      draw(slot, allowed, result.runs[i]);
    }
    learn(run, slot, result.runs[i]);
    propose(run, slot, result.runs[i]);
    slot.drafts = result.runs[i].drafts;
  }
}

void FakeStage::learn(const StepPlan& plan, const StepResult& result) {
  for (size_t i = 0; i < plan.runs.size(); ++i) learn(plan.runs[i], slots_[static_cast<size_t>(plan.runs[i].slot)], result.runs[i]);
}

void FakeStage::learn(const StepRun& run, Slot& slot, const RunResult& result) {
  slot.drafts = result.drafts;
  if (result.non_finite) slot.last_token = 0;
  if (result.tokens.empty()) return;
  slot.output.insert(slot.output.end(), result.tokens.begin(), result.tokens.end());
  slot.last_token = result.tokens.back();
  if (!run.verify()) return;
  for (size_t i = 0; i < result.tokens.size(); ++i) slot.state = FakeModel::grow(slot.state, slot.verified[i]);
  slot.cursor += static_cast<int32_t>(result.tokens.size());
}

void FakeStage::draw(const Slot& slot, const std::vector<uint32_t>* mask, RunResult& result) const {
  if (is_non_finite(slot)) {
    result.non_finite = true;
    return;
  }
  const int32_t token = model_.next(slot.state, {slot.sampling, slot.prompt_ids, slot.output}, [&](int32_t candidate) {
    return mask == nullptr || ((*mask)[static_cast<size_t>(candidate / 32)] >> (candidate % 32) & 1) != 0;
  });
  result.tokens = {token};
  if (slot.sampling.num_logprobs >= 0) result.logprobs = {model_.logprobs(slot.state, token, slot.sampling.num_logprobs)};
}

bool FakeStage::is_non_finite(const Slot& slot) const {
  const int32_t first_token = kv_[static_cast<size_t>(slot.block_table[0] * kGrid)];
  return non_finite_ == std::pair{first_token, static_cast<int32_t>(slot.output.size())};
}

/// Drafts behind the last token: each is compared with what is drawn in its place.
void FakeStage::verify(Slot& slot, const std::vector<uint32_t>* masks, RunResult& result) const {
  const std::vector<int32_t>& tokens = slot.verified;
  const size_t num_words = (static_cast<size_t>(limits_.vocab_size) + 31) / 32, known = slot.output.size();
  uint64_t state = slot.state;
  for (size_t i = 0; i < tokens.size(); ++i) {
    if (is_non_finite(slot)) {
      slot.output.resize(known);
      result = {.slot = result.slot, .non_finite = true};
      return;
    }
    state = FakeModel::grow(state, tokens[i]);
    const int32_t token = model_.next(state, {slot.sampling, slot.prompt_ids, slot.output}, [&](int32_t candidate) {
      return masks == nullptr || ((*masks)[i * num_words + static_cast<size_t>(candidate / 32)] >> (candidate % 32) & 1) != 0;
    });
    result.tokens.push_back(token);
    if (slot.sampling.num_logprobs >= 0) result.logprobs.push_back(model_.logprobs(state, token, slot.sampling.num_logprobs));
    slot.output.push_back(token);
    const std::vector<int32_t>& stops = slot.sampling.stop_ids;
    if (std::find(stops.begin(), stops.end(), token) != stops.end()) break;
    if (i + 1 < tokens.size() && token != tokens[i + 1]) break;
  }
  slot.output.resize(known);
  result.num_draft_rows = static_cast<int32_t>(tokens.size()) - 1;
}

/// Drafts as a head would make them: most of them are what the model says.
void FakeStage::propose(const StepRun& run, const Slot& slot, RunResult& result) const {
  if (run.propose == worker::DraftMethod::kNone || result.non_finite) return;
  uint64_t state = slot.state;
  std::vector<int32_t> output = slot.output;
  int32_t last = slot.last_token.value_or(0);
  for (int32_t i = 0; i < run.propose_depth; ++i) {
    state = FakeModel::grow(state, last);
    last = model_.next(state, {slot.sampling, slot.prompt_ids, output}, [](int32_t) { return true; });
    if (mix64(state) % 4 == 0) last = (last + 1) % limits_.vocab_size;
    output.push_back(last);
    result.drafts.push_back(last);
  }
}

}  // namespace quern::engine::testing
