#pragma once

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>

#include "ops/collective.h"
#include "weights/source.h"

namespace quern::worker {

enum class ModelDType : uint8_t { kAuto, kBFloat16, kFloat32 };
/// What the MTP head's drafts are picked with: lm_head itself, or an FP8 copy, which is read in half the time or less.
enum class DraftHead : uint8_t { kAuto, kFp8, kModel };
enum class KvCacheDType : uint8_t { kAuto, kBFloat16, kFp8 };
enum class RingDType : uint8_t { kAuto, kBFloat16, kFloat32 };

/// So many kinds of step are kept recorded: device memory that is planned with what the driver takes.
inline constexpr int32_t kMaxRecordedSteps = 96;

/// Everything that decides how a model runs; the same values give the same plan.
struct WorkerOptions {
  std::filesystem::path model_dir;
  std::string device = "cpu";          // "cpu", "cuda:0", ...; of every rank, as in "cuda:0,cuda:1", or of the first; for plans also the name of a card: "b60", "h200", ...
  weights::LoadOptions load;
  ModelDType dtype = ModelDType::kAuto;               // auto: bf16
  KvCacheDType kv_cache_dtype = KvCacheDType::kAuto;  // auto: the activation dtype, or fp8 where the checkpoint declares it
  RingDType ring_dtype = RingDType::kAuto;            // of keys and updates since the last boundary; auto: the activation dtype
  int32_t max_model_len = 0;           // 0: the model's, or as much as fits
  int32_t max_num_seqs = 0;            // 0: 64, or as many as fit
  int32_t max_num_batched_tokens = 0;  // 0: 2048 (CPU: 512)
  int32_t max_logit_rows = 0;          // with a place for their logits at once, one verify at least; 0: those of all verifies up to 256, one of each sequence up to 1024, but 64
  int32_t k_max = 4;                   // drafts that a verify may hold
  DraftHead draft_head = DraftHead::kAuto;  // auto: fp8 on NVIDIA cards where it takes a small part of what weights leave
  int32_t num_snapshots = -1;          // stored boundaries kept aside; -1: as many as a share of the memory holds, 0: none
  uint64_t host_cache_bytes = 0;       // host memory for KV blocks and snapshots that the device has no place for
  double memory_utilization = 0.9;     // share of the device's memory that may be used
  std::optional<uint64_t> kv_cache_memory_bytes;
  int32_t tp_size = 1, pp_size = 1;    // ranks that share each layer, and stages of layers
  ops::CollectiveOptions collective;   // how ranks reach each other; its deadline and sizes follow from the plan
  std::chrono::milliseconds collective_timeout{0};  // that a rank waits for another; 0: 10 s, a minute on a CPU
  std::chrono::milliseconds step_timeout{0};  // that a device may take for a step; 0: two minutes, on a CPU, or a device of a kind that is not known, twenty
  std::function<std::unique_ptr<ops::Stream>(std::unique_ptr<ops::Stream>)> wrap_stream = {};  // for tests of faults: what the stream of each rank's steps is replaced by
  bool quantize_activations = true;    // where the device multiplies FP8 by FP8
  bool enforce_eager = false;          // launches are not recorded and replayed
  int32_t max_recorded_steps = kMaxRecordedSteps;  // 5 at least; of more kinds of step the one that has not been used for longest is recorded anew when it comes again
  int32_t num_threads = 0;             // CPU, of each rank: 0 = one per core, shared out among the ranks
  std::map<std::string, std::string, std::less<>> kernels;  // op -> candidate that must be used
};

}  // namespace quern::worker
