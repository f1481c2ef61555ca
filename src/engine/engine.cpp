#include "engine/engine.h"

#include <utility>

#include "base/check.h"
#include "engine/budget.h"
#include "engine/engine_thread.h"

namespace quern::engine {

std::unique_ptr<Engine> Engine::start(std::unique_ptr<worker::WorkerGroup> workers, const EngineOptions& options) {
  CHECK(workers != nullptr);
  const Budget budget = resolve_budget(options, workers->limits());
  return std::make_unique<EngineThread>(std::move(workers), options, budget);
}

}  // namespace quern::engine
