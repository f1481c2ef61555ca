#include "ops/linear_case.h"

// What "cuda.mma.e4m3" (on Hopper "cuda.mma.e4m3.emulated") has apart from the rest of mma_linear_test.cpp.

namespace quern::ops::testing {
namespace {

constexpr double kBound = 6e-3;  // three or four roundings to bf16
constexpr std::string_view kArithmetic = "cuda.mma.e4m3.k128";
#define ONLY_E4M3() \
  if (!candidate_under_test().starts_with("cuda.mma.e4m3")) GTEST_SKIP() << "this test is about cuda.mma.e4m3"

constexpr WeightScheme kFp8[] = {WeightScheme::kFp8Block, WeightScheme::kFp8Channel, WeightScheme::kFp8Tensor};

/// Rows of more than one pass through the workspace, and rows of which launches have some in blocks, some split: features enough for either.
TEST(E4M3Linear, TakesManyRowsAndFeaturesToTheSameBits) {
  ONLY_E4M3();
  for (const auto& [out, in, rows] : {std::tuple{int64_t{6400}, int64_t{256}, int64_t{200}}, {320, 256, 2300}}) {
    Bed bed;
    Random random(12);
    const LinearCase linear(bed, random, {out, in, WeightScheme::kFp8Block});
    const TensorView x = bed.tensor(DType::kBF16, {rows, in}, random.normals(rows * in)), y = bed.tensor(DType::kBF16, {rows, out});
    const auto kernel = make_kernel<DownResidual>(bed, {linear.source.shape, ActivationLayout::kPlain, DType::kBF16, false});
    ASSERT_EQ(kernel->arithmetic(), kArithmetic);
    Buffer& packed = bed.packed(*kernel);
    kernel->pack(linear.source, packed, bed.stream());
    const auto enqueue = [&](int64_t first, int64_t count) {
      Launch launch = bed.launch(*kernel, count);
      kernel->enqueue(KindRows(count, RowKind::kPrompt).rows, {ActivationLayout::kPlain, rows_from(x, first, count), {}}, packed, rows_from(y, first, count), launch);
    };
    enqueue(0, rows);
    const std::string together = Bed::bytes(y);
    for (const int64_t piece : {31, 100, 128, 190, 2048}) {
      std::memset(y.data<std::byte>(), 0xff, y.size_bytes());
      for (int64_t first = 0; first < rows; first += piece) enqueue(first, std::min(piece, rows - first));
      EXPECT_TRUE(Bed::bytes(y) == together) << "pieces of " << piece;
    }
    Vector expected;
    std::vector<float> actual;
    for (const int64_t row : {int64_t{0}, int64_t{129}, rows - 1}) {
      for (const double value : multiply(linear.dense, seen_by(linear.source.shape, row_of(x, row)))) expected.push_back(value);
      for (const double value : row_of(y, row)) actual.push_back(static_cast<float>(value));
    }
    EXPECT_LE(relative_rms(actual, expected), kBound);
  }
}

TEST(E4M3Linear, MultipliesEveryCodeByEveryOther) {
  ONLY_E4M3();
  // Feature f has code f in column 0 of a group and zeros else; row r has code r there and, so that its scale is one, 448 in a column that no feature has.
  Bed bed;
  Random random(6);
  LinearCase linear(bed, random, {256, 128, WeightScheme::kFp8Tensor});
  Bed::set(linear.source.scale, 0, 1.0f);
  std::vector<float> rows(256 * 128);
  for (size_t i = 0; i < 256; ++i) {
    for (size_t k = 0; k < 128; ++k) linear.source.weight.data<uint8_t>()[i * 128 + k] = k == 0 ? static_cast<uint8_t>((i & 0x7f) == 0x7f ? 0 : i) : uint8_t{0};
    rows[i * 128] = (i & 0x7f) == 0x7f ? 0.0f : kE4M3Table[i];
    rows[i * 128 + 77] = 448;
  }
  const TensorView x = bed.tensor(DType::kBF16, {256, 128}, rows);
  const auto kernel = make_kernel<OutResidual>(bed, {linear.source.shape, ActivationLayout::kPlain, DType::kBF16, false});
  ASSERT_EQ(kernel->arithmetic(), kArithmetic);
  Buffer& packed = bed.packed(*kernel);
  kernel->pack(linear.source, packed, bed.stream());
  const TensorView out = bed.tensor(DType::kBF16, {256, 256});
  Launch launch = bed.launch(*kernel, 256);
  kernel->enqueue(KindRows(256, RowKind::kPrompt).rows, {ActivationLayout::kPlain, x, {}}, packed, out, launch);
  for (int64_t row = 0; row < 256; ++row)
    for (int64_t feature = 0; feature < 256; ++feature) {
      if ((feature & 0x7f) == 0x7f) continue;
      EXPECT_EQ(Bed::get(out, row * 256 + feature), round_bf16(rows[static_cast<size_t>(row * 128)] * kE4M3Table[static_cast<size_t>(feature)])) << row << " by " << feature;
    }
}

std::string refusal(std::string_view name, std::string_view card, const OutResidual::Problem& problem, bool quantises = true) {
  DeviceTraits traits = backends::traits_by_name(card).value();
  traits.device_code = true;  // also in builds without nvcc
  traits.fp8_matrix = traits.fp8_matrix && quantises;
  for (const auto& candidate : backends::kernel_table(Platform::kCuda).out_residual.candidates())
    if (candidate.name == name) return candidate.accepts(problem, traits).reason;
  return "there is no such candidate";
}

TEST(E4M3Linear, SaysWhatItDoesNotTake) {
  using ::testing::HasSubstr;
  const auto problem = [](WeightScheme scheme, int64_t out = 5120, int64_t in = 6144, DType activation = DType::kBF16) {
    return OutResidual::Problem{{out, in, scheme}, ActivationLayout::kPlain, activation};
  };
  const OutResidual::Problem block = problem(WeightScheme::kFp8Block);
  for (const WeightScheme scheme : kFp8)
    for (const char* card : {"l40s", "rtx4090", "rtx5090", "rtxpro6000"}) EXPECT_EQ(refusal("cuda.mma.e4m3", card, problem(scheme)), "") << card;
  EXPECT_THAT(refusal("cuda.mma.e4m3", "a100", block), HasSubstr("sm_80"));
  EXPECT_THAT(refusal("cuda.mma.e4m3", "rtx3090", block), HasSubstr("sm_86"));
  EXPECT_THAT(refusal("cuda.mma.e4m3", "h200", block), HasSubstr("warpgroups"));
  EXPECT_THAT(refusal("cuda.mma.e4m3", "rtx4090", block, false), HasSubstr("not wanted"));
  EXPECT_THAT(refusal("cuda.mma.e4m3", "rtx4090", problem(WeightScheme::kBF16)), HasSubstr("no weight is FP8"));
  EXPECT_THAT(refusal("cuda.mma.e4m3", "rtx4090", problem(WeightScheme::kFp8Block, 5120, 6100)), HasSubstr("6100"));
  EXPECT_THAT(refusal("cuda.mma.e4m3", "rtx4090", problem(WeightScheme::kFp8Block, 5119)), HasSubstr("odd"));
  EXPECT_THAT(refusal("cuda.mma.e4m3", "rtx4090", problem(WeightScheme::kFp8Block, 0)), HasSubstr("empty"));
  EXPECT_THAT(refusal("cuda.mma.e4m3", "rtx4090", problem(WeightScheme::kFp8Block, 5120, 6144, DType::kF32)), HasSubstr("f32"));
  EXPECT_EQ(refusal("cuda.mma.e4m3.emulated", "h200", block), "");
  EXPECT_THAT(refusal("cuda.mma.e4m3.emulated", "rtx5090", block), HasSubstr("no emulation"));
  EXPECT_THAT(refusal("cuda.mma.e4m3.emulated", "a100", block), HasSubstr("sm_80"));
}

}  // namespace
}  // namespace quern::ops::testing
