#pragma once

#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/result.h"
#include "ops/device.h"
#include "ops/found_device.h"
#include "ops/kernel_table.h"
#include "ops/rows.h"
#include "ops/transport.h"

// The only place that names all platforms; only worker/ includes this header.

namespace quern::backends {

const ops::KernelTable& kernel_table(ops::Platform platform);

struct DeviceOptions {
  int num_threads = 0;       // CPU: 0 = one per core, of those that are the device's
  int num_sharing = 1;       // CPU: so many devices share the machine; each has its part of cores and memory
  bool records = false;      // CPU, for tests: its streams say that they can record, so that steps are laid out for replay
  bool quantizes_activations = true;  // FP8 weights may meet FP8 activations where the device multiplies them (DeviceTraits::fp8_matrix)
  bool inspectable = false;  // for tests: TensorView::data() is readable on the host, and a launch has ended when enqueue returns
};

/// Opens one device by name: "cpu" or "cpu:N" (a group of threads with memory of its own), "cuda:0", "opencl:0", "opencl-emulated:0" (for tests: kernels for Xe2 with its matrix units spelled out), "cuda-emulated:0" (for tests: a newer GPU taken for
/// one of sm_89). Errors say what is missing (driver, card, build) and what would work.
Result<std::unique_ptr<ops::Device>> open_device(std::string_view name, const DeviceOptions& options);

/// A device that exists in numbers only: it counts what it would allocate, and kernels made for it say how much memory they want. Nothing can be enqueued or packed. Of a CPU
/// `num_threads` are imagined, or as many as it has cores where that is 0.
std::unique_ptr<ops::Device> imagine_device(const ops::DeviceTraits& traits, int num_threads);

/// How devices of a platform can exchange messages, in order of preference.
const ops::TransportList& transports(ops::Platform platform);

/// Joins devices of one platform, rank r on devices[r]: one end per rank, each used by the thread of its rank. `options.transport` or an error with the reason; where it is empty, the first
/// that works. The devices, and what ranks show each other, outlive the last call of every rank.
Result<ops::Collectives> connect(std::span<ops::Device* const> devices, const ops::CollectiveOptions& options);

/// As connect(), timed with each number of rows of options.row_bytes, with what every transport showed. That none works is no error here.
Result<ops::Connection> try_transports(std::span<ops::Device* const> devices, const ops::CollectiveOptions& options, std::span<const int64_t> row_counts);

/// Traits of a device that this machine may lack, for planning: "cpu", "h200", "b60", "b70", ... or a device name of this machine.
Result<ops::DeviceTraits> traits_by_name(std::string_view name);
/// Names that traits_by_name knows without looking at the machine.
std::vector<std::string_view> known_cards();

/// Instructions of 16 lanes that a card's engines issue in a second; 0: not known of this one.
double issue_rate(const ops::DeviceTraits& traits);
/// What it takes to bring a packed weight past some rows, by the machine code that a candidate compiles to.
struct WeightPass {
  double slots_per_byte = 0;  // issue slots of an engine for a byte and `turn_rows` rows
  int turn_rows = 0;
  int read_rows = 0;          // rows for which the byte is read once
};
/// Nothing is declared for most candidates. The code must be of the sources of this build, which a test of the platform sees to.
std::optional<WeightPass> weight_pass(std::string_view candidate, DType weight, ops::RowKind kind, int64_t num_rows);

/// What a candidate of gdn_mix takes for a chunk of prompt rows, likewise.
struct ChunkPass {
  int rows = 0;
  double slots_per_head = 0;             // of q, k and v each
  double slots_per_value_head = 0;       // besides, whichever chunk
  double walk_slots_per_value_head = 0;  // where chunks follow each other
};
/// Nothing for candidates that compute rows one after the other.
std::optional<ChunkPass> gdn_chunk_pass(std::string_view candidate, DType ring);
/// And for rows that it computes one after the other, `rows_each` of a sequence.
struct RowPass {
  double slots_per_run = 0, slots_per_row = 0;  // of a value head
  double slots_per_row_of_head = 0;             // of q and k each, besides
  double slots_per_channel = 0;                 // of a run, besides
  int launches = 0;                             // more than the candidate declares for decode rows
};
std::optional<RowPass> gdn_row_pass(std::string_view candidate, DType ring, ops::RowKind kind, int64_t rows_each);

/// How a candidate of gdn_mix keeps S beside a ring of this type.
ops::GdnStateLayout gdn_state_layout(std::string_view candidate, DType ring);

/// Issue slots of an engine that a candidate of attention takes for a decode row with `keys` keys and one kv head.
struct AttentionPass {
  int64_t sub_groups = 0;  // that have keys, each on an engine of its own where there are as many
  double slots = 0;        // of the one that ends last
};
/// Nothing for candidates whose machine code nobody counted.
std::optional<AttentionPass> attention_decode_pass(std::string_view candidate, DType cache, int64_t keys);

/// Whether the device's matrix units take half subnormals for zeros; nothing where its kernels use none.
Result<std::optional<bool>> flushes_half_subnormals(ops::Device& device);

/// One line about every device of this machine, and one per platform that has none, with the reason.
std::vector<std::string> describe_devices();
/// What the NVIDIA driver lists, in the order of cuda:0, cuda:1, ... Error: there is no driver, or it lists nothing.
Result<std::vector<ops::FoundDevice>> cuda_devices();
/// What the OpenCL loader lists, in the order of opencl:0, opencl:1, ... Error: there is no loader, or it lists nothing.
Result<std::vector<ops::FoundDevice>> opencl_devices();

}  // namespace quern::backends
