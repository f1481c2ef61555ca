#pragma once

#include "ops/transport.h"

// Goals: ranks on OpenCL devices of one host exchange tensors while their queues stay full: the thread that enqueues never waits for another rank. Non-goals: peer memory, which OpenCL does not
// know; processes, hosts.

namespace quern::opencl {

extern const ops::TransportList kTransports;

/// staged: a message goes down into page-locked memory; a thread of each rank sees it arrive, waits for the others, lays their messages into memory of its own driver, and opens the gate for which
/// the copy up waits. The deadline, and an abort, close the gate, so that the queue ends with an error.
Result<ops::Collectives> connect_staged(std::span<ops::Device* const> devices, const ops::CollectiveOptions& options);

}  // namespace quern::opencl
