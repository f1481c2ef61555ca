#pragma once

#include <memory>
#include <span>
#include <vector>

#include "ops/kernel_table.h"
#include "worker/plan.h"
#include "worker/sizes.h"

namespace quern::worker {

/// What a device remembers of sequences between steps: KV blocks, recurrent state, hidden windows, sampler tables, snapshots.
/// Owned by the worker; used by its thread alone.
class SequenceMemory {
 public:
  static Result<SequenceMemory> allocate(const ExecutionPlan& plan, const RankPlan& rank, const Sizes& sizes, ops::Device& device, ops::Stream& stream);

  ops::SlotTables tables;
  // Empty before the last stage of a pipeline: `sampler`, and the hidden states.
  ops::SamplerTables sampler;
  std::vector<ops::GdnStateView> gdn;      // by GDN layer
  std::vector<ops::KvCacheView> kv;        // by attention layer; the MTP layer's last
  ops::TensorView hidden_window;           // activation [num_slots, k_max + 2, hidden]: final hidden of index p at p mod (k_max + 2)
  ops::TensorView boundary_hidden;         // activation [num_slots, hidden]: final hidden of index boundary - 1

  /// Copies that make `slot` the state of a new sequence; those that store its last boundary as snapshot `snapshot`, and those that bring one back.
  void clear(int32_t slot, std::vector<ops::StateCopy::Copy>& copies) const;
  void snapshot(int32_t slot, int32_t snapshot, std::vector<ops::StateCopy::Copy>& copies) const;
  void restore(int32_t slot, int32_t snapshot, int32_t boundary, std::vector<ops::StateCopy::Copy>& copies) const;
  /// Those that drop the rows past `slot`'s stored boundary.
  void rewind(int32_t slot, int32_t boundary, std::vector<ops::StateCopy::Copy>& copies) const;
  /// All that belongs to a KV block, and to a snapshot; every part is contiguous.
  [[nodiscard]] std::vector<ops::TensorView> block_parts(int32_t block) const;
  [[nodiscard]] std::vector<ops::TensorView> snapshot_parts(int32_t snapshot) const;
  /// Those that clear the first row of a KV block of the MTP layer.
  void clear_mtp_row(int32_t block, std::vector<ops::StateCopy::Copy>& copies) const;

 private:
  /// Columns and hidden of a boundary to their places in the slot's windows.
  void fill_windows(int32_t slot, int32_t boundary, size_t layer, const ops::TensorView& columns, std::vector<ops::StateCopy::Copy>& copies) const;
  void fill_hidden(int32_t slot, int32_t boundary, const ops::TensorView& hidden, std::vector<ops::StateCopy::Copy>& copies) const;
  Result<ops::TensorView> tensor(ops::Device& device, std::string_view purpose, DType dtype, const Shape& shape);
  std::vector<std::unique_ptr<ops::Buffer>> buffers_;
  /// Snapshots hold state and boundary columns of every GDN layer and the boundary hidden.
  struct SnapshotLayer {
    ops::TensorView state, boundary_columns;
  };
  std::vector<SnapshotLayer> snapshot_layers_;
  ops::TensorView snapshot_hidden_;
  int64_t window_columns_ = 0;
};

}  // namespace quern::worker
