#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <optional>

#include "base/result.h"
#include "engine/prefix_cache_options.h"
#include "engine/request.h"
#include "engine/speculation_options.h"
#include "engine/speculator.h"
#include "worker/worker_group.h"

namespace quern::engine {

struct EngineOptions {
  int32_t max_num_seqs = 0;            // 0: as many as the workers have slots
  int32_t max_num_batched_tokens = 0;  // rows of one step; 0: the workers' limit
  int32_t max_queue_len = 1024;        // waiting requests; one more is refused with kResourceExhausted
  int32_t steps_in_flight = 2;         // 1: synchronous; 2: step n + 1 is enqueued before step n's tokens arrive. Workers that form a pipeline get as many as keep its stages busy
  int32_t long_prefill_token_threshold = 0;  // rows of one prompt in a step, at most; 0: as many as there is room for
  PrefixCacheOptions prefix_cache;
  SpeculationOptions speculation;
};

/// Steps are counted by how many rows they compute: at most 1, 8, 16, ... or more than all of these.
inline constexpr std::array<int64_t, 13> kStepRowBounds{1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384};

/// Counters and gauges, sampled at one moment.
struct EngineStats {
  int32_t num_running = 0, num_waiting = 0;
  int32_t num_blocks = 0, num_free_blocks = 0, num_cached_blocks = 0;  // free ones include those that only the prefix cache holds
  int32_t num_snapshots = 0, num_snapshots_used = 0;
  int32_t num_slots = 0, num_free_slots = 0;
  uint64_t num_steps = 0, num_preemptions = 0;
  uint64_t prompt_tokens = 0, generation_tokens = 0;  // of finished requests, as counted in their usage
  uint64_t unfinished_generation_tokens = 0;          // generated so far for the others
  uint64_t prefix_queried_tokens = 0, prefix_hit_tokens = 0;  // of prompts, when they were admitted
  uint64_t prefix_evictions = 0;
  uint64_t prefix_host_tokens = 0;                       // of the hits, those whose KV came back from host memory
  int32_t num_host_blocks = 0, num_host_blocks_used = 0;
  uint64_t num_swapped = 0, num_recomputed = 0;          // of the preempted: resumed from host memory, or computed again
  SpeculationCounts speculation;
  int32_t max_draft_tokens = 0;  // of a sequence and step
  uint64_t computed_rows = 0, discarded_rows = 0, gathered_rows = 0;  // the last: sampled from logits that ranks exchanged whole
  std::array<uint64_t, kStepRowBounds.size() + 1> steps_by_rows{};
  uint64_t requests_stop = 0, requests_length = 0, requests_cancelled = 0, requests_error = 0;
  double device_seconds = 0, host_seconds = 0;  // time in steps, and of the engine thread between them
};

/// Owns sequences, blocks, slots and plans on one thread of its own. All member functions are thread-safe.
class Engine {
 public:
  static std::unique_ptr<Engine> start(std::unique_ptr<worker::WorkerGroup> workers, const EngineOptions& options);
  virtual ~Engine() = default;

  /// kInvalidArgument for a request that can never run (an empty prompt, ids outside the vocabulary, a prompt over the window: all three
  /// numbers), kResourceExhausted when the queue is full, kUnavailable while draining or after a fatal device error.
  virtual Result<std::unique_ptr<RequestStream>> submit(GenerationRequest request) = 0;
  [[nodiscard]] virtual EngineStats stats() const = 0;
  [[nodiscard]] virtual const worker::WorkerLimits& limits() const = 0;
  /// No new requests; returns when the running ones are done or `timeout_ms` has passed (the rest is then cancelled).
  virtual void drain(int64_t timeout_ms) = 0;
  /// Empty while healthy; else what broke.
  [[nodiscard]] virtual std::optional<Error> failure() const = 0;
};

}  // namespace quern::engine
