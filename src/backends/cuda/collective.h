#pragma once

#include "ops/transport.h"

// Goals: ranks on GPUs of one host exchange tensors inside kernels, in graphs as well; a wait ends by itself. Non-goals: processes, IPC handles, hosts, NVLink multicast.

namespace quern::cuda {

extern const ops::TransportList kTransports;

/// direct: messages are written into the memory of the GPU that reads them, which every GPU of the group must reach.
Result<ops::Collectives> connect_direct(std::span<ops::Device* const> devices, const ops::CollectiveOptions& options);
/// staged: messages pass through page-locked host memory, which every GPU reaches.
Result<ops::Collectives> connect_staged(std::span<ops::Device* const> devices, const ops::CollectiveOptions& options);

}  // namespace quern::cuda
