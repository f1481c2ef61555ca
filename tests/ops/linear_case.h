#pragma once

#include <cstring>
#include <optional>
#include <span>
#include <string>

#include "ops/bed.h"
#include "ops/reference.h"

namespace quern::ops::testing {

/// A weight of any scheme on the device, and the same matrix in double precision: the stored values times their scales, exactly.
struct LinearCase {
  LinearSource source;
  Vector dense;  // [out, in]

  LinearCase(Bed& bed, Random& random, const LinearShape& shape, int64_t row_offset = 0, int64_t column_offset = 0) {
    source.shape = shape;
    source.row_offset = row_offset;
    source.column_offset = column_offset;
    const int64_t out = shape.out_features, in = shape.in_features;
    const float spread = 1.0f / std::sqrt(static_cast<float>(std::max<int64_t>(in, 1)));
    const DType dtype = stored_dtype(shape.scheme);
    source.weight = bed.tensor(dtype, {out, in});
    const int64_t scale_rows = ceil_div(row_offset + out, kScaleBlock), scale_columns = ceil_div(column_offset + in, kScaleBlock);
    std::vector<float> scales;
    if (shape.scheme == WeightScheme::kFp8Block) scales.resize(static_cast<size_t>(scale_rows * scale_columns));
    if (shape.scheme == WeightScheme::kFp8Channel) scales.resize(static_cast<size_t>(out));
    if (shape.scheme == WeightScheme::kFp8Tensor) scales.resize(1);
    for (float& scale : scales) scale = round_bf16(spread / 32.0f * static_cast<float>(0.5 + random.uniform()));
    if (shape.scheme == WeightScheme::kFp8Block)
      source.scale = bed.tensor(DType::kF32, {scale_rows, scale_columns}, scales);
    else if (!scales.empty())
      source.scale = bed.tensor(DType::kF32, {std::ssize(scales)}, scales);
    for (int64_t n = 0; n < out; ++n)
      for (int64_t k = 0; k < in; ++k) {
        const int64_t i = n * in + k;
        double scale = 1;
        if (shape.scheme == WeightScheme::kFp8Block)
          scale = scales[static_cast<size_t>((row_offset + n) / kScaleBlock * scale_columns + (column_offset + k) / kScaleBlock)];
        if (shape.scheme == WeightScheme::kFp8Channel) scale = scales[static_cast<size_t>(n)];
        if (shape.scheme == WeightScheme::kFp8Tensor) scale = scales[0];
        if (dtype == DType::kF16)
          source.weight.data<uint16_t>()[i] = random_half(random, spread);
        else
          Bed::set(source.weight, i, random.normal() * (is_fp8(shape.scheme) ? 32.0f : spread));
        dense.push_back(static_cast<double>(Bed::get(source.weight, i)) * scale);
      }
  }

 private:
  /// A half of roughly the wanted size: random sign and mantissa, exponent near log2(spread).
  static uint16_t random_half(Random& random, float spread) {
    const int exponent = std::max(1, 15 + static_cast<int>(std::floor(std::log2(spread))) - static_cast<int>(random.below(3)));
    return static_cast<uint16_t>(random.below(2) << 15 | exponent << 10 | random.below(1024));
  }
};

/// What a row is once it is quantised: s = max |x| / 448 of each group of 128, e4m3(x / s) s.
inline Vector quantised(const Vector& x) {
  Vector result(x.size());
  for (size_t begin = 0; begin < x.size(); begin += 128) {
    float most = 1e-10f;
    for (size_t i = begin; i < begin + 128; ++i) most = std::max(most, std::abs(static_cast<float>(x[i])));
    for (size_t i = begin; i < begin + 128; ++i) result[i] = double{kE4M3Table[e4m3_encode(static_cast<float>(x[i]) * (448.0f / most))]} * (most / 448.0f);
  }
  return result;
}

/// Rows of one kind, of one sequence.
struct KindRows {
  RowRun run;
  Rows rows;
  KindRows(int64_t n, RowKind kind) : run{0, 0, static_cast<int32_t>(n), kind, true} {
    rows.num_rows = static_cast<int32_t>(n);
    rows.runs = {&run, 1};
  }
};
/// Rows of a tensor [rows, columns] as one of their own.
inline TensorView rows_from(const TensorView& x, int64_t first, int64_t count) {
  TensorView view = x;
  view.offset_bytes += static_cast<size_t>(first * x.shape[1]) * dtype_size(x.dtype);
  view.shape = {count, x.shape[1]};
  return view;
}
inline Vector row_of(const TensorView& x, int64_t row) {
  Vector result;
  for (int64_t i = 0; i < x.shape[1]; ++i) result.push_back(Bed::get(x, row * x.shape[1] + i));
  return result;
}
inline Vector rounded_to_bf16(Vector x) {
  for (double& value : x) value = round_bf16(static_cast<float>(value));
  return x;
}
/// What a weight of `shape` meets of a row where activations are quantised: rounded to bf16, quantised if the weight is FP8.
inline Vector seen_by(const LinearShape& shape, Vector x) {
  x = rounded_to_bf16(std::move(x));
  return is_fp8(shape.scheme) ? quantised(x) : x;
}

/// Runs `enqueue(first, count, kind)` over all rows at once as `whole` and in pieces of each size as `apart`, of few launches in pieces of one size after the other: the bytes
/// of `out` must be the same.
template <class Enqueue>
void expect_same_bits(const TensorView& out, int64_t rows, RowKind whole, RowKind apart, std::span<const int64_t> pieces, const Enqueue& enqueue) {
  enqueue(0, rows, whole);
  const std::string together = Bed::bytes(out);
  const auto enqueue_pieces = [&](std::span<const int64_t> sizes) {
    std::memset(out.data<std::byte>(), 0xff, out.size_bytes());
    int64_t first = 0;
    for (size_t turn = 0; first < rows; first += sizes[turn++ % sizes.size()]) enqueue(first, std::min(sizes[turn % sizes.size()], rows - first), apart);
    EXPECT_TRUE(Bed::bytes(out) == together) << "pieces of " << sizes.front() << " to " << sizes.back();
  };
  if (few_launches()) return enqueue_pieces(pieces);
  for (size_t i = 0; i < pieces.size(); ++i) enqueue_pieces(pieces.subspan(i, 1));
}

}  // namespace quern::ops::testing
