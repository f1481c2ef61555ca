#pragma once

#include <cstdint>

#include "backends/cuda/async.cuh"

// Matrix instructions of sm_80 and newer on bf16 operands with f32 sums. Device code only.

namespace quern::cuda {

/// Four 8 x 8 matrices of 16-bit elements from shared memory; lane l gives the address of row l % 8 of matrix l / 8.
__device__ inline void load_matrices(uint32_t (&out)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];" : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3]) : "r"(address) : "memory");
}
__device__ inline void load_matrices_transposed(uint32_t (&out)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];" : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3]) : "r"(address) : "memory");
}
/// sum += a [16 x 16] * b [16 x 8]. Lane l holds of the sum the rows l / 4 and l / 4 + 8, the columns 2 (l % 4) and the next.
__device__ inline void multiply_add(float (&sum)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
               : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

/// An 8 x 8 matrix of 16-bit elements, of which lane l holds row l / 4, columns 2 (l % 4) and the next: its transpose.
__device__ inline uint32_t transposed(uint32_t pair) {
  uint32_t result;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(result) : "r"(pair));
  return result;
}

/// Byte offset of the 16-byte piece `piece` of row `row` in a tile of kPieces pieces a row, arranged so that 8 rows of one piece lie in different banks.
template <int kPieces>
__device__ inline uint32_t swizzled(int row, int piece) {
  static_assert(kPieces % 8 == 0);
  return static_cast<uint32_t>((row * kPieces + (piece ^ (row & 7))) * 16);
}

}  // namespace quern::cuda
