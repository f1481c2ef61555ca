#pragma once

#include <initializer_list>

#include "backends/cuda/linear_args.h"
#include "backends/cuda/stream.h"
#include "ops/kernel.h"
#include "ops/linear.h"

namespace quern::cuda {

/// The order of a packed embedding table that a tied head reads too.
inline constexpr std::string_view kRowsLayout = "rows";

/// Which scales weights of `scheme` come with.
Weight::Scales scales_of(ops::WeightScheme scheme);

/// That a slice of a block FP8 weight begins `row` rows and `column` columns inside its first scale block, where kernels named `candidate` take multiples of `rows` rows and no columns.
Error off_the_grid(std::string_view candidate, int64_t row, int64_t column, int64_t rows);

/// One weight's place in a packed buffer: the rows as stored, at the next multiple of 256 bytes the f32 scales, then the offsets into the scale grid.
class PackedLinear {
 public:
  PackedLinear(const ops::LinearShape& shape, size_t offset_bytes);

  /// One past the last byte, a multiple of 256: where the next weight begins.
  [[nodiscard]] size_t end_bytes() const { return end_; }
  [[nodiscard]] const ops::LinearShape& shape() const { return shape_; }
  void pack(const ops::LinearSource& source, ops::Buffer& packed, ops::Stream& stream) const;
  [[nodiscard]] Weight view(const ops::Buffer& packed) const;

 private:
  ops::LinearShape shape_;
  size_t weight_at_, scale_at_, offsets_at_, end_;
};

/// Pieces of a launch's workspace, one after the other, each 256-byte aligned.
class Scratch {
 public:
  explicit Scratch(const ops::TensorView& workspace)
      : next_(workspace.buffer == nullptr ? nullptr : workspace.data<std::byte>()), left_(workspace.size_bytes()) {}
  std::byte* take(size_t bytes) {
    const size_t whole = size(bytes);
    CHECK(whole <= left_);
    std::byte* piece = next_;
    next_ += whole;
    left_ -= whole;
    return piece;
  }
  static constexpr size_t size(size_t bytes) { return (bytes + 255) / 256 * 256; }

 private:
  std::byte* next_;
  size_t left_;
};

/// Rows that plain ops take at a time, so that the workspace stays small whatever the step holds.
inline constexpr int64_t kRowTile = 512;

/// Rows as they stand; `rows` may name them.
struct PlainOperand {
  const void* x;
  const int32_t* rows;
};

/// The kernels of linear.cu, and how plain ops launch them. Ops are written for any such class: what packs and multiplies weights, and the norms before. Rows become an operand once, for
/// all weights that they meet.
class LinearLauncher {
 public:
  using Packed = PackedLinear;
  using Operand = PlainOperand;
  static constexpr int64_t kRowTile = cuda::kRowTile;
  static constexpr std::string_view kTableLayout = kRowsLayout;
  static Result<LinearLauncher> create(Device& device);
  static std::string_view arithmetic(DType activation) { return activation == DType::kF32 ? "cuda.plain.f32" : "cuda.plain.bf16"; }

  void pack(const PackedLinear& weight, const ops::LinearSource& source, ops::Buffer& packed, ops::Stream& stream) const { weight.pack(source, packed, stream); }

  /// Workspace that an operand of so many rows takes; 0: the rows are taken as they are, any number at a time.
  static size_t operand_bytes(int64_t /*rows*/, int64_t /*in_features*/) { return 0; }
  /// `num_rows` rows of x, or those that `rows` names, for the weights that they will be multiplied with.
  Operand operand(Stream& /*stream*/, Scratch& /*scratch*/, const void* x, const int32_t* rows, int64_t /*num_rows*/, std::initializer_list<const PackedLinear*> /*weights*/) const {
    return {x, rows};
  }
  /// y = W x of `num_rows` rows.
  void multiply(Stream& stream, const PackedLinear& weight, const ops::Buffer& packed, DType activation, const Operand& x, int64_t num_rows, Epilogue epilogue, void* out) const;
  /// RMSNorm with factors `weight` + `weight_offset`.
  void norm(Stream& stream, DType activation, const void* x, int64_t num_rows, int64_t width, float eps, const float* weight, float weight_offset, void* out,
            int64_t out_stride) const;
  /// Widens a vector of a checkpoint to f32 and adds `addend`; `round_to` bf16 rounds first.
  void widen(Stream& stream, const ops::TensorView& source, float* out, float addend = 0.0f, DType round_to = DType::kF32) const;

 private:
  Function<LinearArgs> linear_;
  Function<NormArgs> norm_rows_;
  Function<WidenArgs> widen_;
};

/// An op's kernel on `Linears`, which packs and multiplies its weights.
template <class Op, template <class> class KernelOn, class Linears>
Result<std::unique_ptr<typename Op::Kernel>> make_on(const typename Op::Problem& problem, ops::Device& device) {
  ASSIGN_OR_RETURN(const Linears linears, Linears::create(cuda_device(device)));
  return std::unique_ptr<typename Op::Kernel>(std::make_unique<KernelOn<Linears>>(problem, linears));
}

}  // namespace quern::cuda
