#pragma once

#include "ops/transport.h"

// Goals: where NCCL knows a faster way between GPUs than ours, the same bits over it, with deadlines. Opened at run time: the program neither needs nor links it.

namespace quern::cuda {

/// libnccl.so.2 can be opened, and every rank has a GPU of its own.
ops::Verdict probe_nccl(std::span<ops::Device* const> devices);
Result<ops::Collectives> connect_nccl(std::span<ops::Device* const> devices, const ops::CollectiveOptions& options);

}  // namespace quern::cuda
