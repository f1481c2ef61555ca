#include "ops/cases.h"
#include "ops/linear_case.h"

// mlp_in, gdn_in and mtp_in: norms and projections. What a linear layer does with each scheme is checked in linear_residual_test.

namespace quern::ops::testing {
namespace {

constexpr float kEps = 1e-6f;

// Worst of the pointwise chain norm, product, silu, product in f32: a few units of 2^-24 each.
constexpr double kF32Bound = 2e-6;
// In bf16 three or four roundings of at most 2^-9 relative, 2^-9 / sqrt(3) in the mean.
constexpr double kBf16Bound = 6e-3;

double bound(DType dtype) { return dtype == DType::kF32 ? kF32Bound : kBf16Bound; }

struct AllRows {
  RowRun run;
  Rows rows;
  explicit AllRows(int64_t n, int32_t first = 0) : run{0, first, static_cast<int32_t>(n), RowKind::kPrompt, true} {
    rows.num_rows = static_cast<int32_t>(n);
    rows.runs = {&run, 1};
  }
};

struct MlpCase {
  int64_t hidden = 160, intermediate = 200;
  Bed bed;
  Random random{31};
  LinearCase gate{bed, random, {200, 160, WeightScheme::kFp8Block}}, up{bed, random, {200, 160, WeightScheme::kBF16}};
  TensorView norm = bed.tensor(DType::kBF16, {160}, random.normals(160, 0.2f));
  std::vector<float> x = random.normals(70 * 160);
  explicit MlpCase(int threads) : bed(threads) {}

  TensorView run(DType dtype, int64_t first, int64_t rows) {
    const auto kernel = make_kernel<MlpIn>(bed, {hidden, intermediate, gate.source.shape, up.source.shape, kEps, dtype});
    Buffer& packed = bed.packed(*kernel);
    kernel->pack({norm, gate.source, up.source}, packed, bed.stream());
    const TensorView in =
        bed.tensor(dtype, {rows, hidden}, std::span(x).subspan(static_cast<size_t>(first * hidden), static_cast<size_t>(rows * hidden)));
    const TensorView out = bed.tensor(dtype, {rows, intermediate});
    Launch launch = bed.launch(*kernel, rows);
    kernel->enqueue(AllRows(rows).rows, in, packed, {ActivationLayout::kPlain, out, {}}, launch);
    return out;
  }
};

TEST(MlpIn, IsSiluOfGateTimesUpOfTheNormedInput) {
  for (const DType dtype : {DType::kF32, DType::kBF16})
    for (const int64_t rows : kRowCounts) {
      if (rows > 70) continue;
      MlpCase c(2);
      Vector expected;
      for (int64_t row = 0; row < rows; ++row) {
        Vector x;
        for (int64_t i = 0; i < c.hidden; ++i) {
          const float value = c.x[static_cast<size_t>(row * c.hidden + i)];
          x.push_back(dtype == DType::kBF16 ? round_bf16(value) : value);
        }
        const Vector u = rms_norm(x, Bed::doubles(c.norm), kEps, 1.0), gate = multiply(c.gate.dense, u), up = multiply(c.up.dense, u);
        for (size_t i = 0; i < gate.size(); ++i) expected.push_back(silu(gate[i]) * up[i]);
      }
      EXPECT_LE(relative_rms(Bed::values(c.run(dtype, 0, rows)), expected), bound(dtype)) << dtype_name(dtype) << " " << rows;
    }
}

TEST(MlpIn, GivesARowTheSameBitsAloneInABatchAndOnAnyThreads) {
  MlpCase one(1);
  const std::string expected = Bed::bytes(one.run(DType::kBF16, 0, 70));
  for (const int threads : {1, 2, 3}) {
    MlpCase c(threads);
    EXPECT_EQ(Bed::bytes(c.run(DType::kBF16, 0, 70)), expected) << threads;
    std::string pieces;
    for (const auto& [first, rows] : {std::pair{0, 1}, {1, 2}, {3, 64}, {67, 3}}) pieces += Bed::bytes(c.run(DType::kBF16, first, rows));
    EXPECT_EQ(pieces, expected) << threads;
  }
}

TEST(GdnIn, ProjectsTheNormedInputFourTimesEachInItsOwnScheme) {
  for (const DType dtype : {DType::kF32, DType::kBF16})
    for (const int64_t rows : kRowCounts) {
      Bed bed;
      Random random(37);
      const int64_t hidden = 160;
      const LinearCase qkv(bed, random, {160, hidden, WeightScheme::kFp8Block}), z(bed, random, {96, hidden, WeightScheme::kFp8Channel}),
          b(bed, random, {6, hidden, WeightScheme::kBF16}), a(bed, random, {6, hidden, WeightScheme::kF32});
      const TensorView norm = bed.tensor(DType::kF32, {hidden}, random.normals(hidden, 0.2f));
      const TensorView x = bed.tensor(dtype, {rows, hidden}, random.normals(rows * hidden));
      const auto kernel = make_kernel<GdnIn>(bed, {hidden, qkv.source.shape, z.source.shape, b.source.shape, a.source.shape, kEps, dtype});
      Buffer& packed = bed.packed(*kernel);
      kernel->pack({norm, qkv.source, z.source, b.source, a.source}, packed, bed.stream());
      const GdnInputs out{bed.tensor(dtype, {rows, 160}), bed.tensor(dtype, {rows, 96}), bed.tensor(dtype, {rows, 6}),
                          bed.tensor(dtype, {rows, 6})};
      Launch launch = bed.launch(*kernel, rows);
      kernel->enqueue(AllRows(rows).rows, x, packed, out, launch);
      const std::pair<const LinearCase*, TensorView> outputs[] = {{&qkv, out.qkv}, {&z, out.z}, {&b, out.b}, {&a, out.a}};
      for (const auto& [linear, view] : outputs) {
        Vector expected;
        for (int64_t row = 0; row < rows; ++row) {
          const Vector u = rms_norm(testing::row(Bed::doubles(x), static_cast<size_t>(row), hidden), Bed::doubles(norm), kEps, 1.0);
          for (const double y : multiply(linear->dense, u)) expected.push_back(y);
        }
        EXPECT_LE(relative_rms(Bed::values(view), expected), bound(dtype)) << dtype_name(dtype) << " " << rows;
      }
    }
}

/// mtp_in of rows of a kind against its definition.
void expect_mtp_in(int64_t hidden, DType dtype, int64_t rows, RowKind kind) {
  SCOPED_TRACE(fmt::format("{} {} {} rows", rows, dtype_name(dtype), kind == RowKind::kPrompt ? "prompt" : "decode"));
  Bed bed;
  Random random(41);
  const LinearCase fc(bed, random, {hidden, 2 * hidden, WeightScheme::kBF16});
  const TensorView norm_e = bed.tensor(DType::kBF16, {hidden}, random.normals(hidden, 0.2f));
  const TensorView norm_h = bed.tensor(DType::kBF16, {hidden}, random.normals(hidden, 0.2f));
  const TensorView embedding = bed.tensor(dtype, {rows, hidden}, random.normals(rows * hidden));
  const TensorView h = bed.tensor(dtype, {rows, hidden}, random.normals(rows * hidden, 3.0f));
  const auto kernel = make_kernel<MtpIn>(bed, {hidden, fc.source.shape, kEps, dtype});
  Buffer& packed = bed.packed(*kernel);
  kernel->pack({norm_e, norm_h, fc.source}, packed, bed.stream());
  const TensorView x = bed.tensor(dtype, {rows, hidden});
  Launch launch = bed.launch(*kernel, rows);
  kernel->enqueue(KindRows(rows, kind).rows, embedding, h, packed, x, launch);
  Vector expected;
  for (size_t row = 0; row < static_cast<size_t>(rows); ++row) {
    Vector both = rms_norm(testing::row(Bed::doubles(embedding), row, hidden), Bed::doubles(norm_e), kEps, 1.0);
    for (const double value : rms_norm(testing::row(Bed::doubles(h), row, hidden), Bed::doubles(norm_h), kEps, 1.0)) both.push_back(value);
    for (const double y : multiply(fc.dense, both)) expected.push_back(y);
  }
  EXPECT_LE(relative_rms(Bed::values(x), expected), bound(dtype));
}

TEST(MtpIn, TakesTheEmbeddingFirstAndTheHiddenSecondEachWithItsNorm) {
  for (const DType dtype : {DType::kF32, DType::kBF16})
    for (const int64_t rows : kRowCounts) expect_mtp_in(96, dtype, rows, RowKind::kPrompt);
}

/// What kernels take that know no other widths: of rows of either kind, in every size of their work-groups.
TEST(MtpIn, OfWholeBlocksTakesRowsOfBothKinds) {
  if (candidate_under_test().starts_with("cuda.sm90")) GTEST_SKIP() << "activations become FP8 there";
  for (const auto& [kind, rows] : {std::pair{RowKind::kPrompt, int64_t{35}}, {RowKind::kPrompt, 140}, {RowKind::kDecode, 1}, {RowKind::kDecode, 7}, {RowKind::kDecode, 35}})
    expect_mtp_in(128, DType::kBF16, rows, kind);
}

}  // namespace
}  // namespace quern::ops::testing
