#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "base/result.h"
#include "ops/device.h"
#include "worker/slot_values.h"
#include "worker/step.h"
#include "worker/worker_group.h"

// What the processes that serve one model together tell each other, and how it looks as bytes. Both ends are the same build on machines of the same byte order; what is not is refused by
// its header. The rows that go from stage to stage are no message of this kind: see stage_link.h.

namespace quern::worker {

/// Counts the forms that messages have had. Another number is another language.
inline constexpr uint16_t kWireVersion = 1;

/// What a process says of itself before anything is planned, and again of its plan.
struct Statement {
  std::optional<Error> error;  // it cannot take part
  std::string host;
  std::vector<std::pair<std::string, std::string>> facts;  // what all processes have to have in common: its name, its value
  std::vector<std::string> devices;                        // of its ranks
  std::vector<ops::DeviceTraits> traits;
};
/// Process 0's answer to everybody: all statements, or why they cannot work together.
struct Verdict {
  std::optional<Error> error;
  std::vector<Statement> all;
};

/// There is nothing else to say. Both ends say it at times, so that a silent one is known to be lost.
struct Alive {
  double loaded = 0;  // share of the process's weights that is packed
};
/// The process's ranks have loaded and take steps.
struct Started {};
/// What sampling has changed of a slot that a step names: an entry of SlotValues.
struct SlotEntry {
  int32_t slot = 0, cursor = 0, boundary = 0, last_token = 0;
  std::vector<int32_t> drafts;
};
/// A step for the ranks of another process.
struct SentStep {
  StepPlan plan;
  std::vector<SlotEntry> slots;
};
/// No more steps come.
struct EndOfSteps {};
/// All steps that came are done, and nothing follows.
struct Ended {};
/// A rank has failed: nothing goes on.
struct Abort {
  Error error;
};

using Message = std::variant<Statement, Verdict, Alive, Started, SentStep, StepMasks, StepResult, EndOfSteps, Ended, Abort>;

using Bytes = std::vector<std::byte>;

/// A header of 24 bytes (whose kind of message, which version, how many bytes, their checksum), then the values.
[[nodiscard]] Bytes to_bytes(const Message& message);

/// kInternal where the bytes are not such a message, to the last, or have changed on the way.
Result<Message> message_from_bytes(std::span<const std::byte> bytes);

/// The entries of the slots that a step names.
std::vector<SlotEntry> named_slots(const StepPlan& plan, const SlotValues& values);
void set_slots(SlotValues& values, std::span<const SlotEntry> entries);

/// That a step names only slots, blocks, rows and tokens that there are.
Result<void> check_step(const SentStep& step, const WorkerLimits& limits);
/// That masks are whole rows of slots that there are.
Result<void> check_masks(const StepMasks& masks, const WorkerLimits& limits);
/// That a result without an error is one of that plan.
Result<void> check_result(const StepResult& result, const StepPlan& plan, const WorkerLimits& limits);

}  // namespace quern::worker
