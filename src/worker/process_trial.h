#pragma once

#include <cstddef>

#include "base/result.h"
#include "worker/processes.h"

namespace quern::worker {

/// Sends patterns there and back between this process and its neighbours in the pipeline, of the sizes that steps will have, and logs how long each takes. Every process calls it at the same
/// time. An error: what did not come, or came changed.
Result<void> try_neighbours(Processes& processes, size_t row_bytes, size_t max_bytes);

}  // namespace quern::worker
