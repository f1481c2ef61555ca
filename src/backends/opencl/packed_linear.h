#pragma once

#include <array>

#include "backends/opencl/stream.h"
#include "ops/kernel.h"
#include "ops/linear.h"

namespace quern::opencl {

/// The order of a packed embedding table that a tied head reads too.
inline constexpr std::string_view kRowsLayout = "rows";

/// Numbers of the kernels: dtypes of numeric.clh, which are DType's, and scales of weight.clh.
inline constexpr int32_t kScalesNone = 0, kScalesBlock = 1, kScalesChannel = 2, kScalesTensor = 3;
inline int32_t number_of(DType dtype) { return static_cast<int32_t>(dtype); }

/// What becomes of y = W x, where r(.) rounds to the activation dtype (linear.cl).
enum class Epilogue : int32_t {
  kStore,        // out = r(y)
  kStoreF32,     // out = y, f32
  kAddResidual,  // out = r(out + r(y))
  kSilu,         // out = r(silu(r(y)))
  kMultiply,     // out = r(out * r(y))
};

/// One weight's place in a packed buffer: the rows as stored, at the next multiple of 256 bytes the f32 scales, then the offsets into the scale grid.
class PackedLinear {
 public:
  PackedLinear(const ops::LinearShape& shape, size_t offset_bytes);

  /// One past the last byte, a multiple of 256: where the next weight begins.
  [[nodiscard]] size_t end_bytes() const { return end_; }
  [[nodiscard]] const ops::LinearShape& shape() const { return shape_; }
  void pack(const ops::LinearSource& source, ops::Buffer& packed, Stream& stream) const;

  [[nodiscard]] DType dtype() const { return ops::stored_dtype(shape_.scheme); }
  [[nodiscard]] int32_t scales() const;
  [[nodiscard]] Place weight_in(const ops::Buffer& packed) const { return place_in(packed, weight_at_); }
  [[nodiscard]] Place scale_in(const ops::Buffer& packed) const { return scales() == kScalesNone ? Place{} : place_in(packed, scale_at_); }
  [[nodiscard]] Place offsets_in(const ops::Buffer& packed) const { return scales() == kScalesBlock ? place_in(packed, offsets_at_) : Place{}; }

 private:
  ops::LinearShape shape_;
  size_t weight_at_, scale_at_, offsets_at_, end_;
};

/// Pieces of a launch's workspace, one after the other, each a multiple of 256 bytes into it.
class Scratch {
 public:
  explicit Scratch(const ops::TensorView& workspace) : workspace_(place_of(workspace)), left_(workspace.size_bytes()) {}
  Place take(size_t bytes) {
    const size_t whole = size(bytes);
    CHECK(whole <= left_);
    const Place piece = workspace_;
    workspace_.offset_bytes += whole;
    left_ -= whole;
    return piece;
  }
  static constexpr size_t size(size_t bytes) { return (bytes + 255) / 256 * 256; }

 private:
  Place workspace_;
  size_t left_;
};

/// The kernels of linear.cl and norm.cl, and how plain ops launch them.
class LinearLauncher {
 public:
  /// For activations of that dtype and the weights that will be multiplied.
  static Result<LinearLauncher> create(Device& device, DType activation, std::initializer_list<ops::LinearShape> weights);

  /// y = W x of `num_rows` rows; `x_rows` may name them.
  void multiply(Stream& stream, const PackedLinear& weight, const ops::Buffer& packed, const Place& x, int64_t num_rows, Epilogue epilogue, const Place& out,
                const Place& x_rows = {}) const;
  /// RMSNorm with factors `weight` + `addend`; row i of out begins at element i * out_stride.
  void norm(Stream& stream, const Place& x, int64_t num_rows, int64_t width, float eps, const Place& weight, float addend, const Place& out, int64_t out_stride) const;
  /// Widens a vector of a checkpoint to f32 and adds `addend`; `round_to` bf16 rounds first.
  void widen(Stream& stream, const ops::TensorView& source, const Place& out, float addend = 0.0f, DType round_to = DType::kF32) const;

 private:
  std::array<Function, 4> linear_;  // by the weight's dtype
  Function norm_rows_, widen_;
};

/// Rows that plain ops take at a time, so that the workspace stays small whatever the step holds.
inline constexpr int64_t kRowTile = 512;

}  // namespace quern::opencl
