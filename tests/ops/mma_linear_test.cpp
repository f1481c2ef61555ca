#include "ops/linear_case.h"

// The linear layers of "cuda.mma", where FP8 weights are widened to bf16 exactly and activations stay bf16, and of "cuda.mma.e4m3" (on Hopper "cuda.mma.e4m3.emulated"), where FP8 weights meet
// activations quantised per row and group of 128, so the reference quantises as well. A row has the same bits in any launch, as a prompt row and as a decode row.

namespace quern::ops::testing {
namespace {

constexpr float kEps = 1e-6f;
constexpr double kBound = 6e-3;  // three or four roundings to bf16
bool quantises() { return candidate_under_test().starts_with("cuda.mma.e4m3"); }
#define ONLY_MMA() \
  if (candidate_under_test() != "cuda.mma" && !quantises()) GTEST_SKIP() << "this test is about cuda.mma and cuda.mma.e4m3"
#define ONLY_W16() \
  if (candidate_under_test() != "cuda.mma") GTEST_SKIP() << "this test is about cuda.mma"

constexpr WeightScheme kAll[] = {WeightScheme::kFp8Block, WeightScheme::kFp8Channel, WeightScheme::kFp8Tensor, WeightScheme::kBF16};
/// A linear layer that quantises has FP8 weights.
std::span<const WeightScheme> schemes() { return std::span(kAll).first(quantises() ? 3 : 4); }
std::string_view arithmetic() { return quantises() ? "cuda.mma.e4m3.k128" : "cuda.mma.w16"; }
/// f32 sums of exact products; matrix units that multiply e4m3 keep about 14 bits of a sum over 128 of K.
double logit_bound() { return quantises() ? 4e-4 : 2e-6; }
/// What a weight of that shape is multiplied with.
Vector as_met(const LinearShape& shape, Vector x) { return quantises() ? seen_by(shape, std::move(x)) : rounded_to_bf16(std::move(x)); }

/// Around the row counts at which launches change their shape or are cut.
constexpr int64_t kPieces[] = {1, 7, 8, 9, 16, 17, 32, 33, 64, 65, 128, 129, 130};

TEST(MmaLinear, AddsTheProductOfEverySchemeExtentAndOffset) {
  ONLY_MMA();
  struct Extent {
    int64_t out, in, row_offset = 0;
  };
  // One scale block, fewer than slices, more; tiles and blocks of features that are not whole; slices that begin inside a scale block; the K of the 27B model's down_proj on four ranks.
  for (const Extent e : {Extent{2, 128}, {48, 640, 96}, {130, 1152}, {328, 2560, 32}, {300, 4352, 64}})
    for (const WeightScheme scheme : schemes())
      for (const bool adds : {true, false}) {
        if (!adds && e.in != 640) continue;
        const int64_t row_offset = scheme == WeightScheme::kFp8Block || scheme == WeightScheme::kFp8Channel ? e.row_offset : 0;
        SCOPED_TRACE(::testing::Message() << weight_scheme_name(scheme) << " " << e.out << " x " << e.in << " at row " << row_offset << (adds ? ", added" : ""));
        Bed bed;
        Random random(5);
        constexpr int64_t rows = 195;
        const LinearCase linear(bed, random, {e.out, e.in, scheme}, row_offset);
        const TensorView in = bed.tensor(DType::kBF16, {rows, e.in}, random.normals(rows * e.in));
        const TensorView before = bed.tensor(DType::kBF16, {rows, e.out}, random.normals(rows * e.out));
        const auto kernel = make_kernel<OutResidual>(bed, {linear.source.shape, ActivationLayout::kPlain, DType::kBF16, adds});
        ASSERT_EQ(kernel->arithmetic(), arithmetic());
        Buffer& packed = bed.packed(*kernel);
        kernel->pack(linear.source, packed, bed.stream());
        const TensorView x = bed.tensor(DType::kBF16, {rows, e.out});
        const auto enqueue = [&](int64_t first, int64_t count, RowKind kind) {
          bed.stream().copy(rows_from(before, first, count), rows_from(x, first, count));
          Launch launch = bed.launch(*kernel, count);
          kernel->enqueue(KindRows(count, kind).rows, {ActivationLayout::kPlain, rows_from(in, first, count), {}}, packed, rows_from(x, first, count), launch);
        };
        expect_same_bits(x, rows, RowKind::kPrompt, RowKind::kDecode, kPieces, enqueue);
        Vector expected;
        std::vector<float> actual;
        for (const int64_t row : {int64_t{0}, int64_t{1}, int64_t{40}, rows - 1}) {
          const Vector y = multiply(linear.dense, as_met(linear.source.shape, row_of(in, row)));
          for (int64_t i = 0; i < e.out; ++i) {
            expected.push_back(y[static_cast<size_t>(i)] + (adds ? double{Bed::get(before, row * e.out + i)} : 0.0));
            actual.push_back(Bed::get(x, row * e.out + i));
          }
        }
        EXPECT_LE(relative_rms(actual, expected), kBound);
      }
}

/// Ranks of small models cut rows at 32, 64 and 96 of a scale block; in_features are whole blocks.
TEST(MmaLinear, TakesSlicesThatBeginInsideAScaleBlock) {
  ONLY_W16();
  for (const int64_t row_offset : {32, 64, 96, 128 + 96}) {
    SCOPED_TRACE(row_offset);
    Bed bed;
    Random random(9);
    constexpr int64_t kRows = 40, kIn = 384, kOut = 200;
    const LinearCase linear(bed, random, {kOut, kIn, WeightScheme::kFp8Block}, row_offset % kScaleBlock);
    const TensorView in = bed.tensor(DType::kBF16, {kRows, kIn}, random.normals(kRows * kIn)), x = bed.tensor(DType::kBF16, {kRows, kOut});
    const auto kernel = make_kernel<OutResidual>(bed, {linear.source.shape, ActivationLayout::kPlain, DType::kBF16, false});
    ASSERT_EQ(kernel->arithmetic(), "cuda.mma.w16");
    Buffer& packed = bed.packed(*kernel);
    LinearSource source = linear.source;
    source.row_offset = row_offset;
    kernel->pack(source, packed, bed.stream());
    Launch launch = bed.launch(*kernel, kRows);
    kernel->enqueue(KindRows(kRows, RowKind::kPrompt).rows, {ActivationLayout::kPlain, in, {}}, packed, x, launch);
    Vector expected;
    for (int64_t row = 0; row < kRows; ++row)
      for (const double y : multiply(linear.dense, row_of(in, row))) expected.push_back(y);
    EXPECT_LE(relative_rms(Bed::values(x), expected), kBound);
  }
}

/// What tiles cannot hold is an error of loading, with what would work.
TEST(MmaLinear, FailsToPackSlicesThatItsTilesCannotHold) {
  if (platform_under_test() != "cuda") GTEST_SKIP() << "this test is about cuda";
  for (const auto& [row_offset, column_offset] : {std::pair{int64_t{16}, int64_t{0}}, {0, 64}, {50, 32}}) {
    Bed bed;
    Random random(9);
    const LinearCase linear(bed, random, {128, 256, WeightScheme::kFp8Block}, row_offset, column_offset);
    const auto kernel = make_kernel<OutResidual>(bed, {linear.source.shape, ActivationLayout::kPlain, DType::kBF16, false});
    Buffer& packed = bed.packed(*kernel);
    const std::unique_ptr<Stream> stream = bed.device().make_stream().value();
    kernel->pack(linear.source, packed, *stream);
    const Result<void> outcome = stream->finish();
    if (kernel->arithmetic().starts_with("cuda.plain")) {
      EXPECT_OK(outcome);
    } else {
      ASSERT_FALSE(outcome.has_value());
      EXPECT_THAT(outcome.error().message, ::testing::AllOf(::testing::HasSubstr(fmt::format("{} rows and {} columns", row_offset, column_offset)), ::testing::HasSubstr("cuda.plain")));
    }
  }
}

TEST(MmaLinear, WidensEveryCodeExactly) {
  ONLY_W16();
  // Each code times one: 128 columns of which one row of x picks one.
  Bed bed;
  Random random(6);
  LinearCase linear(bed, random, {256, 128, WeightScheme::kFp8Tensor});
  Bed::set(linear.source.scale, 0, 1.0f);
  for (int64_t feature = 0; feature < 256; ++feature)
    for (int64_t k = 0; k < 128; ++k) linear.source.weight.data<uint8_t>()[feature * 128 + k] = static_cast<uint8_t>((feature + k) % 256);
  std::vector<float> picks(128 * 128);
  for (size_t k = 0; k < 128; ++k) picks[k * 128 + k] = 1;
  const TensorView x = bed.tensor(DType::kBF16, {128, 128}, picks);
  const auto kernel = make_kernel<OutResidual>(bed, {linear.source.shape, ActivationLayout::kPlain, DType::kBF16, false});
  Buffer& packed = bed.packed(*kernel);
  kernel->pack(linear.source, packed, bed.stream());
  const TensorView out = bed.tensor(DType::kBF16, {128, 256});
  Launch launch = bed.launch(*kernel, 128);
  kernel->enqueue(KindRows(128, RowKind::kPrompt).rows, {ActivationLayout::kPlain, x, {}}, packed, out, launch);
  for (int64_t row = 0; row < 128; ++row)
    for (int64_t feature = 0; feature < 256; ++feature) {
      // A row of x whose column meets one of the two NaN codes is not looked at: no weight holds them.
      const auto code = static_cast<uint8_t>((feature + row) % 256);
      if ((code & 0x7f) == 0x7f) continue;
      EXPECT_EQ(Bed::get(out, row * 256 + feature), kE4M3Table[code]) << "code " << int{code} << " in row " << row;
    }
}

TEST(MmaLinear, MlpInIsSiluOfGateTimesUpOfTheNormedInput) {
  ONLY_MMA();
  for (const WeightScheme scheme : schemes()) {
    SCOPED_TRACE(weight_scheme_name(scheme));
    Bed bed;
    Random random(3);
    constexpr int64_t kHidden = 640, kWidth = 328, kRows = 140;
    const LinearCase gate(bed, random, {kWidth, kHidden, scheme}), up(bed, random, {kWidth, kHidden, scheme});
    const TensorView norm = bed.tensor(DType::kBF16, {kHidden}, random.normals(kHidden, 0.2f));
    const TensorView x = bed.tensor(DType::kBF16, {kRows, kHidden}, random.normals(kRows * kHidden));
    const auto kernel = make_kernel<MlpIn>(bed, {kHidden, kWidth, gate.source.shape, up.source.shape, kEps, DType::kBF16});
    ASSERT_EQ(kernel->arithmetic(), arithmetic());
    Buffer& packed = bed.packed(*kernel);
    kernel->pack({norm, gate.source, up.source}, packed, bed.stream());
    const TensorView out = bed.tensor(DType::kBF16, {kRows, kWidth});
    expect_same_bits(out, kRows, RowKind::kPrompt, RowKind::kDecode, kPieces, [&](int64_t first, int64_t count, RowKind kind) {
      Launch launch = bed.launch(*kernel, count);
      kernel->enqueue(KindRows(count, kind).rows, rows_from(x, first, count), packed, {ActivationLayout::kPlain, rows_from(out, first, count), {}}, launch);
    });
    Vector expected;
    std::vector<float> actual;
    for (const int64_t row : {int64_t{0}, int64_t{77}, kRows - 1}) {
      const Vector u = as_met(gate.source.shape, rms_norm(row_of(x, row), Bed::doubles(norm), kEps, 1.0));
      const Vector g = multiply(gate.dense, u), v = multiply(up.dense, u);
      for (size_t i = 0; i < g.size(); ++i) expected.push_back(silu(g[i]) * v[i]);
      for (int64_t i = 0; i < kWidth; ++i) actual.push_back(Bed::get(out, row * kWidth + i));
    }
    EXPECT_LE(relative_rms(actual, expected), kBound);
  }
}

TEST(MmaLinear, GdnInProjectsEachWeightInItsOwnScheme) {
  ONLY_MMA();
  Bed bed;
  Random random(37);
  constexpr int64_t kHidden = 384, kRows = 135;
  const LinearCase qkv(bed, random, {160, kHidden, WeightScheme::kFp8Block}), z(bed, random, {96, kHidden, WeightScheme::kFp8Channel}), b(bed, random, {6, kHidden, WeightScheme::kBF16}),
      a(bed, random, {6, kHidden, WeightScheme::kBF16});
  const TensorView norm = bed.tensor(DType::kF32, {kHidden}, random.normals(kHidden, 0.2f));
  const TensorView x = bed.tensor(DType::kBF16, {kRows, kHidden}, random.normals(kRows * kHidden));
  const auto kernel = make_kernel<GdnIn>(bed, {kHidden, qkv.source.shape, z.source.shape, b.source.shape, a.source.shape, kEps, DType::kBF16});
  ASSERT_EQ(kernel->arithmetic(), arithmetic());
  Buffer& packed = bed.packed(*kernel);
  kernel->pack({norm, qkv.source, z.source, b.source, a.source}, packed, bed.stream());
  const std::pair<const LinearCase*, TensorView> outputs[] = {{&qkv, bed.tensor(DType::kBF16, {kRows, 160})},
                                                              {&z, bed.tensor(DType::kBF16, {kRows, 96})},
                                                              {&b, bed.tensor(DType::kBF16, {kRows, 6})},
                                                              {&a, bed.tensor(DType::kBF16, {kRows, 6})}};
  for (const auto& [linear, out] : outputs) {
    expect_same_bits(out, kRows, RowKind::kPrompt, RowKind::kDecode, kPieces, [&](int64_t first, int64_t count, RowKind kind) {
      Launch launch = bed.launch(*kernel, count);
      kernel->enqueue(KindRows(count, kind).rows, rows_from(x, first, count), packed,
                      {rows_from(outputs[0].second, first, count), rows_from(outputs[1].second, first, count), rows_from(outputs[2].second, first, count),
                       rows_from(outputs[3].second, first, count)},
                      launch);
    });
    Vector expected;
    for (int64_t row = 0; row < kRows; ++row)
      for (const double y : multiply(linear->dense, as_met(linear->source.shape, rms_norm(row_of(x, row), Bed::doubles(norm), kEps, 1.0)))) expected.push_back(y);
    EXPECT_LE(relative_rms(Bed::values(out), expected), kBound);
  }
}

TEST(MmaLinear, MtpInTakesTheEmbeddingFirst) {
  ONLY_MMA();
  Bed bed;
  Random random(6);
  constexpr int64_t kHidden = 384, kRows = 150;
  const LinearCase fc(bed, random, {kHidden, 2 * kHidden, WeightScheme::kFp8Block});
  const TensorView norm_e = bed.tensor(DType::kBF16, {kHidden}, random.normals(kHidden, 0.2f)), norm_h = bed.tensor(DType::kBF16, {kHidden}, random.normals(kHidden, 0.2f));
  const TensorView e = bed.tensor(DType::kBF16, {kRows, kHidden}, random.normals(kRows * kHidden)),
                   h = bed.tensor(DType::kBF16, {kRows, kHidden}, random.normals(kRows * kHidden, 3.0f));
  const TensorView x = bed.tensor(DType::kBF16, {kRows, kHidden});
  const auto kernel = make_kernel<MtpIn>(bed, {kHidden, fc.source.shape, kEps, DType::kBF16});
  ASSERT_EQ(kernel->arithmetic(), arithmetic());
  Buffer& packed = bed.packed(*kernel);
  kernel->pack({norm_e, norm_h, fc.source}, packed, bed.stream());
  expect_same_bits(x, kRows, RowKind::kPrompt, RowKind::kDecode, kPieces, [&](int64_t first, int64_t count, RowKind kind) {
    Launch launch = bed.launch(*kernel, count);
    kernel->enqueue(KindRows(count, kind).rows, rows_from(e, first, count), rows_from(h, first, count), packed, rows_from(x, first, count), launch);
  });
  Vector expected;
  std::vector<float> actual;
  for (const int64_t row : {int64_t{0}, int64_t{5}, kRows - 1}) {
    Vector both = rms_norm(row_of(e, row), Bed::doubles(norm_e), kEps, 1.0);
    for (const double value : rms_norm(row_of(h, row), Bed::doubles(norm_h), kEps, 1.0)) both.push_back(value);
    for (const double y : multiply(fc.dense, as_met(fc.source.shape, both))) expected.push_back(y);
    for (const double y : row_of(x, row)) actual.push_back(static_cast<float>(y));
  }
  EXPECT_LE(relative_rms(actual, expected), kBound);
}

TEST(MmaLinear, HeadGivesLogitsOfTheNamedRows) {
  ONLY_MMA();
  for (const WeightScheme scheme : {WeightScheme::kFp8Channel, WeightScheme::kBF16}) {
    if (quantises() && !is_fp8(scheme)) continue;
    Bed bed;
    Random random(8);
    constexpr int64_t kHidden = 1280, kVocab = 1000, kRows = 300;
    const LinearCase head(bed, random, {kVocab, kHidden, scheme});
    const TensorView norm = bed.tensor(DType::kF32, {kHidden}, random.normals(kHidden, 0.2f));
    const TensorView x = bed.tensor(DType::kBF16, {kRows, kHidden}, random.normals(kRows * kHidden));
    const auto kernel = make_kernel<Head>(bed, {.hidden = kHidden, .vocab_size = kVocab, .lm_head = head.source.shape, .eps = kEps, .activation = DType::kBF16});
    ASSERT_EQ(kernel->arithmetic(), arithmetic());
    Buffer& packed = bed.packed(*kernel);
    kernel->pack(head.source, packed, bed.stream());
    const TensorView hidden = bed.tensor(DType::kBF16, {kRows, kHidden});
    std::string alone;
    for (const int64_t count : {int64_t{1}, int64_t{40}, int64_t{250}}) {
      std::vector<int32_t> named = {44, -1};
      for (int32_t i = 0; std::ssize(named) < count; ++i) named.push_back(i * 7 % kRows);
      named.resize(static_cast<size_t>(count));
      const TensorView logits = bed.tensor(DType::kF32, {count, kVocab});
      Launch launch = bed.launch(*kernel, kRows);
      kernel->enqueue(KindRows(kRows, RowKind::kDecode).rows, x, norm, bed.ints({count}, named), packed, hidden, logits, launch);
      const std::vector<float> seen = Bed::values(logits);
      Vector expected;
      std::vector<float> actual;
      for (size_t i = 0; i < named.size(); i += i < 4 ? 1 : 37) {
        if (named[i] < 0) continue;
        for (const double y : multiply(head.dense, as_met(head.source.shape, row_of(hidden, named[i])))) expected.push_back(y);
        actual.insert(actual.end(), seen.begin() + static_cast<std::ptrdiff_t>(i * kVocab), seen.begin() + static_cast<std::ptrdiff_t>((i + 1) * kVocab));
      }
      EXPECT_LE(relative_rms(actual, expected), logit_bound());
      const std::string first = Bed::bytes(logits).substr(0, kVocab * sizeof(float));
      if (alone.empty()) alone = first;
      EXPECT_TRUE(first == alone) << "row 44 alone and among " << count;
    }
  }
}

TEST(MmaLinear, SaysWhatItDoesNotTake) {
  DeviceTraits traits = backends::traits_by_name("a100").value();
  traits.device_code = true;  // also in builds without nvcc
  const auto refusal = [&](const OutResidual::Problem& problem) -> std::string {
    for (const auto& candidate : backends::kernel_table(Platform::kCuda).out_residual.candidates())
      if (candidate.name == "cuda.mma") return candidate.accepts(problem, traits).reason;
    return "there is no such candidate";
  };
  EXPECT_EQ(refusal({{5120, 6144, WeightScheme::kFp8Block}, ActivationLayout::kPlain, DType::kBF16}), "");
  EXPECT_EQ(refusal({{5120, 6144, WeightScheme::kFp8Tensor, true}, ActivationLayout::kPlain, DType::kBF16}), "");
  EXPECT_THAT(refusal({{5120, 6144, WeightScheme::kFp8Block}, ActivationLayout::kPlain, DType::kF32}), ::testing::HasSubstr("f32"));
  EXPECT_THAT(refusal({{5120, 6144, WeightScheme::kF16}, ActivationLayout::kPlain, DType::kBF16}), ::testing::HasSubstr("f16"));
  EXPECT_THAT(refusal({{5120, 6100, WeightScheme::kBF16}, ActivationLayout::kPlain, DType::kBF16}), ::testing::HasSubstr("6100"));
  EXPECT_THAT(refusal({{5119, 6144, WeightScheme::kBF16}, ActivationLayout::kPlain, DType::kBF16}), ::testing::HasSubstr("odd"));
  EXPECT_THAT(refusal({{0, 6144, WeightScheme::kBF16}, ActivationLayout::kPlain, DType::kBF16}), ::testing::HasSubstr("empty"));
}

}  // namespace
}  // namespace quern::ops::testing
