#include "worker/rank_memory.h"

#include "backends/platforms.h"
#include "ops/counted_memory.h"
#include "worker/problems.h"

namespace quern::worker {
namespace {

/// Weights of an op that no kernel takes.
uint64_t stored_bytes(const ops::Embed::Problem& p) { return ops::LinearShape{p.vocab_size, p.hidden, p.scheme}.packed_bytes(); }
uint64_t stored_bytes(const ops::AttnIn::Problem& p) { return p.q.packed_bytes() + p.k.packed_bytes() + p.v.packed_bytes(); }
uint64_t stored_bytes(const ops::GdnIn::Problem& p) { return p.qkv.packed_bytes() + p.z.packed_bytes() + p.b.packed_bytes() + p.a.packed_bytes(); }
uint64_t stored_bytes(const ops::LinearResidual::Problem& p) { return p.linear.packed_bytes(); }
uint64_t stored_bytes(const ops::MlpIn::Problem& p) { return p.gate.packed_bytes() + p.up.packed_bytes(); }
uint64_t stored_bytes(const ops::MtpIn::Problem& p) { return p.fc.packed_bytes(); }
uint64_t stored_bytes(const ops::Head::Problem& p) { return p.tied ? 0 : p.lm_head.packed_bytes(); }
template <class Problem>
uint64_t stored_bytes(const Problem&) {
  return 0;
}

/// Allocates what every op of a rank packs its weights into.
struct WeightAllocator {
  KernelCache& kernels;
  ops::Device& device;
  uint64_t stored = 0;  // of ops without kernel
  std::vector<std::unique_ptr<ops::Buffer>> packed;

  void allocate(size_t size_bytes) {
    if (auto buffer = device.allocate(size_bytes, "weights")) packed.push_back(std::move(*buffer));
  }
  template <class Op>
  void operator()(const typename Op::Problem& problem, const std::string& /*wanted_by*/) {
    if (const auto kernel = kernels.get<Op>(problem)) {
      allocate((*kernel)->packed_bytes());
    } else {
      stored += stored_bytes(problem);
    }
  }
};

}  // namespace

Result<RankMemory> RankMemory::allocate(const ExecutionPlan& plan, const RankPlan& rank, const KernelCache& kernels, ops::Device& device, ops::Stream& stream) {
  const Sizes sizes(rank.config, rank.shard, plan.numerics(), plan.with_mtp);
  RankMemory memory;
  ASSIGN_OR_RETURN(memory.sequences, SequenceMemory::allocate(plan, rank, sizes, device, stream));
  ASSIGN_OR_RETURN(memory.host, HostStore::allocate(plan, sizes, device));
  const size_t workspace = kernels.workspace_bytes(std::max(plan.limits.max_rows, plan.max_logit_rows));
  ASSIGN_OR_RETURN(memory.step, StepMemory::allocate(plan, rank, sizes, std::max(workspace, kLeastKernelWorkspaceBytes), device));
  for (StepStaging& staging : memory.staging) {
    ASSIGN_OR_RETURN(staging, StepStaging::allocate(memory.step, device));
  }
  return memory;
}

RankCounter::RankCounter(const ExecutionPlan& plan, const RankPlan& rank, const ops::KernelTable& table, const ops::SelectionRules& rules)
    : device_(backends::imagine_device(rank.traits, plan.options.num_threads)), kernels_(table, *device_, rules) {
  WeightAllocator allocator{kernels_, *device_, 0, {}};
  Problems(rank.config, rank.inventory, rank.shard, plan.numerics()).for_each(plan.with_mtp, allocator);
  if (rank.shard.last_stage())  // norms that no kernel packs
    for (int norm = 0; norm < (plan.with_mtp ? 2 : 1); ++norm) allocator.allocate(static_cast<size_t>(rank.config.hidden_size) * sizeof(float));
  weights_bytes_ = device_->allocated_bytes() + allocator.stored;
}

uint64_t RankCounter::other_bytes(const ExecutionPlan& plan, const RankPlan& rank) const {
  CHECK(plan.limits.num_host_blocks == 0 && plan.limits.num_host_snapshots == 0);  // host memory is laid out last
  const size_t before = device_->allocated_bytes();
  ops::IdleStream stream;
  const auto memory = RankMemory::allocate(plan, rank, kernels_, *device_, stream);
  CHECK_MSG(memory.has_value(), "an imagined device refuses nothing");
  return device_->allocated_bytes() - before;
}

}  // namespace quern::worker
