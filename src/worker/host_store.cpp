#include "worker/host_store.h"

namespace quern::worker {
namespace {

uint64_t bytes_of(std::span<const ops::TensorView> parts) {
  uint64_t bytes = 0;
  for (const ops::TensorView& part : parts) bytes += part.size_bytes();
  return bytes;
}

}  // namespace

Result<HostStore> HostStore::allocate(const ExecutionPlan& plan, const Sizes& sizes, ops::Device& device) {
  HostStore store;
  store.block_bytes_ = sizes.block_bytes;
  store.snapshot_bytes_ = sizes.snapshot_bytes;
  const auto blocks = static_cast<uint64_t>(plan.limits.num_host_blocks), snapshots = static_cast<uint64_t>(plan.limits.num_host_snapshots);
  if (blocks * sizes.block_bytes > 0) {
    ASSIGN_OR_RETURN(store.blocks_, device.allocate_host(blocks * sizes.block_bytes, "KV blocks in host memory"));
  }
  if (snapshots * sizes.snapshot_bytes > 0) {
    ASSIGN_OR_RETURN(store.snapshots_, device.allocate_host(snapshots * sizes.snapshot_bytes, "snapshots in host memory"));
  }
  return store;
}

void HostStore::apply(const StateOp& op, const SequenceMemory& memory, ops::Stream& stream) const {
  const bool is_block = op.kind == StateOp::Kind::kBlockToHost || op.kind == StateOp::Kind::kBlockFromHost;
  const bool to_host = op.kind == StateOp::Kind::kBlockToHost || op.kind == StateOp::Kind::kSnapshotToHost;
  const std::vector<ops::TensorView> parts = is_block ? memory.block_parts(op.block) : memory.snapshot_parts(op.snapshot);
  const uint64_t size = is_block ? block_bytes_ : snapshot_bytes_;
  CHECK(bytes_of(parts) == size);
  if (size == 0) return;  // another stage has all of it
  std::byte* place = (is_block ? blocks_ : snapshots_)->address() + static_cast<uint64_t>(op.host) * size;
  for (const ops::TensorView& part : parts) {
    if (to_host) {
      stream.copy_to_host(part, place);
    } else {
      stream.copy_to_device(place, part);
    }
    place += part.size_bytes();
  }
}

}  // namespace quern::worker
