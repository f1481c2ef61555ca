#include "ops/cases.h"
#include "ops/linear_case.h"

namespace quern::ops::testing {
namespace {

std::string describe(const LinearExtent& e, WeightScheme scheme, int64_t rows) {
  return fmt::format("{} [{}, {}] at ({}, {}), {} rows", weight_scheme_name(scheme), e.out, e.in, e.row_offset, e.column_offset, rows);
}

/// x + W in of all rows at once, computed by `kernel`.
TensorView run(Bed& bed, const DownResidual::Kernel& kernel, const Buffer& packed, const TensorView& in, const TensorView& x_before) {
  const int64_t rows = in.shape[0];
  const TensorView x = bed.tensor(x_before.dtype, x_before.shape);
  bed.stream().copy(x_before, x);
  Launch launch = bed.launch(kernel, rows);
  Rows step;
  step.num_rows = static_cast<int32_t>(rows);
  const RowRun all{0, 0, step.num_rows, RowKind::kPrompt, true};
  step.runs = {&all, 1};
  kernel.enqueue(step, {ActivationLayout::kPlain, in, {}}, packed, x, launch);
  return x;
}

TEST(LinearResidual, AddsTheProductOfEverySchemeExtentAndRowCount) {
  for (const LinearExtent& e : kLinearExtents)
    for (const WeightScheme scheme : kSchemes) {
      Bed bed;
      Random random(17);
      const LinearCase linear(bed, random, {e.out, e.in, scheme}, e.row_offset, e.column_offset);
      const auto kernel = make_kernel<DownResidual>(bed, {{e.out, e.in, scheme}, ActivationLayout::kPlain, DType::kF32, true});
      Buffer& packed = bed.packed(*kernel);
      kernel->pack(linear.source, packed, bed.stream());
      for (const int64_t rows : kRowCounts) {
        SCOPED_TRACE(describe(e, scheme, rows));
        const Bed::Temporaries here(bed);
        const TensorView in = bed.tensor(DType::kF32, {rows, e.in}, random.normals(rows * e.in));
        const TensorView x = bed.tensor(DType::kF32, {rows, e.out}, random.normals(rows * e.out));
        Vector expected = Bed::doubles(x);
        const Vector inputs = Bed::doubles(in);
        for (size_t row = 0; row < static_cast<size_t>(rows); ++row) {
          const Vector y = multiply(linear.dense, testing::row(inputs, row, static_cast<size_t>(e.in)));
          for (size_t n = 0; n < y.size(); ++n) expected[row * y.size() + n] += y[n];
        }
        // Each of 16 lanes adds at most 8 products a block and 6 blocks: about 14 roundings of 2^-24 relative to sum |w x|, which for
        // random signs is below ten times the result's rms.
        EXPECT_LT(relative_rms(Bed::values(run(bed, *kernel, packed, in, x)), expected), 1e-6);
      }
    }
}

TEST(LinearResidual, RoundsTheProductAndTheSumToBf16) {
  Bed bed;
  Random random(18);
  const LinearCase linear(bed, random, {200, 300, WeightScheme::kFp8Block});
  const TensorView in = bed.tensor(DType::kBF16, {5, 300}, random.normals(5 * 300));
  const TensorView x = bed.tensor(DType::kBF16, {5, 200}, random.normals(5 * 200, 4.0f));
  const auto kernel = make_kernel<DownResidual>(bed, {linear.source.shape, ActivationLayout::kPlain, DType::kBF16, true});
  const auto partial = make_kernel<DownResidual>(bed, {linear.source.shape, ActivationLayout::kPlain, DType::kBF16, false});
  const auto exact = make_kernel<DownResidual>(bed, {linear.source.shape, ActivationLayout::kPlain, DType::kF32, false});
  Buffer& packed = bed.packed(*kernel);
  kernel->pack(linear.source, packed, bed.stream());
  // A candidate for bf16 alone leaves float32 to another one, which packs in its own way and may add in another order.
  Buffer& packed_exact = bed.packed(*exact);
  exact->pack(linear.source, packed_exact, bed.stream());
  const TensorView in_f32 = bed.tensor(DType::kF32, in.shape, Bed::values(in));
  const std::vector<float> product = Bed::values(run(bed, *exact, packed_exact, in_f32, bed.zeros(DType::kF32, x.shape)));
  constexpr float kStep = 0x1p-8f;  // from one bf16 to the next, at most this share
  const TensorView sum = run(bed, *kernel, packed, in, x), alone = run(bed, *partial, packed, in, x);
  for (int64_t i = 0; i < 5 * 200; ++i) {
    const float rounded = round_bf16(product[static_cast<size_t>(i)]);
    EXPECT_NEAR(Bed::get(alone, i), rounded, kStep * std::abs(rounded) + 1e-6f);
    EXPECT_EQ(Bed::get(sum, i), round_bf16(Bed::get(x, i) + Bed::get(alone, i)));
  }
}

TEST(LinearResidual, GivesARowTheSameBitsAloneInABatchAndOnAnyThreads) {
  for (const WeightScheme scheme : kSchemes) {
    SCOPED_TRACE(weight_scheme_name(scheme));
    std::string expected;
    for (const int threads : {1, 2, 3}) {
      Bed bed(threads);
      Random random(19);
      const LinearCase linear(bed, random, {200, 300, scheme}, 64, 100);
      const TensorView in = bed.tensor(DType::kBF16, {70, 300}, random.normals(70 * 300));
      const TensorView x = bed.tensor(DType::kBF16, {70, 200}, random.normals(70 * 200));
      const auto kernel = make_kernel<OutResidual>(bed, {linear.source.shape, ActivationLayout::kPlain, DType::kBF16, true});
      Buffer& packed = bed.packed(*kernel);
      kernel->pack(linear.source, packed, bed.stream());
      const std::string together = Bed::bytes(run(bed, *kernel, packed, in, x));
      if (expected.empty()) expected = together;
      EXPECT_EQ(together, expected) << threads << " threads";
      std::string alone;
      for (int64_t row = 0; row < 70; ++row) {
        TensorView one_in = in.at(row), one_x = x.at(row);
        one_in.shape = {1, 300};
        one_x.shape = {1, 200};
        alone += Bed::bytes(run(bed, *kernel, packed, one_in, one_x));
      }
      EXPECT_EQ(alone, expected) << threads << " threads";
    }
  }
}

TEST(LinearResidual, RefusesActivationLayoutsOfOtherPlatforms) {
  const auto& candidate = backends::kernel_table(Platform::kCpu).list<OutResidual>().candidates().back();
  const DeviceTraits traits;
  EXPECT_TRUE(candidate.accepts({{8, 8, WeightScheme::kBF16}}, traits).accepted);
  const Verdict layout = candidate.accepts({{8, 8, WeightScheme::kBF16}, ActivationLayout::kE4M3}, traits);
  EXPECT_FALSE(layout.accepted);
  EXPECT_NE(layout.reason, "");
  const Verdict dtype = candidate.accepts({{8, 8, WeightScheme::kBF16}, ActivationLayout::kPlain, DType::kF16}, traits);
  EXPECT_FALSE(dtype.accepted);
  EXPECT_THAT(dtype.reason, ::testing::HasSubstr("f16"));
}

}  // namespace
}  // namespace quern::ops::testing
