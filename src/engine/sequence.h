#pragma once

#include <chrono>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#include "engine/event_channel.h"
#include "engine/index_pool.h"
#include "engine/prefix_index.h"
#include "engine/request.h"

namespace quern::engine {

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

/// The last boundary at or before a row.
constexpr int32_t boundary_before(int32_t row) { return row / kBlockSize * kBlockSize; }

/// A run of a step in flight, as far as it moves the device's cursor.
struct RunInFlight {
  uint64_t step = 0;
  int32_t num_rows = 0;
  bool verify = false;   // commits 1 to num_rows of its rows; all others commit all
  bool samples = false;
  [[nodiscard]] int32_t num_tokens_at_most() const { return !samples ? 0 : verify ? num_rows : 1; }
};

/// What the prefix cache knows of a sequence.
struct SequencePrefix {
  std::vector<uint8_t> prompt_rows;       // of each block that came from the cache: how many of its rows were computed as P
  std::optional<SnapshotRef> restore;     // the state to begin with, until the step that brings it back is planned
  std::vector<int32_t> cuts;              // boundaries of the prompt whose states are to be kept, ascending
  int32_t kept_boundary = 0;              // the last whose state is in the cache
  std::vector<std::pair<PrefixIndex::EntryId, int32_t>> entries;  // what this sequence has put there, and the boundaries
  int32_t proven_rows = 0;                // tokens were drawn from finite logits up to the last of these rows
  std::optional<SnapshotRef> fallback;    // the state of `fallback_boundary`, the boundary of the output before the one in the slot
  int32_t fallback_boundary = 0;
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

  std::chrono::steady_clock::time_point submitted = std::chrono::steady_clock::now();
  std::optional<std::chrono::steady_clock::time_point> first_admitted;

  // What is known.
  std::vector<int32_t> generated;
  std::vector<TokenLogprobs> prompt_logprobs;  // collected until the prompt's end
  int32_t token_limit = 0;                     // max_tokens, or less once a stop string matched
  bool stopped = false;                        // token_limit comes from a stop string

  // What is planned; ahead of what is known by the steps in flight.
  SequenceState state = SequenceState::kWaiting;
  int32_t planned_rows = 0;    // the device's cursor after the last step in flight, at most
  int32_t planned_tokens = 0;  // generated tokens once the steps in flight are done, at most
  int32_t num_replayed = 0;    // generated tokens that were known when the sequence was (re)admitted
  int32_t known_rows = 0;      // the device's cursor after the last step that is over
  int32_t known_boundary = 0;  // and where its recurrent state then stood
  std::deque<RunInFlight> in_flight;  // oldest first
  int32_t num_drafts = 0;      // that the device will hold after the last step in flight
  std::vector<int32_t> last_drafts;   // made by the last step that is over, as far as it told
  bool interrupted = false;    // cancelled by its consumer, who may not have read all tokens
  bool faulty = false;         // its logits were not finite: nothing of it is kept

  // What it holds.
  std::optional<StateSlot> slot;
  std::vector<BlockRef> blocks;
  int32_t num_blocks_sent = 0;  // of `blocks`, in a plan's block table updates
  bool slot_sent = false;       // the slot was cleared and given its parameters in a plan

  SequencePrefix prefix;
  std::optional<int32_t> cached_tokens;  // prompt tokens whose rows were not computed; once it was admitted

  [[nodiscard]] int32_t num_prompt() const { return static_cast<int32_t>(request.prompt.size()); }
  [[nodiscard]] int32_t num_generated() const { return static_cast<int32_t>(generated.size()); }
  [[nodiscard]] int32_t num_blocks() const { return static_cast<int32_t>(blocks.size()); }
  /// Tokens that the host knows.
  [[nodiscard]] int32_t num_known() const { return num_prompt() + num_generated(); }
  /// Rows whose tokens the host gives.
  [[nodiscard]] int32_t num_given() const { return num_prompt() + num_replayed; }
  [[nodiscard]] bool in_prompt() const { return planned_rows < num_prompt(); }
  [[nodiscard]] bool in_replay() const { return !in_prompt() && planned_rows < num_given(); }
  /// The token of the next row will be on the device, and one more is wanted.
  [[nodiscard]] bool can_decode() const { return planned_rows >= num_given() && planned_tokens < token_limit; }
  /// The log-probabilities of the prompt are reported with its end; a replay does not need them again.
  [[nodiscard]] bool wants_prompt_logprobs() const { return request.prompt_logprobs >= 0 && num_replayed == 0; }
  [[nodiscard]] int64_t num_blocks_at_most() const { return num_blocks_for(num_rows_at_most(num_prompt(), token_limit)); }
  /// Where the recurrent state in the slot will stand after the steps in flight, when that is certain: a verify stores no fold past the
  /// cursor that it begins at, every other run all that it passes (ops/gdn_mix.h).
  [[nodiscard]] std::optional<int32_t> stored_boundary() const {
    int32_t least = known_rows, most = known_rows, stored_least = known_boundary, stored_most = known_boundary;
    for (const RunInFlight& run : in_flight) {
      const int32_t before_least = least, before_most = most;
      least += run.verify ? 1 : run.num_rows;
      most += run.num_rows;
      stored_least = boundary_before(run.verify ? before_least : least);
      stored_most = boundary_before(run.verify ? before_most : most);
    }
    if (stored_least != stored_most) return std::nullopt;
    return stored_least;
  }
};

/// The order in which sequences run: priority, then arrival.
inline bool runs_before(const Sequence& a, const Sequence& b) {
  return std::tie(a.request.priority, a.id) < std::tie(b.request.priority, b.id);
}

}  // namespace quern::engine
