#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <tuple>
#include <vector>

#include "engine/event_channel.h"
#include "engine/index_pool.h"
#include "engine/request.h"

namespace quern::engine {

/// Tokens of a KV block, which is also the grid on which prompts are cut (architecture.md section 4).
inline constexpr int32_t kBlockSize = ops::kGrid;

/// Blocks that hold the KV of so many rows.
constexpr int64_t num_blocks_for(int64_t num_rows) { return (num_rows + kBlockSize - 1) / kBlockSize; }
/// Rows that a request computes: the token that comes last is not fed back.
constexpr int64_t num_rows_at_most(int64_t prompt_tokens, int64_t max_tokens) {
  return prompt_tokens + (max_tokens > 0 ? max_tokens - 1 : 0);
}

enum class SequenceState : uint8_t {
  kWaiting,   // holds nothing on the device
  kRunning,   // in the schedule
  kLeaving,   // preempted; a step in flight still names it, and its tokens count
  kFinished,  // the consumer has its finish; a step in flight still names it, and its rows are discarded
};

/// A request being served. Owned by the scheduler, used by the engine thread alone.
///
/// Row r of a sequence takes the token at index r. Rows 0 .. prompt - 1 are P rows; the generated tokens follow as D rows. After preemption
/// the host gives the tokens that it has already (`num_replayed`); all later ones are taken from the device, which knows them before the
/// host does.
struct Sequence {
  uint64_t id = 0;  // order of arrival
  GenerationRequest request;
  std::shared_ptr<EventChannel> events;

  // What is known.
  std::vector<int32_t> generated;
  std::vector<TokenLogprobs> prompt_logprobs;  // collected until the prompt's end
  int32_t token_limit = 0;                     // max_tokens, or less once a stop string matched
  bool stopped = false;                        // token_limit comes from a stop string

  // What is planned; ahead of what is known by the steps in flight.
  SequenceState state = SequenceState::kWaiting;
  int32_t planned_rows = 0;    // the device's cursor after the last step in flight
  int32_t planned_tokens = 0;  // generated tokens once the steps in flight are done
  int32_t num_replayed = 0;    // generated tokens that were known when the sequence was (re)admitted
  int32_t steps_in_flight = 0;

  // What it holds.
  std::optional<StateSlot> slot;
  std::vector<BlockRef> blocks;
  int32_t num_blocks_sent = 0;  // of `blocks`, in a plan's block table updates
  bool slot_sent = false;       // the slot was cleared and given its parameters in a plan

  [[nodiscard]] int32_t num_prompt() const { return static_cast<int32_t>(request.prompt.size()); }
  [[nodiscard]] int32_t num_generated() const { return static_cast<int32_t>(generated.size()); }
  [[nodiscard]] int32_t num_blocks() const { return static_cast<int32_t>(blocks.size()); }
  /// Rows whose tokens the host gives.
  [[nodiscard]] int32_t num_given() const { return num_prompt() + num_replayed; }
  [[nodiscard]] bool in_prompt() const { return planned_rows < num_prompt(); }
  [[nodiscard]] bool in_replay() const { return !in_prompt() && planned_rows < num_given(); }
  /// The token of the next row will be on the device, and one more is wanted.
  [[nodiscard]] bool can_decode() const { return planned_rows >= num_given() && planned_tokens < token_limit; }
  /// The log-probabilities of the prompt are reported with its end; a replay does not need them again.
  [[nodiscard]] bool wants_prompt_logprobs() const { return request.prompt_logprobs >= 0 && num_replayed == 0; }
  [[nodiscard]] int64_t num_blocks_at_most() const { return num_blocks_for(num_rows_at_most(num_prompt(), token_limit)); }
};

/// The order in which sequences run: priority, then arrival.
inline bool runs_before(const Sequence& a, const Sequence& b) {
  return std::tie(a.request.priority, a.id) < std::tie(b.request.priority, b.id);
}

}  // namespace quern::engine
