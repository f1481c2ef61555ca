// Norm and quantisation of prompt rows: the bits of quantise_rows (rows_sm90.cu) in fewer instructions. Eight lanes have a group of 128, lane l the elements from 8 l and from 64 + 8 l on.

#include "backends/cuda/ptx_sm90.cuh"
#include "backends/cuda/quantise_sm90.cuh"

namespace quern::cuda::sm90 {

namespace {

struct Pieces {
  uint4 low, high;
};

__device__ __forceinline__ Pieces load_pieces(const QuantiseArgs& args, int row, int block, int l) {
  const int64_t from = row * args.in_stride + block * 128 + l * 8;
  return {load_row_piece(args.in, from), load_row_piece(args.in, from + 64)};
}
__device__ __forceinline__ float square_sum8(const uint4& piece) {
  float x[8], sum = 0;
  unpack8(piece, x);
#pragma unroll
  for (int i = 0; i < 8; ++i) sum = __fmaf_rn(x[i], x[i], sum);
  return sum;
}
/// As square_sums() adds the sixteen lanes of a group there.
__device__ __forceinline__ float square_sum(const Pieces& x) {
  float sum = __fadd_rn(square_sum8(x.low), square_sum8(x.high));
#pragma unroll
  for (int lane = 4; lane > 0; lane /= 2) sum = __fadd_rn(sum, __shfl_xor_sync(0xffffffffu, sum, lane, 8));
  return sum;
}
__device__ __forceinline__ __nv_bfloat162 most_of(const uint4& piece) {
  const auto pair = [](uint32_t word) { return __habs2(*reinterpret_cast<const __nv_bfloat162*>(&word)); };
  return __hmax2(__hmax2(pair(piece.x), pair(piece.y)), __hmax2(pair(piece.z), pair(piece.w)));
}
__device__ __forceinline__ uint2 scaled_codes(const uint4& piece, float inverse) {
  float x[8];
  unpack8(piece, x);
#pragma unroll
  for (int i = 0; i < 8; ++i) x[i] = __fmul_rn(x[i], inverse);
  return {e4m3_pair(x[0], x[1]) | e4m3_pair(x[2], x[3]) << 16, e4m3_pair(x[4], x[5]) | e4m3_pair(x[6], x[7]) << 16};
}
/// To be called by whole warps; `mine`: this lane's group is one of the row's.
__device__ __forceinline__ void store_pieces(const QuantiseArgs& args, int row, int block, int l, const Pieces& x, bool mine) {
  const int64_t to = args.first_block + block;
  const int turned = (row & 7) << 4;  // the order of the linear kernels
  if (args.x8 != nullptr) {
    const __nv_bfloat162 pair = __hmax2(most_of(x.low), most_of(x.high));
    float most = fmaxf(fmaxf(1e-10f, __low2float(pair)), __high2float(pair));
#pragma unroll
    for (int lane = 4; lane > 0; lane /= 2) most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, lane, 8));
    const float inverse = from_448(most);
    if (mine) {
      char* at = static_cast<char*>(args.x8) + (to * args.x_rows + row) * kTileRowBytes;
      *reinterpret_cast<uint2*>(at + ((l * 8) ^ turned)) = scaled_codes(x.low, inverse);
      *reinterpret_cast<uint2*>(at + ((64 + l * 8) ^ turned)) = scaled_codes(x.high, inverse);
      if (l == 0) args.x_scale[to * args.x_rows + row] = over_448(most);
    }
  }
  if (args.x16 != nullptr && mine) {
    char* at = static_cast<char*>(args.x16) + (2 * to * args.x_rows + row) * kTileRowBytes + ((l * 16) ^ turned);
    *reinterpret_cast<uint4*>(at) = x.low;
    *reinterpret_cast<uint4*>(at + int64_t{args.x_rows} * kTileRowBytes) = x.high;
  }
}

}  // namespace

/// With a norm: a block a row after the other, eight threads a group; the next row is on its way meanwhile.
extern "C" __global__ void __launch_bounds__(8 * kMaxNormWidth / 128) norm_prompt_rows(const __grid_constant__ QuantiseArgs args) {
  __shared__ float sums[2][kMaxNormWidth / 128];
  launch_dependents();
  const int l = threadIdx.x & 7, block = static_cast<int>(threadIdx.x) >> 3;
  const bool mine = block < args.k_blocks;
  float4 factors[4] = {};
  if (mine) {
    const auto* from = reinterpret_cast<const float4*>(args.norm + block * 128 + l * 8);
#pragma unroll
    for (int i = 0; i < 4; ++i) factors[i] = __ldg(from + i / 2 * 16 + i % 2);
  }
  wait_for_predecessors();
  int row = blockIdx.x, turn = 0;
  Pieces next{};
  if (mine && row < args.rows) next = load_pieces(args, row, block, l);
  for (; row < args.rows; row += gridDim.x, turn ^= 1) {
    Pieces x = next;
    if (mine && row + static_cast<int>(gridDim.x) < args.rows) next = load_pieces(args, row + gridDim.x, block, l);
    const float square = square_sum(x);
    if (l == 0 && mine) sums[turn][block] = square;
    __syncthreads();
    const float inverse = inverse_rms(sums[turn], args.k_blocks, args.eps);
    x = {normed(x.low, inverse, factors[0], factors[1]), normed(x.high, inverse, factors[2], factors[3])};
    store_pieces(args, row, block, l, x, mine);
  }
}

/// Without: a block a row, and a thread up to four groups at a time.
extern "C" __global__ void __launch_bounds__(kMaxQuantisers) quantise_prompt_rows(const __grid_constant__ QuantiseArgs args) {
  launch_dependents();
  const int l = threadIdx.x & 7, step = static_cast<int>(blockDim.x) / 8, row = blockIdx.x;
  wait_for_predecessors();
  for (int first = static_cast<int>(threadIdx.x) >> 3; first - (static_cast<int>(threadIdx.x) >> 3) < args.k_blocks; first += kQuantisedGroups * step) {
    Pieces x[kQuantisedGroups];
#pragma unroll
    for (int n = 0; n < kQuantisedGroups; ++n) x[n] = first + n * step < args.k_blocks ? load_pieces(args, row, first + n * step, l) : Pieces{};
#pragma unroll
    for (int n = 0; n < kQuantisedGroups; ++n) store_pieces(args, row, first + n * step, l, x[n], first + n * step < args.k_blocks);
  }
}

}  // namespace quern::cuda::sm90
