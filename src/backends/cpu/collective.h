#pragma once

#include <cstddef>
#include <functional>

#include "ops/host_slots.h"
#include "ops/transport.h"

// Goals: ranks on one host exchange tensors at the speed of its memory; the same bits on both ways; no wait without an end. Non-goals: processes, hosts.
// A call is a meeting of the ranks' threads, since CPU streams compute at enqueue.

namespace quern::cpu {

extern const ops::TransportList kTransports;

/// direct: ranks meet, read each other's tensors in place, and part when all have read. What is sent to one rank lies in the sender's memory until it is read, so that a stage of a pipeline goes on.
Result<ops::Collectives> connect_direct(std::span<ops::Device* const> devices, const ops::CollectiveOptions& options);

/// staged: messages pass through slots with number and checksum, in pieces of max_message_bytes. `before_publishing`, for tests, sees a message of `rank` in its slot.
using SlotHook = std::function<void(int32_t rank, const ops::SlotHeader& header, std::byte* data)>;
Result<ops::Collectives> connect_staged(std::span<ops::Device* const> devices, const ops::CollectiveOptions& options, SlotHook before_publishing);

}  // namespace quern::cpu
