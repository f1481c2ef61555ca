#include "backends/cuda/linear_args.h"
#include "backends/cuda/numeric.cuh"

// y = W x for every weight scheme, with f32 arithmetic. A warp computes one output feature for up to kRows rows: a lane takes 16 bytes of the weight at a time, each
// lane adds its products in the order of k, then the lanes are added as a tree. So a row's bits depend on the weight's shape only.

namespace quern::cuda {

namespace {

constexpr int kThreads = 256, kRows = 4;
constexpr int64_t kScaleBlock = 128;

__device__ float scale_at(const Weight& w, int64_t feature, int64_t column) {
  switch (w.scales) {
    case Weight::Scales::kNone: return 1.0f;
    case Weight::Scales::kChannel: return w.scale[feature];
    case Weight::Scales::kTensor: return w.scale[0];
    case Weight::Scales::kBlock: break;
  }
  const int64_t columns = (w.offsets->column + w.in_features + kScaleBlock - 1) / kScaleBlock;
  return w.scale[(w.offsets->row + feature) / kScaleBlock * columns + (w.offsets->column + column) / kScaleBlock];
}

/// Widens the kCount elements of one 16-byte piece.
template <DType kDType>
struct Piece;
template <>
struct Piece<DType::kE4M3> {
  static constexpr int kCount = 16;
  static __device__ void widen(const uint4& bits, float* out) {
    const uint32_t words[] = {bits.x, bits.y, bits.z, bits.w};
    for (int i = 0; i < kCount; i += 2) {
      const auto pair = static_cast<__nv_fp8x2_storage_t>(words[i / 4] >> (i % 4 * 8));
      const float2 two = __half22float2(__half2(__nv_cvt_fp8x2_to_halfraw2(pair, __NV_E4M3)));
      out[i] = two.x;
      out[i + 1] = two.y;
    }
  }
};
template <>
struct Piece<DType::kBF16> {
  static constexpr int kCount = 8;
  static __device__ void widen(const uint4& bits, float* out) {
    const uint32_t words[] = {bits.x, bits.y, bits.z, bits.w};
    for (int i = 0; i < 4; ++i) {
      out[2 * i] = __uint_as_float(words[i] << 16);
      out[2 * i + 1] = __uint_as_float(words[i] & 0xffff0000u);
    }
  }
};
template <>
struct Piece<DType::kF16> {
  static constexpr int kCount = 8;
  static __device__ void widen(const uint4& bits, float* out) {
    const uint32_t words[] = {bits.x, bits.y, bits.z, bits.w};
    for (int i = 0; i < 4; ++i) {
      out[2 * i] = __half2float(__ushort_as_half(static_cast<unsigned short>(words[i] & 0xffffu)));
      out[2 * i + 1] = __half2float(__ushort_as_half(static_cast<unsigned short>(words[i] >> 16)));
    }
  }
};
template <>
struct Piece<DType::kF32> {
  static constexpr int kCount = 4;
  static __device__ void widen(const uint4& bits, float* out) {
    out[0] = __uint_as_float(bits.x);
    out[1] = __uint_as_float(bits.y);
    out[2] = __uint_as_float(bits.z);
    out[3] = __uint_as_float(bits.w);
  }
};

/// kCount consecutive elements of a row of x from element `at` on.
template <DType kX, int kCount>
__device__ void load_x(const void* x, int64_t at, float* out) {
  constexpr int kStep = Piece<kX>::kCount < kCount ? Piece<kX>::kCount : kCount;
  static_assert(kCount % kStep == 0);
  if constexpr (kStep == Piece<kX>::kCount) {
    const auto* pieces = reinterpret_cast<const uint4*>(static_cast<const uint8_t*>(x) + at * (kX == DType::kF32 ? 4 : 2));
    for (int i = 0; i < kCount / kStep; ++i) Piece<kX>::widen(pieces[i], out + i * kStep);
  } else {  // four bf16
    const uint2 bits = *reinterpret_cast<const uint2*>(static_cast<const uint8_t*>(x) + at * 2);
    out[0] = __uint_as_float(bits.x << 16);
    out[1] = __uint_as_float(bits.x & 0xffff0000u);
    out[2] = __uint_as_float(bits.y << 16);
    out[3] = __uint_as_float(bits.y & 0xffff0000u);
  }
}

/// Rows of x that are whole 16-byte pieces of the weight: sums[r] += the lane's share of feature . x[r].
template <DType kWeight, DType kX>
__device__ void multiply_pieces(const Weight& w, int64_t feature, const void* const* x, int rows, int lane, float* sums) {
  constexpr int kCount = Piece<kWeight>::kCount;
  const auto* pieces = reinterpret_cast<const uint4*>(static_cast<const uint8_t*>(w.data) + feature * w.in_features * (16 / kCount));
  const bool by_block = w.scales == Weight::Scales::kBlock;
  for (int64_t k = lane * kCount; k < w.in_features; k += 32 * kCount) {
    float values[kCount];
    Piece<kWeight>::widen(pieces[k / kCount], values);
    if (by_block) {
      const float first = scale_at(w, feature, k), last = scale_at(w, feature, k + kCount - 1);
      const int64_t border = kScaleBlock - (w.offsets->column + k) % kScaleBlock;  // elements before the next block
#pragma unroll
      for (int i = 0; i < kCount; ++i) values[i] *= i < border ? first : last;
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      if (r >= rows || x[r] == nullptr) continue;
      float others[kCount];
      load_x<kX, kCount>(x[r], k, others);
#pragma unroll
      for (int i = 0; i < kCount; ++i) sums[r] = fmaf(values[i], others[i], sums[r]);
    }
  }
}

/// The same for any length, an element at a time.
__device__ void multiply_elements(const Weight& w, DType x_dtype, int64_t feature, const void* const* x, int rows, int lane, float* sums) {
  const bool by_block = w.scales == Weight::Scales::kBlock;
  for (int64_t k = lane; k < w.in_features; k += 32) {
    float value = load(w.data, w.dtype, feature * w.in_features + k);
    if (by_block) value *= scale_at(w, feature, k);
#pragma unroll
    for (int r = 0; r < kRows; ++r)
      if (r < rows && x[r] != nullptr) sums[r] = fmaf(value, load(x[r], x_dtype, k), sums[r]);
  }
}

template <DType kWeight>
__device__ void multiply(const LinearArgs& args, int64_t feature, const void* const* x, int rows, int lane, float* sums) {
  if (args.weight.in_features % 16 != 0)
    multiply_elements(args.weight, args.activation, feature, x, rows, lane, sums);
  else if (args.activation == DType::kF32)
    multiply_pieces<kWeight, DType::kF32>(args.weight, feature, x, rows, lane, sums);
  else
    multiply_pieces<kWeight, DType::kBF16>(args.weight, feature, x, rows, lane, sums);
}

__device__ void finish(const LinearArgs& args, int64_t at, float y) {
  const DType a = args.activation;
  switch (args.epilogue) {
    case Epilogue::kStore: store(args.out, a, at, y); return;
    case Epilogue::kStoreF32: static_cast<float*>(args.out)[at] = y; return;
    case Epilogue::kAddResidual: store(args.out, a, at, load(args.out, a, at) + round_to(a, y)); return;
    case Epilogue::kSilu: store(args.out, a, at, silu(round_to(a, y))); return;
    case Epilogue::kMultiply: store(args.out, a, at, load(args.out, a, at) * round_to(a, y)); return;
  }
}

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads) linear(const __grid_constant__ LinearArgs args) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int64_t feature = int64_t{blockIdx.x} * (kThreads / 32) + threadIdx.x / 32;
  const int32_t first_row = static_cast<int32_t>(blockIdx.y) * kRows;
  if (feature >= args.weight.out_features) return;
  const int rows = min(kRows, args.num_rows - first_row);
  const int64_t row_bytes = args.weight.in_features * (args.activation == DType::kF32 ? 4 : 2);
  const void* x[kRows];
  float sums[kRows] = {};
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    x[r] = nullptr;
    if (r >= rows) continue;
    const int64_t row = args.x_rows == nullptr ? first_row + r : args.x_rows[first_row + r];
    if (row >= 0) x[r] = static_cast<const uint8_t*>(args.x) + row * row_bytes;
  }
  switch (args.weight.dtype) {
    case DType::kE4M3: multiply<DType::kE4M3>(args, feature, x, rows, lane, sums); break;
    case DType::kBF16: multiply<DType::kBF16>(args, feature, x, rows, lane, sums); break;
    case DType::kF16: multiply<DType::kF16>(args, feature, x, rows, lane, sums); break;
    default: multiply<DType::kF32>(args, feature, x, rows, lane, sums); break;
  }
  const bool whole = args.weight.scales == Weight::Scales::kChannel || args.weight.scales == Weight::Scales::kTensor;
  const float scale = whole ? scale_at(args.weight, feature, 0) : 1.0f;
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    const float y = warp_sum(sums[r]) * scale;
    if (lane == r && r < rows) finish(args, int64_t{first_row + r} * args.weight.out_features + feature, y);
  }
}

/// One block a row.
extern "C" __global__ void __launch_bounds__(kThreads) norm_rows(const __grid_constant__ NormArgs args) {
  __shared__ float shared[kThreads / 32];
  const int64_t at = int64_t{blockIdx.x} * args.width, out_at = int64_t{blockIdx.x} * args.out_stride;
  float sum = 0;
  for (int i = static_cast<int>(threadIdx.x); i < args.width; i += kThreads) {
    const float x = load(args.x, args.activation, at + i);
    sum = fmaf(x, x, sum);
  }
  const float factor = 1.0f / sqrtf(block_sum<kThreads>(sum, shared) / static_cast<float>(args.width) + args.eps);
  for (int i = static_cast<int>(threadIdx.x); i < args.width; i += kThreads)
    store(args.out, args.activation, out_at + i, load(args.x, args.activation, at + i) * factor * (args.weight[i] + args.weight_offset));
}

extern "C" __global__ void widen(const __grid_constant__ WidenArgs args) {
  const int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (i < args.num_elements) args.out[i] = round_to(args.round_to, load(args.source, args.dtype, i)) + args.addend;
}

}  // namespace quern::cuda
