#pragma once

#include <array>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/float_convert.h"
#include "base/hash.h"
#include "ops/kernel.h"

// Inputs and outputs of one kernel in the self-test, through Device and Stream alone.

namespace quern::worker::selftest {

/// What a kernel left in device memory, widened to f32.
struct Output {
  std::string name;
  std::vector<float> values;
  int64_t row_length = 1;
  double bound = 0;  // of the normalised mean square error of any row; 0: the values agree exactly
};

/// Normalised mean square error of rounding values of evenly spread magnitude once: a step of 2^-p relative to the power of two below has the variance
/// 4^-p / 12, and 1/x^2 averages 0.54 over an octave. For f32 it is what another order of a long sum leaves.
constexpr double rounding_error(DType dtype) {
  switch (dtype) {
    case DType::kBF16: return 2.75e-6;  // p = 7
    case DType::kE4M3: return 7.0e-4;   // p = 3
    default: return 1e-11;
  }
}

inline constexpr int32_t kNumSlots = 3;
/// Block table entries of a slot: indices below 1216.
inline constexpr int32_t kMaxBlocks = 19;
/// Drafts that the slot tables have room for, where the problem does not say.
inline constexpr int32_t kDrafts = 4;

/// Where the sequences of the slots stand. Slot 1 belongs to nobody: what its tensors hold must not matter.
struct Positions {
  std::array<int32_t, kNumSlots> cursor{}, boundary{};
};

/// Rows of one step with their tables, as `embed` leaves them.
struct Step {
  std::vector<ops::RowRun> runs;
  ops::Rows rows;  // refers to `runs`
};

/// `num_rows` rows of one kind: at first most of them in slot 2, then up to three in slot 0.
std::vector<ops::RowRun> two_runs(ops::RowKind kind, int32_t num_rows);

/// One row, a few, one past a tile, and prompt rows of several. Rows of a list go on from each other: some 350 in all fit the tables above.
inline const std::vector<int32_t> kRowCounts = {1, 3, 65, 193};

/// One run of one kernel: inputs that are random but the same for each candidate, and the outputs it kept. Owns the device memory of both.
class Trial {
 public:
  Trial(ops::Device& device, ops::Stream& stream, std::vector<int32_t> row_counts = kRowCounts) : device_(device), stream_(stream), row_counts_(std::move(row_counts)) {}

  /// Calls visit(kind, num_rows, label) for both kinds and each number of rows, decode rows up to 65; stops at an error.
  template <class Visit>
  Result<void> for_each_batch(Visit&& visit) const {
    for (const ops::RowKind kind : {ops::RowKind::kPrompt, ops::RowKind::kDecode})
      for (const int32_t num_rows : row_counts_) {
        if (num_rows > 65 && kind == ops::RowKind::kDecode) continue;
        RETURN_IF_ERROR(visit(kind, num_rows, fmt::format("{} {} row{}", num_rows, kind == ops::RowKind::kPrompt ? "prompt" : "decode", num_rows == 1 ? "" : "s")));
      }
    return {};
  }

  /// value(i) is element i; rounded to the dtype.
  template <class Value>
  Result<ops::TensorView> tensor(DType dtype, const Shape& shape, Value&& value) {
    const size_t size = dtype_size(dtype);
    std::vector<std::byte> bytes(static_cast<size_t>(shape.num_elements()) * size);
    for (int64_t i = 0; i < shape.num_elements(); ++i) store(static_cast<float>(value(i)), dtype, bytes.data() + static_cast<size_t>(i) * size);
    return upload(bytes, dtype, shape);
  }
  Result<ops::TensorView> uniform(DType dtype, const Shape& shape, float low, float high) {
    return tensor(dtype, shape, [&](int64_t) { return uniform(low, high); });
  }
  Result<ops::TensorView> ints(const Shape& shape, const std::vector<int32_t>& values) { return upload(std::as_bytes(std::span(values)), DType::kI32, shape); }
  /// All bytes 0xff: NaN, or -1. Who reads what is not written, or leaves out what is to be written, shows it.
  Result<ops::TensorView> unwritten(DType dtype, const Shape& shape);
  Result<ops::TensorView> upload(std::span<const std::byte> bytes, DType dtype, const Shape& shape);

  /// Random, so that W x has about the variance of x. In FP8 each scale block (or row) has its own magnitude of codes, down to the
  /// subnormals, and a scale that makes up for it: each counts alike in the result.
  Result<ops::LinearSource> linear(const ops::LinearShape& shape);
  /// A zero-centred norm weight [n].
  Result<ops::TensorView> norm(DType activation, int64_t n) { return uniform(activation, {n}, -0.5f, 0.5f); }

  /// Fills first_row of the runs, indices and positions from `positions`, and block tables that scatter each slot's blocks.
  Result<Step> step(std::vector<ops::RowRun> runs, const Positions& positions);

  /// The packed weights: pack_into(buffer) packs them.
  template <class PackInto>
  Result<const ops::Buffer*> pack(const ops::Kernel& kernel, PackInto&& pack_into) {
    ASSIGN_OR_RETURN(buffers_.emplace_back(), device_.allocate(kernel.packed_bytes(), "self-test"));
    ops::Buffer* packed = buffers_.back().get();
    pack_into(*packed);
    RETURN_IF_ERROR(stream_.finish());
    return packed;
  }
  /// With a workspace of the size that the kernel asks for.
  Result<ops::Launch> launch(const ops::Kernel& kernel, int64_t max_rows);

  /// Waits, and keeps what `view` holds for the comparison.
  Result<void> keep(std::string name, const ops::TensorView& view, double bound);
  Result<std::vector<float>> read(const ops::TensorView& view);
  void keep(Output output) { outputs_.push_back(std::move(output)); }
  std::vector<Output> take() { return std::move(outputs_); }

  /// The bound of an op with `num_roundings` roundings to the activation dtype on its way. FP8 weights on devices with FP8 matrix units also round the
  /// activations to E4M3: `num_quantizations` says how many such errors the worst row may show (of some hundred simulated rows: 1.6 after one product).
  [[nodiscard]] double bound(int num_roundings, DType activation, std::initializer_list<ops::WeightScheme> schemes = {}, int num_quantizations = 2) const;

  ops::Stream& stream() { return stream_; }
  float uniform(float low, float high) { return low + (high - low) * static_cast<float>(random_.next() >> 40) * 0x1p-24f; }
  int32_t below(int32_t n) { return static_cast<int32_t>(random_.next() % static_cast<uint64_t>(n)); }

 private:
  static void store(float value, DType dtype, std::byte* out);

  ops::Device& device_;
  ops::Stream& stream_;
  std::vector<int32_t> row_counts_;
  SplitMix64 random_{0x7175657266u};
  std::vector<std::unique_ptr<ops::Buffer>> buffers_;
  std::vector<Output> outputs_;
};

/// Why `actual` is not what `expected` is; empty where it is.
std::string difference(const std::vector<Output>& expected, const std::vector<Output>& actual);

}  // namespace quern::worker::selftest
