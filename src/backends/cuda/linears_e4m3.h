#pragma once

#include "backends/cuda/linear_e4m3_args.h"
#include "backends/cuda/linears_mma.h"

namespace quern::cuda::e4m3 {

/// The kernels of linear_e4m3_sm89.cu for FP8 weights, those of linear_mma.cu for others. Used as LinearLauncher is.
class E4M3Linears {
 public:
  using Packed = mma::TiledLinear;
  /// Rows as they stand and, where FP8 weights meet more than eight, quantised.
  struct Operand {
    PlainOperand plain;
    mma::QuantisedRows quantised;  // no codes: none
  };
  static constexpr int64_t kRowTile = 2048;  // a prompt's blocks of 128 rows by 128 features should be many times the multiprocessors
  static constexpr std::string_view kTableLayout = "cuda.mma.e4m3.tiles";
  static Result<E4M3Linears> create(Device& device);
  /// What mma::TiledLinears takes, of which one weight at least is FP8.
  static ops::Verdict accepts(const ops::DeviceTraits& traits, std::initializer_list<ops::LinearShape> weights);
  static std::string_view arithmetic(DType /*activation*/) { return "cuda.mma.e4m3.k128"; }

  void pack(const Packed& weight, const ops::LinearSource& source, ops::Buffer& packed, ops::Stream& stream) const;
  static size_t operand_bytes(int64_t rows, int64_t in_features);
  Operand operand(Stream& stream, Scratch& scratch, const void* x, const int32_t* rows, int64_t num_rows, std::initializer_list<const Packed*> weights) const;
  void multiply(Stream& stream, const Packed& weight, const ops::Buffer& packed, DType activation, const Operand& x, int64_t num_rows, Epilogue epilogue, void* out) const;
  void norm(Stream& stream, DType activation, const void* x, int64_t num_rows, int64_t width, float eps, const float* weight, float weight_offset, void* out, int64_t out_stride) const {
    wide_.norm(stream, activation, x, num_rows, width, eps, weight, weight_offset, out, out_stride);
  }
  void widen(Stream& stream, const ops::TensorView& source, float* out, float addend = 0.0f, DType round_to = DType::kF32) const { wide_.widen(stream, source, out, addend, round_to); }

 private:
  using Kernels = std::array<Function<mma::E4M3LinearArgs>, 4>;  // 8, 16 and 32 rows a block and 32 features; 128 rows and 128 features
  /// Whether the weight's product of `num_rows` rows is cut into blocks of many rows; the bits are the same.
  [[nodiscard]] bool takes_blocks(const ops::LinearShape& shape, int64_t num_rows) const;

  mma::TiledLinears wide_;
  Kernels block_, whole_;  // block scales; those that are applied to whole sums
  Function<mma::QuantiseRowsArgs> quantise_;
  int num_sms_ = 0;
  bool overlap_ = false;  // programmatic dependent launch
};

}  // namespace quern::cuda::e4m3
