#include "ops/linear_case.h"

// The linear layers of "cuda.mma.e4m3", which test on Hopper as "cuda.mma.e4m3.emulated": FP8 weights meet activations quantised per row and group of 128, so the reference quantises as well; other
// weights meet bf16. A row has the same bits in any launch, as a prompt row and as a decode row.

namespace quern::ops::testing {
namespace {

constexpr float kEps = 1e-6f;
constexpr double kBound = 6e-3;  // three or four roundings to bf16
constexpr double kLogitBound = 4e-4;  // f32; matrix units that multiply e4m3 keep about 14 bits of a sum over 128 of K
constexpr std::string_view kArithmetic = "cuda.mma.e4m3.k128";
#define ONLY_E4M3() \
  if (!candidate_under_test().starts_with("cuda.mma.e4m3")) GTEST_SKIP() << "this test is about cuda.mma.e4m3"

constexpr WeightScheme kFp8[] = {WeightScheme::kFp8Block, WeightScheme::kFp8Channel, WeightScheme::kFp8Tensor};
/// Around the row counts at which launches change their shape.
constexpr int64_t kPieces[] = {1, 7, 8, 9, 16, 17, 32, 33, 64, 65, 128, 129, 130};

TEST(E4M3Linear, AddsTheProductOfEverySchemeExtentAndOffset) {
  ONLY_E4M3();
  struct Extent {
    int64_t out, in, row_offset = 0;
  };
  // One scale block, fewer than slices, more; tiles and blocks of features that are not whole; slices that begin inside a scale block; the K of the 27B model's down_proj on four ranks.
  for (const Extent e : {Extent{2, 128}, {48, 640, 96}, {130, 1152}, {328, 2560, 32}, {300, 4352, 64}})
    for (const WeightScheme scheme : kFp8)
      for (const bool adds : {true, false}) {
        if ((!adds && e.in != 640) || (e.row_offset != 0 && scheme == WeightScheme::kFp8Tensor)) continue;
        SCOPED_TRACE(::testing::Message() << weight_scheme_name(scheme) << " " << e.out << " x " << e.in << " at row " << e.row_offset << (adds ? ", added" : ""));
        Bed bed;
        Random random(5);
        constexpr int64_t rows = 195;
        const LinearCase linear(bed, random, {e.out, e.in, scheme}, e.row_offset);
        const TensorView in = bed.tensor(DType::kBF16, {rows, e.in}, random.normals(rows * e.in));
        const TensorView before = bed.tensor(DType::kBF16, {rows, e.out}, random.normals(rows * e.out));
        const auto kernel = make_kernel<OutResidual>(bed, {linear.source.shape, ActivationLayout::kPlain, DType::kBF16, adds});
        ASSERT_EQ(kernel->arithmetic(), kArithmetic);
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
          const Vector y = multiply(linear.dense, seen_by(linear.source.shape, row_of(in, row)));
          for (int64_t i = 0; i < e.out; ++i) {
            expected.push_back(y[static_cast<size_t>(i)] + (adds ? double{Bed::get(before, row * e.out + i)} : 0.0));
            actual.push_back(Bed::get(x, row * e.out + i));
          }
        }
        EXPECT_LE(relative_rms(actual, expected), kBound);
      }
}

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

TEST(E4M3Linear, MlpInIsSiluOfGateTimesUpOfTheQuantisedNormedInput) {
  ONLY_E4M3();
  for (const WeightScheme scheme : kFp8) {
    SCOPED_TRACE(weight_scheme_name(scheme));
    Bed bed;
    Random random(3);
    constexpr int64_t kHidden = 640, kWidth = 328, kRows = 140;
    const LinearCase gate(bed, random, {kWidth, kHidden, scheme}), up(bed, random, {kWidth, kHidden, scheme});
    const TensorView norm = bed.tensor(DType::kBF16, {kHidden}, random.normals(kHidden, 0.2f));
    const TensorView x = bed.tensor(DType::kBF16, {kRows, kHidden}, random.normals(kRows * kHidden));
    const auto kernel = make_kernel<MlpIn>(bed, {kHidden, kWidth, gate.source.shape, up.source.shape, kEps, DType::kBF16});
    ASSERT_EQ(kernel->arithmetic(), kArithmetic);
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
      const Vector u = seen_by(gate.source.shape, rms_norm(row_of(x, row), Bed::doubles(norm), kEps, 1.0));
      const Vector g = multiply(gate.dense, u), v = multiply(up.dense, u);
      for (size_t i = 0; i < g.size(); ++i) expected.push_back(silu(g[i]) * v[i]);
      for (int64_t i = 0; i < kWidth; ++i) actual.push_back(Bed::get(out, row * kWidth + i));
    }
    EXPECT_LE(relative_rms(actual, expected), kBound);
  }
}

TEST(E4M3Linear, GdnInProjectsEachWeightInItsOwnScheme) {
  ONLY_E4M3();
  Bed bed;
  Random random(37);
  constexpr int64_t kHidden = 384, kRows = 135;
  const LinearCase qkv(bed, random, {160, kHidden, WeightScheme::kFp8Block}), z(bed, random, {96, kHidden, WeightScheme::kFp8Channel}), b(bed, random, {6, kHidden, WeightScheme::kBF16}),
      a(bed, random, {6, kHidden, WeightScheme::kBF16});
  const TensorView norm = bed.tensor(DType::kF32, {kHidden}, random.normals(kHidden, 0.2f));
  const TensorView x = bed.tensor(DType::kBF16, {kRows, kHidden}, random.normals(kRows * kHidden));
  const auto kernel = make_kernel<GdnIn>(bed, {kHidden, qkv.source.shape, z.source.shape, b.source.shape, a.source.shape, kEps, DType::kBF16});
  ASSERT_EQ(kernel->arithmetic(), kArithmetic);
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
      for (const double y : multiply(linear->dense, seen_by(linear->source.shape, rms_norm(row_of(x, row), Bed::doubles(norm), kEps, 1.0)))) expected.push_back(y);
    EXPECT_LE(relative_rms(Bed::values(out), expected), kBound);
  }
}

TEST(E4M3Linear, MtpInTakesTheEmbeddingFirst) {
  ONLY_E4M3();
  Bed bed;
  Random random(6);
  constexpr int64_t kHidden = 384, kRows = 150;
  const LinearCase fc(bed, random, {kHidden, 2 * kHidden, WeightScheme::kFp8Block});
  const TensorView norm_e = bed.tensor(DType::kBF16, {kHidden}, random.normals(kHidden, 0.2f)), norm_h = bed.tensor(DType::kBF16, {kHidden}, random.normals(kHidden, 0.2f));
  const TensorView e = bed.tensor(DType::kBF16, {kRows, kHidden}, random.normals(kRows * kHidden)),
                   h = bed.tensor(DType::kBF16, {kRows, kHidden}, random.normals(kRows * kHidden, 3.0f));
  const TensorView x = bed.tensor(DType::kBF16, {kRows, kHidden});
  const auto kernel = make_kernel<MtpIn>(bed, {kHidden, fc.source.shape, kEps, DType::kBF16});
  ASSERT_EQ(kernel->arithmetic(), kArithmetic);
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
    for (const double y : multiply(fc.dense, seen_by(fc.source.shape, both))) expected.push_back(y);
    for (const double y : row_of(x, row)) actual.push_back(static_cast<float>(y));
  }
  EXPECT_LE(relative_rms(actual, expected), kBound);
}

TEST(E4M3Linear, HeadGivesLogitsOfTheNamedRows) {
  ONLY_E4M3();
  Bed bed;
  Random random(8);
  constexpr int64_t kHidden = 1280, kVocab = 1000, kRows = 300;
  const LinearCase head(bed, random, {kVocab, kHidden, WeightScheme::kFp8Channel});
  const TensorView norm = bed.tensor(DType::kF32, {kHidden}, random.normals(kHidden, 0.2f));
  const TensorView x = bed.tensor(DType::kBF16, {kRows, kHidden}, random.normals(kRows * kHidden));
  const auto kernel = make_kernel<Head>(bed, {.hidden = kHidden, .vocab_size = kVocab, .lm_head = head.source.shape, .eps = kEps, .activation = DType::kBF16});
  ASSERT_EQ(kernel->arithmetic(), kArithmetic);
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
      for (const double y : multiply(head.dense, seen_by(head.source.shape, row_of(hidden, named[i])))) expected.push_back(y);
      actual.insert(actual.end(), seen.begin() + static_cast<std::ptrdiff_t>(i * kVocab), seen.begin() + static_cast<std::ptrdiff_t>((i + 1) * kVocab));
    }
    EXPECT_LE(relative_rms(actual, expected), kLogitBound);
    const std::string first = Bed::bytes(logits).substr(0, kVocab * sizeof(float));
    if (alone.empty()) alone = first;
    EXPECT_TRUE(first == alone) << "row 44 alone and among " << count;
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
