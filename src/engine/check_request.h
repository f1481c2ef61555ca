#pragma once

#include "base/result.h"
#include "engine/request.h"
#include "worker/worker_group.h"

namespace quern::engine {

/// kInvalidArgument, with the field's name, for a request that can never run: ids outside the vocabulary, values out of range, more tokens
/// than the window or all KV blocks together hold. What passes here can be scheduled to its end.
Result<void> check_request(const GenerationRequest& request, const worker::WorkerLimits& limits);

}  // namespace quern::engine
