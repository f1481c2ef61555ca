#pragma once

#include <array>
#include <initializer_list>

#include "backends/cuda/linear_mma_args.h"
#include "backends/cuda/packed_linear.h"
#include "ops/candidate.h"

namespace quern::cuda::mma {

/// One weight's place in a packed buffer: tiles, at the next multiple of 256 bytes the f32 scales.
class TiledLinear {
 public:
  TiledLinear(const ops::LinearShape& shape, size_t offset_bytes);

  /// One past the last byte, a multiple of 256: where the next weight begins.
  [[nodiscard]] size_t end_bytes() const { return end_; }
  [[nodiscard]] const ops::LinearShape& shape() const { return shape_; }
  [[nodiscard]] TiledWeight view(const ops::Buffer& packed) const;
  [[nodiscard]] size_t scale_at() const { return scale_at_; }

 private:
  ops::LinearShape shape_;
  size_t tiles_at_, scale_at_, end_;
};

/// The kernels of linear_mma.cu: 16-bit activations on the matrix units, whatever the weight's scheme. Used as LinearLauncher is.
class TiledLinears {
 public:
  using Packed = TiledLinear;
  using Operand = PlainOperand;
  static constexpr int64_t kRowTile = cuda::kRowTile;
  static constexpr std::string_view kTableLayout = "cuda.mma.tiles";
  static Result<TiledLinears> create(Device& device);
  static ops::Verdict accepts(DType activation, std::initializer_list<ops::LinearShape> weights);
  static std::string_view arithmetic(DType /*activation*/) { return "cuda.mma.w16"; }

  void pack(const TiledLinear& weight, const ops::LinearSource& source, ops::Buffer& packed, ops::Stream& stream) const {
    pack(weight, source, packed, stream, ops::is_fp8(weight.shape().scheme) ? Tiles::kWidened : Tiles::kBF16);
  }
  /// In the order of tiles that the weight will be multiplied in. A slice of block FP8 begins on a multiple of 32 rows of its scale block, and with a scale block of K; any other fails the stream.
  void pack(const TiledLinear& weight, const ops::LinearSource& source, ops::Buffer& packed, ops::Stream& stream, Tiles order) const;
  static size_t operand_bytes(int64_t /*rows*/, int64_t /*in_features*/) { return 0; }
  Operand operand(Stream& /*stream*/, Scratch& /*scratch*/, const void* x, const int32_t* rows, int64_t /*num_rows*/, std::initializer_list<const TiledLinear*> /*weights*/) const {
    return {x, rows};
  }
  void multiply(Stream& stream, const TiledLinear& weight, const ops::Buffer& packed, DType activation, const Operand& x, int64_t num_rows, Epilogue epilogue, void* out) const;
  void norm(Stream& stream, DType activation, const void* x, int64_t num_rows, int64_t width, float eps, const float* weight, float weight_offset, void* out, int64_t out_stride) const {
    plain_.norm(stream, activation, x, num_rows, width, eps, weight, weight_offset, out, out_stride);
  }
  void widen(Stream& stream, const ops::TensorView& source, float* out, float addend = 0.0f, DType round_to = DType::kF32) const { plain_.widen(stream, source, out, addend, round_to); }

 private:
  using Kernels = std::array<Function<TiledLinearArgs>, 3>;  // 8, 16 and 32 rows a block
  LinearLauncher plain_;
  Kernels block_, e4m3_, bf16_;
  Function<TileWeightArgs> tile_;
  Function<TileScalesArgs> tile_scales_;
  bool overlap_ = false;  // programmatic dependent launch
};

}  // namespace quern::cuda::mma
