#pragma once

#include <cstdint>

// The instructions of Hopper that C++ has no name for: barriers with byte counts, bulk copies, warpgroup matrix products, dependent launches.

namespace quern::cuda::sm90 {

__device__ __forceinline__ uint32_t shared_address(const void* p) { return static_cast<uint32_t>(__cvta_generic_to_shared(p)); }

/// In the order of the barriers around it.
__device__ __forceinline__ float load_shared(uint32_t address) {
  float value;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(value) : "r"(address) : "memory");
  return value;
}
__device__ __forceinline__ float2 load_shared_pair(uint32_t address) {
  float2 v;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(v.x), "=f"(v.y) : "r"(address) : "memory");
  return v;
}

__device__ __forceinline__ uint32_t load_shared_word(uint32_t address) {
  uint32_t value;
  asm volatile("ld.volatile.shared.u32 %0, [%1];" : "=r"(value) : "r"(address) : "memory");
  return value;
}
__device__ __forceinline__ void store_shared(uint32_t address, uint32_t value) { asm volatile("st.volatile.shared.u32 [%0], %1;" ::"r"(address), "r"(value) : "memory"); }

__device__ __forceinline__ void barrier_init(uint32_t barrier, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
__device__ __forceinline__ void barrier_expect(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
__device__ __forceinline__ void barrier_arrive(uint32_t barrier) { asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory"); }
__device__ __forceinline__ void barrier_wait(uint32_t barrier, uint32_t parity) {
  asm volatile(
      "{\n.reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;\n}\n" ::"r"(barrier),
      "r"(parity)
      : "memory");
}
__device__ __forceinline__ void fence_barrier_init() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
/// Copies `bytes` (a multiple of 16) from global to shared memory; the barrier counts them.
__device__ __forceinline__ void bulk_copy(uint32_t destination, const void* source, uint32_t bytes, uint32_t barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(destination), "l"(source), "r"(bytes),
               "r"(barrier)
               : "memory");
}
/// The same to both blocks of a cluster of two, at the same place of each one's memory; the barrier at that place of each counts what its block receives.
__device__ __forceinline__ void bulk_copy_to_pair(uint32_t destination, const void* source, uint32_t bytes, uint32_t barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1], %2, [%3], %4;" ::"r"(destination), "l"(source),
               "r"(bytes), "r"(barrier), "h"(static_cast<uint16_t>(3))
               : "memory");
}
/// Copies `bytes` (a multiple of 16) from shared to global memory. Those begun since the last commit are a group of the thread.
__device__ __forceinline__ void bulk_store(void* destination, uint32_t source, uint32_t bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(destination), "r"(source), "r"(bytes) : "memory");
}
__device__ __forceinline__ void bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
/// Until the thread's groups have read shared memory.
__device__ __forceinline__ void await_bulk_reads() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }
/// Copies a tensor map's box, beginning at (x, y, z), to shared memory; the barrier counts its bytes. The map is a kernel's parameter.
__device__ __forceinline__ void tensor_copy(uint32_t destination, const void* map, int x, int y, int z, uint32_t barrier) {
  asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4}], [%5];" ::"r"(destination), "l"(map), "r"(x),
               "r"(y), "r"(z), "r"(barrier)
               : "memory");
}
/// Arrives at the barrier at this place of the memory of block `rank` of the cluster.
__device__ __forceinline__ void barrier_arrive_at(uint32_t barrier, uint32_t rank) {
  asm volatile(
      "{\n.reg .b32 remote;\n"
      "mapa.shared::cluster.u32 remote, %0, %1;\n"
      "mbarrier.arrive.shared::cluster.b64 _, [remote];\n}\n" ::"r"(barrier),
      "r"(rank)
      : "memory");
}
__device__ __forceinline__ uint32_t cluster_rank() {
  uint32_t rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}
/// Waits for all threads of the cluster that have not ended.
__device__ __forceinline__ void meet_cluster() {
  asm volatile("barrier.cluster.arrive;\nbarrier.cluster.wait;" ::: "memory");
}
/// The same for weights, which no later kernel of the step reads again.
__device__ __forceinline__ void bulk_copy_once(uint32_t destination, const void* source, uint32_t bytes, uint32_t barrier) {
  asm volatile(
      "{\n.reg .b64 policy;\n"
      "createpolicy.fractional.L2::evict_first.b64 policy, 1.0;\n"
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], policy;\n}\n" ::"r"(destination),
      "l"(source), "r"(bytes), "r"(barrier)
      : "memory");
}
/// Waits until the grids before this one in the stream have finished and their writes can be seen.
__device__ __forceinline__ void wait_for_predecessors() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
__device__ __forceinline__ void launch_dependents() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
/// Between what the threads of a block or predecessors wrote by themselves and bulk copies that touch the same place: of shared memory, of any.
__device__ __forceinline__ void fence_async_proxy_all() { asm volatile("fence.proxy.async;" ::: "memory"); }
__device__ __forceinline__ void fence_async_proxy() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
template <int kId, int kThreads>
__device__ __forceinline__ void named_barrier() {
  asm volatile("bar.sync %0, %1;" ::"n"(kId), "n"(kThreads) : "memory");
}

/// As named_barrier, without waiting for the others.
template <int kId, int kThreads>
__device__ __forceinline__ void named_arrive() {
  asm volatile("bar.arrive %0, %1;" ::"n"(kId), "n"(kThreads) : "memory");
}

/// A warpgroup gives registers back, or takes some more: kCount a thread.
template <int kCount>
__device__ __forceinline__ void fewer_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kCount));
}
template <int kCount>
__device__ __forceinline__ void more_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kCount));
}

__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
/// Until at most `groups` of the committed groups are under way.
__device__ __forceinline__ void wgmma_wait_for(int groups) {
  switch (groups) {
    case 3: asm volatile("wgmma.wait_group.sync.aligned 3;" ::: "memory"); break;
    case 2: asm volatile("wgmma.wait_group.sync.aligned 2;" ::: "memory"); break;
    case 1: asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory"); break;
    default: asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory"); break;
  }
}
/// Results of finished products: nothing is read from them before this place.
template <int kCount>
__device__ __forceinline__ void settle(float (&d)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

/// Operand in shared memory: rows of 128 bytes along K, 16-byte pieces permuted by the low three bits of the row, 1024-byte aligned groups of eight rows.
__device__ __forceinline__ uint64_t operand(uint32_t address) {
  return (uint64_t{(address & 0x3ffff) >> 4}) | (uint64_t{1} << 16) | (uint64_t{1024 >> 4} << 32) | (uint64_t{1} << 62);
}

/// Operand whose rows stand along K, of more than 64 columns: images of 64, `image_bytes` apart.
__device__ __forceinline__ uint64_t operand_of_images(uint32_t address, uint32_t image_bytes) {
  return (uint64_t{(address & 0x3ffff) >> 4}) | (uint64_t{image_bytes >> 4} << 16) | (uint64_t{1024 >> 4} << 32) | (uint64_t{1} << 62);
}

inline constexpr int kOperandUnit = 16;  // bytes
/// The operand `units` of kOperandUnit behind another.
__device__ __forceinline__ uint64_t operand_at(uint64_t first, uint32_t units) { return (first & 0xffffffff00000000u) | (static_cast<uint32_t>(first) + units); }

#define QUERN_D4(i) "+f"(d[i]), "+f"(d[(i) + 1]), "+f"(d[(i) + 2]), "+f"(d[(i) + 3])
#define QUERN_D8(i) QUERN_D4(i), QUERN_D4((i) + 4)
#define QUERN_D16(i) QUERN_D8(i), QUERN_D8((i) + 8)
#define QUERN_D32(i) QUERN_D16(i), QUERN_D16((i) + 16)
#define QUERN_D64(i) QUERN_D32(i), QUERN_D32((i) + 32)
#define QUERN_R4 "%0, %1, %2, %3"
#define QUERN_R8 QUERN_R4 ", %4, %5, %6, %7"
#define QUERN_R16 QUERN_R8 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define QUERN_R32 QUERN_R16 ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define QUERN_R64                                                                                                                                    \
  QUERN_R32 ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, " \
            "%61, %62, %63"
#define QUERN_WGMMA(n, types, tail, regs, a_at, b_at, p_at, ...)                                                                                       \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " p_at ", 0;\nwgmma.mma_async.sync.aligned.m64n" #n types " {" regs "}, " a_at ", " b_at ", p, 1, 1" tail \
               ";\n}\n"                                                                                                                               \
               : __VA_ARGS__                                                                                                                          \
               : "l"(a), "l"(b), "r"(accumulate))
#define QUERN_WGMMA_BOTH(n, regs, a_at, b_at, p_at, ...)                                            \
  if constexpr (kFp8) QUERN_WGMMA(n, "k32.f32.e4m3.e4m3", "", regs, a_at, b_at, p_at, __VA_ARGS__); \
  else QUERN_WGMMA(n, "k16.f32.bf16.bf16", ", 0, 0", regs, a_at, b_at, p_at, __VA_ARGS__)

/// d = A B^T (+ d): 64 rows of A, kColumns rows of B, 32 bytes of K.
template <int kColumns, bool kFp8>
__device__ __forceinline__ void wgmma(float (&d)[kColumns / 2], uint64_t a, uint64_t b, int accumulate) {
  if constexpr (kColumns == 8) {
    QUERN_WGMMA_BOTH(8, QUERN_R4, "%4", "%5", "%6", QUERN_D4(0));
  } else if constexpr (kColumns == 16) {
    QUERN_WGMMA_BOTH(16, QUERN_R8, "%8", "%9", "%10", QUERN_D8(0));
  } else if constexpr (kColumns == 32) {
    QUERN_WGMMA_BOTH(32, QUERN_R16, "%16", "%17", "%18", QUERN_D16(0));
  } else if constexpr (kColumns == 64) {
    QUERN_WGMMA_BOTH(64, QUERN_R32, "%32", "%33", "%34", QUERN_D32(0));
  } else {
    static_assert(kColumns == 128);
    QUERN_WGMMA_BOTH(128, QUERN_R64, "%64", "%65", "%66", QUERN_D64(0));
  }
}

/// d [64, 64] = (or +=) A B^T in bf16: A [64, 16] in registers, as two tiles of 8 columns of sums leave it. kTransposed: B stands in shared memory with its rows along K.
template <int kTransposed = 0>
__device__ __forceinline__ void wgmma_from_registers(float (&d)[32], const uint32_t (&a)[4], uint64_t b, int accumulate) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %37, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {" QUERN_R32 "}, {%32, %33, %34, %35}, %36, p, 1, 1, %38;\n}\n"
      : QUERN_D32(0)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate), "n"(kTransposed));
}

/// d [64, 256] += A B in bf16: A [64, 16] in registers, as above; B [16, 256] in shared memory, its rows along K (operand_of_images).
__device__ __forceinline__ void wgmma_from_registers_wide(float (&d)[128], const uint32_t (&a)[4], uint64_t b) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {" QUERN_R64
      ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, %96, "
      "%97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, "
      "%125, %126, %127}, {%128, %129, %130, %131}, %132, 1, 1, 1, 1;"
      : QUERN_D64(0), QUERN_D64(64)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

}  // namespace quern::cuda::sm90
