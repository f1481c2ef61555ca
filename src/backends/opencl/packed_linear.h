#pragma once

#include <array>
#include <span>
#include <vector>

#include "backends/opencl/stream.h"
#include "ops/kernel.h"
#include "ops/linear.h"
#include "ops/rows.h"

namespace quern::opencl {

/// The order of a packed embedding table that a tied head reads too.
inline constexpr std::string_view kRowsLayout = "rows";

/// Numbers of the kernels: dtypes of numeric.clh, which are DType's, and scales of weight.clh.
inline constexpr int32_t kScalesNone = 0, kScalesBlock = 1, kScalesChannel = 2, kScalesTensor = 3;
int32_t scales_of(ops::WeightScheme scheme);
inline int32_t number_of(DType dtype) { return static_cast<int32_t>(dtype); }

/// "-DWEIGHT_E4M3", as linear.cl and dpas.cl ask for it.
const char* weight_definition(DType dtype);

/// What becomes of y = W x, where r(.) rounds to the activation dtype (epilogue.clh).
enum class Epilogue : int32_t {
  kStore,        // out = r(y)
  kStoreF32,     // out = y, f32
  kAddResidual,  // out = r(out + r(y))
  kSilu,         // out = r(silu(r(y)))
  kMultiply,     // out = r(out * r(y))
  kPair,         // of two weights in turn: out = r(r(silu(r(y of the first))) * r(y of the second))
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
  [[nodiscard]] int32_t scales() const { return scales_of(shape_.scheme); }
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

/// Consecutive rows of one kind, counted from the first row of what is computed together.
struct RowSegment {
  int64_t first = 0, count = 0;
  ops::RowKind kind = ops::RowKind::kDecode;
};
/// The rows [first, first + count) of a step; padding counts as decode rows.
std::vector<RowSegment> segments_of(const ops::Rows& rows, int64_t first, int64_t count);

/// The weights that an op multiplies its rows with, all of the same inputs, and what becomes of the products. kPair: gate and up, with one product.
struct LinearUse {
  std::vector<ops::LinearShape> weights;
  Epilogue epilogue = Epilogue::kStore;
  bool norms = false;  // rows are normed first
};
/// Rows of activations, [., width] in the activation dtype. `names` i32 [count] names the row of each, -1: zeros; without, a row is itself.
struct LinearRows {
  Place x, names;
  int64_t count = 0;
  Place norm;  // f32 [width], of LinearUse::norms
  float eps = 0.0f;
};

/// The kernels of norm.cl.
class VectorLauncher {
 public:
  static Result<VectorLauncher> create(Device& device, DType activation);
  /// RMSNorm with factors `weight` + `addend`; row i of out begins at element i * out_stride.
  void norm(Stream& stream, const Place& x, int64_t num_rows, int64_t width, float eps, const Place& weight, float addend, const Place& out, int64_t out_stride) const;
  /// Widens a vector of a checkpoint to f32 and adds `addend`; `round_to` bf16 rounds first.
  void widen(Stream& stream, const ops::TensorView& source, const Place& out, float addend = 0.0f, DType round_to = DType::kF32) const;

 private:
  Function norm_rows_, widen_;
};

// Ops with linear layers are written once, over one of two families, PlainLinears here and DpasLinears in tiled_linear.h: the weights of a LinearUse in a packed buffer from
// its beginning on, and their products.
//   create()        builds what is needed
//   pack()          a weight by its number
//   multiply()      rows of both kinds with all weights; outs are the rows of each product, [count, out_features]
//   scratch_bytes() what multiply takes of the workspace for so many rows

/// The kernels of norm.cl and linear.cl.
class PlainLinears {
 public:
  static constexpr std::string_view arithmetic(DType activation) { return activation == DType::kF32 ? "opencl.plain.f32" : "opencl.plain.bf16"; }
  static Result<PlainLinears> create(Device& device, DType activation, const LinearUse& use);

  [[nodiscard]] size_t end_bytes() const { return weights_.back().end_bytes(); }
  [[nodiscard]] size_t scratch_bytes(int64_t rows) const;
  void pack(size_t number, const ops::LinearSource& source, ops::Buffer& packed, Stream& stream) const { weights_[number].pack(source, packed, stream); }
  void multiply(Stream& stream, const ops::Buffer& packed, const LinearRows& rows, std::span<const RowSegment> segments, std::span<const Place> outs, Scratch& scratch) const;

 private:
  LinearUse use_;
  DType activation_ = DType::kBF16;
  VectorLauncher vectors_;
  std::vector<PackedLinear> weights_;
  std::array<Function, 4> linear_;  // by the weight's dtype
};

/// Rows that ops with linear layers take at a time, so that the workspace stays small whatever the step holds.
inline constexpr int64_t kRowTile = 512;

}  // namespace quern::opencl
