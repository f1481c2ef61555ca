#include "backends/cuda/linears_sm90.h"
#include "ops/linear_case.h"

// The linear layers of "cuda.sm90": fp8 weights meet activations quantised per row and group of 128, so the reference quantises as well; bf16 weights meet bf16.
// Errors are then those of bf16 outputs and of sums in another order.

namespace quern::ops::testing {
namespace {

constexpr float kEps = 1e-6f;
constexpr double kBound = 6e-3;  // three or four roundings to bf16

bool is_under_test() { return candidate_under_test().starts_with("cuda.sm90"); }
#define ONLY_SM90()                                                             \
  if (!is_under_test()) GTEST_SKIP() << "this test is about cuda.sm90"

const std::vector<int64_t> kDecodePieces = {1, 2, 3, 4, 8, 11, 31, 64, 100, 130, 250}, kPromptPieces = {64, 128, 192};

TEST(Sm90Linear, MlpInIsSiluOfGateTimesUpOfTheQuantisedNormedInput) {
  ONLY_SM90();
  for (const WeightScheme scheme : {WeightScheme::kFp8Block, WeightScheme::kFp8Channel, WeightScheme::kFp8Tensor, WeightScheme::kBF16}) {
    SCOPED_TRACE(weight_scheme_name(scheme));
    Bed bed;
    Random random(3);
    constexpr int64_t kHidden = 640, kWidth = 328, kRows = 270;
    const LinearCase gate(bed, random, {kWidth, kHidden, scheme}), up(bed, random, {kWidth, kHidden, scheme});
    const TensorView norm = bed.tensor(DType::kBF16, {kHidden}, random.normals(kHidden, 0.2f));
    const TensorView x = bed.tensor(DType::kBF16, {kRows, kHidden}, random.normals(kRows * kHidden));
    const auto kernel = make_kernel<MlpIn>(bed, {kHidden, kWidth, gate.source.shape, up.source.shape, kEps, DType::kBF16});
    Buffer& packed = bed.packed(*kernel);
    kernel->pack({norm, gate.source, up.source}, packed, bed.stream());
    const TensorView out = bed.tensor(DType::kBF16, {kRows, kWidth});
    const auto enqueue = [&](int64_t first, int64_t count, RowKind kind) {
      Launch launch = bed.launch(*kernel, count);
      kernel->enqueue(KindRows(count, kind).rows, rows_from(x, first, count), packed, {ActivationLayout::kPlain, rows_from(out, first, count), {}}, launch);
    };
    for (const RowKind kind : {RowKind::kDecode, RowKind::kPrompt}) {
      expect_same_bits(out, kRows, kind, kind, kind == RowKind::kDecode ? kDecodePieces : kPromptPieces, enqueue);
      Vector expected;
      std::vector<float> actual;
      for (const int64_t row : {int64_t{0}, int64_t{1}, int64_t{77}, kRows - 1}) {
        const Vector u = seen_by(gate.source.shape, rms_norm(row_of(x, row), Bed::doubles(norm), kEps, 1.0));
        const Vector g = multiply(gate.dense, u), v = multiply(up.dense, u);
        for (size_t i = 0; i < g.size(); ++i) expected.push_back(silu(g[i]) * v[i]);
        for (int64_t i = 0; i < kWidth; ++i) actual.push_back(Bed::get(out, row * kWidth + i));
      }
      EXPECT_LE(relative_rms(actual, expected), kBound);
    }
  }
}

TEST(Sm90Linear, OutResidualAddsTheProduct) {
  ONLY_SM90();
  for (const WeightScheme scheme : {WeightScheme::kFp8Block, WeightScheme::kBF16})
    for (const bool adds : {true, false}) {
      if (few_launches() && !adds) continue;
      Bed bed;
      Random random(4);
      constexpr int64_t kIn = 1152, kOut = 518, kRows = 270;
      const LinearCase linear(bed, random, {kOut, kIn, scheme});
      const TensorView in = bed.tensor(DType::kBF16, {kRows, kIn}, random.normals(kRows * kIn));
      const TensorView before = bed.tensor(DType::kBF16, {kRows, kOut}, random.normals(kRows * kOut));
      const TensorView x = bed.tensor(DType::kBF16, {kRows, kOut});
      const auto kernel = make_kernel<OutResidual>(bed, {linear.source.shape, ActivationLayout::kPlain, DType::kBF16, adds});
      Buffer& packed = bed.packed(*kernel);
      kernel->pack(linear.source, packed, bed.stream());
      const auto enqueue = [&](int64_t first, int64_t count, RowKind kind) {
        bed.stream().copy(rows_from(before, first, count), rows_from(x, first, count));
        Launch launch = bed.launch(*kernel, count);
        kernel->enqueue(KindRows(count, kind).rows, {ActivationLayout::kPlain, rows_from(in, first, count), {}}, packed, rows_from(x, first, count), launch);
      };
      for (const RowKind kind : {RowKind::kDecode, RowKind::kPrompt}) {
        expect_same_bits(x, kRows, kind, kind, kind == RowKind::kDecode ? kDecodePieces : kPromptPieces, enqueue);
        Vector expected;
        std::vector<float> actual;
        for (const int64_t row : {int64_t{0}, int64_t{99}, kRows - 1}) {
          const Vector y = multiply(linear.dense, seen_by(linear.source.shape, row_of(in, row)));
          for (int64_t i = 0; i < kOut; ++i) {
            expected.push_back(y[static_cast<size_t>(i)] + (adds ? Bed::get(before, row * kOut + i) : 0.0f));
            actual.push_back(Bed::get(x, row * kOut + i));
          }
        }
        EXPECT_LE(relative_rms(actual, expected), kBound);
      }
    }
}

TEST(Sm90Linear, GdnInProjectsQkvZBAndA) {
  ONLY_SM90();
  for (const WeightScheme scheme : {WeightScheme::kFp8Block, WeightScheme::kBF16}) {
    Bed bed;
    Random random(5);
    constexpr int64_t kHidden = 768, kQkv = 640, kZ = 256, kHeads = 6, kRows = 270;
    const LinearCase qkv(bed, random, {kQkv, kHidden, scheme}), z(bed, random, {kZ, kHidden, scheme});
    const LinearCase b(bed, random, {kHeads, kHidden, WeightScheme::kBF16}), a(bed, random, {kHeads, kHidden, WeightScheme::kBF16});
    const TensorView norm = bed.tensor(DType::kF32, {kHidden}, random.normals(kHidden, 0.2f));
    const TensorView x = bed.tensor(DType::kBF16, {kRows, kHidden}, random.normals(kRows * kHidden));
    const auto kernel = make_kernel<GdnIn>(bed, {kHidden, qkv.source.shape, z.source.shape, b.source.shape, a.source.shape, kEps, DType::kBF16});
    Buffer& packed = bed.packed(*kernel);
    kernel->pack({norm, qkv.source, z.source, b.source, a.source}, packed, bed.stream());
    const std::pair<const LinearCase*, TensorView> outputs[] = {{&qkv, bed.tensor(DType::kBF16, {kRows, kQkv})},
                                                                {&z, bed.tensor(DType::kBF16, {kRows, kZ})},
                                                                {&b, bed.tensor(DType::kBF16, {kRows, kHeads})},
                                                                {&a, bed.tensor(DType::kBF16, {kRows, kHeads})}};
    const auto enqueue = [&](int64_t first, int64_t count, RowKind kind) {
      Launch launch = bed.launch(*kernel, count);
      kernel->enqueue(KindRows(count, kind).rows, rows_from(x, first, count), packed,
                      {rows_from(outputs[0].second, first, count), rows_from(outputs[1].second, first, count), rows_from(outputs[2].second, first, count),
                       rows_from(outputs[3].second, first, count)},
                      launch);
    };
    for (const RowKind kind : {RowKind::kDecode, RowKind::kPrompt})
      for (const auto& [linear, out] : outputs) {
        if (few_launches() && linear != &a) continue;
        expect_same_bits(out, kRows, kind, kind, kind == RowKind::kDecode ? kDecodePieces : kPromptPieces, enqueue);
        Vector expected;
        std::vector<float> actual;
        for (const int64_t row : {int64_t{0}, int64_t{5}, kRows - 1}) {
          for (const double y : multiply(linear->dense, seen_by(linear->source.shape, rms_norm(row_of(x, row), Bed::doubles(norm), kEps, 1.0)))) expected.push_back(y);
          for (const double y : row_of(out, row)) actual.push_back(static_cast<float>(y));
        }
        EXPECT_LE(relative_rms(actual, expected), kBound) << weight_scheme_name(scheme) << " " << linear->source.shape.out_features;
      }
  }
}

/// As many tile rows as leave a few of an H200's multiprocessors without tiles, and enough of K that those multiply in_proj_b and in_proj_a of many rows alone; of few rows others do, with the same bits.
TEST(Sm90Linear, GdnInProjectsBAndAInBlocksWithoutTiles) {
  ONLY_SM90();
  Bed bed;
  Random random(14);
  constexpr int64_t kHidden = 4480, kQkv = 10240, kZ = 5632, kHeads = 48, kRows = 256;
  const LinearCase qkv(bed, random, {kQkv, kHidden, WeightScheme::kFp8Block}), z(bed, random, {kZ, kHidden, WeightScheme::kFp8Block});
  const LinearCase b(bed, random, {kHeads, kHidden, WeightScheme::kBF16}), a(bed, random, {kHeads, kHidden, WeightScheme::kBF16});
  const TensorView norm = bed.tensor(DType::kF32, {kHidden}, random.normals(kHidden, 0.2f));
  const TensorView x = bed.tensor(DType::kBF16, {kRows, kHidden}, random.normals(kRows * kHidden));
  const auto kernel = make_kernel<GdnIn>(bed, {kHidden, qkv.source.shape, z.source.shape, b.source.shape, a.source.shape, kEps, DType::kBF16});
  Buffer& packed = bed.packed(*kernel);
  kernel->pack({norm, qkv.source, z.source, b.source, a.source}, packed, bed.stream());
  const TensorView qkv_out = bed.tensor(DType::kBF16, {kRows, kQkv}), z_out = bed.tensor(DType::kBF16, {kRows, kZ});
  const std::pair<const LinearCase*, TensorView> outputs[] = {{&b, bed.tensor(DType::kBF16, {kRows, kHeads})}, {&a, bed.tensor(DType::kBF16, {kRows, kHeads})}};
  const auto enqueue = [&](int64_t first, int64_t count, RowKind kind) {
    Launch launch = bed.launch(*kernel, count);
    kernel->enqueue(KindRows(count, kind).rows, rows_from(x, first, count), packed,
                    {rows_from(qkv_out, first, count), rows_from(z_out, first, count), rows_from(outputs[0].second, first, count), rows_from(outputs[1].second, first, count)}, launch);
  };
  for (const auto& [linear, out] : outputs) {
    if (few_launches() && linear != &a) continue;
    expect_same_bits(out, kRows, RowKind::kDecode, RowKind::kDecode, std::vector<int64_t>{3, 16, 64, 77, 128, 200}, enqueue);
    Vector expected;
    std::vector<float> actual;
    for (int64_t row = 0; row < kRows; row += 51) {
      for (const double y : multiply(linear->dense, seen_by(linear->source.shape, rms_norm(row_of(x, row), Bed::doubles(norm), kEps, 1.0)))) expected.push_back(y);
      for (const double y : row_of(out, row)) actual.push_back(static_cast<float>(y));
    }
    EXPECT_LE(relative_rms(actual, expected), kBound);
  }
}

TEST(Sm90Linear, MtpInTakesTheEmbeddingFirst) {
  ONLY_SM90();
  Bed bed;
  Random random(6);
  constexpr int64_t kHidden = 384, kRows = 270;
  const LinearCase fc(bed, random, {kHidden, 2 * kHidden, WeightScheme::kBF16});
  const TensorView norm_e = bed.tensor(DType::kBF16, {kHidden}, random.normals(kHidden, 0.2f)), norm_h = bed.tensor(DType::kBF16, {kHidden}, random.normals(kHidden, 0.2f));
  const TensorView e = bed.tensor(DType::kBF16, {kRows, kHidden}, random.normals(kRows * kHidden)),
                   h = bed.tensor(DType::kBF16, {kRows, kHidden}, random.normals(kRows * kHidden, 3.0f));
  const TensorView x = bed.tensor(DType::kBF16, {kRows, kHidden});
  const auto kernel = make_kernel<MtpIn>(bed, {kHidden, fc.source.shape, kEps, DType::kBF16});
  Buffer& packed = bed.packed(*kernel);
  kernel->pack({norm_e, norm_h, fc.source}, packed, bed.stream());
  const auto enqueue = [&](int64_t first, int64_t count, RowKind kind) {
    Launch launch = bed.launch(*kernel, count);
    kernel->enqueue(KindRows(count, kind).rows, rows_from(e, first, count), rows_from(h, first, count), packed, rows_from(x, first, count), launch);
  };
  for (const RowKind kind : {RowKind::kDecode, RowKind::kPrompt}) {
    expect_same_bits(x, kRows, kind, kind, kind == RowKind::kDecode ? kDecodePieces : kPromptPieces, enqueue);
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
}

TEST(Sm90Linear, HeadGivesLogitsOfTheNamedRows) {
  ONLY_SM90();
  for (const WeightScheme scheme : {WeightScheme::kBF16, WeightScheme::kFp8Block}) {
    Bed bed;
    Random random(7);
    constexpr int64_t kHidden = 512, kVocab = 262, kRows = 270;
    const LinearCase lm_head(bed, random, {kVocab, kHidden, scheme});
    const auto kernel = make_kernel<Head>(bed, {kHidden, kVocab, lm_head.source.shape, false, kEps, DType::kBF16});
    Buffer& packed = bed.packed(*kernel);
    kernel->pack(lm_head.source, packed, bed.stream());
    const TensorView norm = bed.tensor(DType::kF32, {kHidden}, random.normals(kHidden, 0.2f));
    const TensorView x = bed.tensor(DType::kBF16, {kRows, kHidden}, random.normals(kRows * kHidden));
    const TensorView hidden = bed.tensor(DType::kBF16, {kRows, kHidden}), logits = bed.tensor(DType::kF32, {kRows, kVocab});
    std::vector<int32_t> wanted;
    for (int32_t row = 0; row < kRows; ++row) wanted.push_back(row * 7 % kRows);
    const TensorView named = bed.ints({kRows}, wanted);
    const KindRows rows(kRows, RowKind::kPrompt);
    const auto enqueue = [&](int64_t first, int64_t count, RowKind) {
      TensorView some = named;
      some.offset_bytes += static_cast<size_t>(first) * 4;
      some.shape = {count};
      Launch launch = bed.launch(*kernel, kRows);
      kernel->enqueue(rows.rows, x, norm, some, packed, hidden, rows_from(logits, first, count), launch);
    };
    expect_same_bits(logits, kRows, RowKind::kDecode, RowKind::kDecode, kDecodePieces, enqueue);
    Vector expected_hidden, expected;
    std::vector<float> actual;
    for (int64_t row = 0; row < kRows; ++row)
      for (const double y : rms_norm(row_of(x, row), Bed::doubles(norm), kEps, 1.0)) expected_hidden.push_back(y);
    EXPECT_LE(relative_rms(Bed::values(hidden), expected_hidden), 3e-3);
    for (const int64_t i : {int64_t{0}, int64_t{9}, kRows - 1}) {
      for (const double y : multiply(lm_head.dense, seen_by(lm_head.source.shape, row_of(hidden, wanted[static_cast<size_t>(i)])))) expected.push_back(y);
      for (const double y : row_of(logits, i)) actual.push_back(static_cast<float>(y));
    }
    // Logits are f32. Within 128 of K the fp8 matrix units keep about 14 bits.
    EXPECT_LE(relative_rms(actual, expected), is_fp8(scheme) ? 4e-4 : 1e-6);
  }
}

/// Of more tile rows than a GPU has multiprocessors, some of them cut between two.
TEST(Sm90Linear, HeadOfManyTileRowsGivesTheSameBitsForManyRows) {
  ONLY_SM90();
  Bed bed;
  Random random(17);
  constexpr int64_t kHidden = 256, kVocab = 30'002, kRows = 300;
  const LinearCase lm_head(bed, random, {kVocab, kHidden, WeightScheme::kBF16});
  const auto kernel = make_kernel<Head>(bed, {kHidden, kVocab, lm_head.source.shape, false, kEps, DType::kBF16});
  Buffer& packed = bed.packed(*kernel);
  kernel->pack(lm_head.source, packed, bed.stream());
  const TensorView norm = bed.tensor(DType::kF32, {kHidden}, random.normals(kHidden, 0.2f)), x = bed.tensor(DType::kBF16, {kRows, kHidden}, random.normals(kRows * kHidden));
  const TensorView hidden = bed.tensor(DType::kBF16, {kRows, kHidden});
  std::vector<int32_t> wanted;
  for (int32_t row = 0; row < kRows; ++row) wanted.push_back(row);
  const TensorView named = bed.ints({kRows}, wanted);
  const KindRows rows(kRows, RowKind::kPrompt);
  std::vector<std::string> first(9);
  for (const int64_t count : {9, 40, 64, 65, 128, 129, 256, 300}) {
    const TensorView logits = bed.tensor(DType::kF32, {count, kVocab});
    TensorView some = named;
    some.shape = {count};
    for (int turn = 0; turn < 2; ++turn) {
      Launch launch = bed.launch(*kernel, kRows);
      kernel->enqueue(rows.rows, x, norm, some, packed, hidden, logits, launch);
    }
    ASSERT_OK(bed.stream().finish());
    for (int64_t row = 0; row < 9; ++row) {
      std::string& bits = first[static_cast<size_t>(row)];
      if (count == 9) bits = Bed::bytes(logits.at(row));
      else EXPECT_TRUE(bits == Bed::bytes(logits.at(row))) << row << " of " << count;
    }
    EXPECT_TRUE(std::isfinite(Bed::get(logits, count * kVocab - 1)));
  }
}

/// Which blocks take prompt rows is chosen by the number of rows, so nothing may depend on it.
TEST(Sm90Linear, GivesPromptRowsTheSameBitsInBlocksOfEveryShape) {
  ONLY_SM90();
  for (const WeightScheme scheme : {WeightScheme::kFp8Block, WeightScheme::kFp8Channel, WeightScheme::kBF16})
    for (const int64_t rows : {1, 128, 130, 257, 530}) {
      Bed bed;
      Random random(9);
      constexpr int64_t kIn = 640, kOut = 390;
      const LinearCase linear(bed, random, {kOut, kIn, scheme});
      const TensorView in = bed.tensor(DType::kBF16, {rows, kIn}, random.normals(rows * kIn));
      const std::vector<float> before = random.normals(rows * kOut);
      std::string first;
      int shapes = 0;
      for (const Candidate<OutResidual>& candidate : backends::kernel_table(bed.device().traits().platform).list<OutResidual>().candidates()) {
        const OutResidual::Problem problem{linear.source.shape, ActivationLayout::kPlain, DType::kBF16, true};
        if (!candidate.name.starts_with("cuda.sm90")) continue;
        ASSERT_TRUE(candidate.accepts(problem, bed.device().traits()).accepted) << candidate.name;
        const auto kernel = candidate.make(problem, bed.device()).value();
        Buffer& packed = bed.packed(*kernel);
        kernel->pack(linear.source, packed, bed.stream());
        const TensorView x = bed.tensor(DType::kBF16, {rows, kOut}, before);
        Launch launch = bed.launch(*kernel, rows);
        kernel->enqueue(KindRows(rows, RowKind::kPrompt).rows, {ActivationLayout::kPlain, in, {}}, packed, x, launch);
        ASSERT_OK(bed.stream().finish());
        const std::string bytes = Bed::bytes(x);
        if (shapes++ == 0) first = bytes;
        EXPECT_TRUE(bytes == first) << candidate.name << ", " << rows << " rows";
      }
      EXPECT_GE(shapes, 4);
    }
}

/// A layer of fewer tiles than the device has multiprocessors leaves blocks without any, which must not wait for what the others clear when they are done.
TEST(Sm90Linear, EndsWhereMostBlocksHaveNoTile) {
  ONLY_SM90();
  Bed bed;
  Random random(10);
  constexpr int64_t kIn = 128, kOut = 128, kMost = 200;
  const LinearCase linear(bed, random, {kOut, kIn, WeightScheme::kFp8Block});
  const auto kernel = make_kernel<OutResidual>(bed, {linear.source.shape, ActivationLayout::kPlain, DType::kBF16, false});
  Buffer& packed = bed.packed(*kernel);
  kernel->pack(linear.source, packed, bed.stream());
  const TensorView in = bed.tensor(DType::kBF16, {kMost, kIn}, random.normals(kMost * kIn)), x = bed.tensor(DType::kBF16, {kMost, kOut});
  for (const int64_t rows : {int64_t{9}, int64_t{40}, int64_t{100}, kMost}) {
    std::string first;
    for (int i = 0; i < (few_launches() ? 2 : 100); ++i) {
      std::memset(x.data<std::byte>(), 0xff, x.size_bytes());
      Launch launch = bed.launch(*kernel, rows);
      kernel->enqueue(KindRows(rows, RowKind::kDecode).rows, {ActivationLayout::kPlain, in, {}}, packed, x, launch);
      ASSERT_OK(bed.stream().finish());
      if (i == 0) first = Bed::bytes(x);
      ASSERT_TRUE(Bed::bytes(x) == first);
    }
  }
}

/// No device is needed for this: among how many blocks tiles are cut.
TEST(Sm90Linear, CutsTilesAmongNoMoreBlocksThanThereAreAndEvenlyWhereThatIsCheap) {
  using cuda::sm90::decode_blocks;
  for (const int most : {1, 7, 78, 114, 132})
    for (int tiles = 1; tiles < 300; tiles += 1 + tiles / 9)
      for (int k_blocks = 1; k_blocks < 140; k_blocks += 1 + k_blocks / 5) {
        const int blocks = decode_blocks(tiles, k_blocks, most);
        ASSERT_GE(blocks, 1);
        ASSERT_LE(blocks, std::min(most, tiles * k_blocks)) << tiles << " " << k_blocks << " " << most;
        ASSERT_TRUE(blocks % tiles == 0 || blocks == std::min(most, tiles * k_blocks)) << tiles << " " << k_blocks << " " << most;
      }
  EXPECT_EQ(decode_blocks(128, 40, 132), 128);  // gdn_in of 27B: a tile row each
  EXPECT_EQ(decode_blocks(40, 48, 132), 120);   // out_residual: a third of one
  EXPECT_EQ(decode_blocks(272, 40, 132), 132);  // mlp_in: whatever comes
  EXPECT_EQ(decode_blocks(40, 136, 132), 132);  // down_residual: thirds of a tile row would be 4 tiles a block more
  EXPECT_EQ(decode_blocks(70, 40, 132), 132);   // too many would have nothing to do
}

/// Up to four rows are quantised by every block for itself; of three and four it multiplies what is there before it quantises the rest, where it meets more than sixteen blocks of K. Of any number
/// rings go round here: no block has so many stages.
TEST(Sm90Linear, GivesFewRowsTheBitsOfManyWhereBlocksMeetMuchOfThem) {
  ONLY_SM90();
  Bed bed;
  Random random(13);
  constexpr int64_t kHidden = 5120, kWidth = 3584, kIn = 7168, kRows = 256;  // 17 of 40 and of 56 blocks of K on 132 multiprocessors
  const LinearCase gate(bed, random, {kWidth, kHidden, WeightScheme::kFp8Block}), up(bed, random, {kWidth, kHidden, WeightScheme::kFp8Block}), down(bed, random, {kHidden, kIn, WeightScheme::kFp8Block});
  const TensorView norm = bed.tensor(DType::kBF16, {kHidden}, random.normals(kHidden, 0.2f));
  const TensorView x = bed.tensor(DType::kBF16, {kRows, kHidden}, random.normals(kRows * kHidden)), middle = bed.tensor(DType::kBF16, {kRows, kIn}, random.normals(kRows * kIn));
  const auto mlp_in = make_kernel<MlpIn>(bed, {kHidden, kWidth, gate.source.shape, up.source.shape, kEps, DType::kBF16});
  const auto residual = make_kernel<DownResidual>(bed, {down.source.shape, ActivationLayout::kPlain, DType::kBF16, true});
  Buffer &in_packed = bed.packed(*mlp_in), &down_packed = bed.packed(*residual);
  mlp_in->pack({norm, gate.source, up.source}, in_packed, bed.stream());
  residual->pack(down.source, down_packed, bed.stream());
  const std::vector<int64_t> pieces = {3, 4, 1, 2, 5, 12, 33, 64, 70, 129};
  const TensorView out = bed.tensor(DType::kBF16, {kRows, kWidth}), sum = bed.tensor(DType::kBF16, {kRows, kHidden});
  expect_same_bits(out, kRows, RowKind::kDecode, RowKind::kDecode, pieces, [&](int64_t first, int64_t count, RowKind kind) {
    Launch launch = bed.launch(*mlp_in, count);
    mlp_in->enqueue(KindRows(count, kind).rows, rows_from(x, first, count), in_packed, {ActivationLayout::kPlain, rows_from(out, first, count), {}}, launch);
  });
  expect_same_bits(sum, kRows, RowKind::kDecode, RowKind::kDecode, pieces, [&](int64_t first, int64_t count, RowKind kind) {
    bed.stream().copy(rows_from(x, first, count), rows_from(sum, first, count));
    Launch launch = bed.launch(*residual, count);
    residual->enqueue(KindRows(count, kind).rows, {ActivationLayout::kPlain, rows_from(middle, first, count), {}}, down_packed, rows_from(sum, first, count), launch);
  });
}

/// Nor for this: which blocks multiply side rows. None that has tiles, and only where they are few enough for those that have none.
TEST(Sm90Linear, LeavesSideRowsToBlocksWithoutTilesWhereThoseKeepNobodyWaiting) {
  using namespace cuda::sm90;
  const auto blocks = [](int tiles, int k_blocks, int features, int most) {
    LinearLayer linear;
    linear.tiles = tiles, linear.k_blocks = k_blocks, linear.blocks = decode_blocks(tiles, k_blocks, most);
    linear.side.weight = &linear;
    linear.side.num_b = linear.side.num_a = features;
    const int side = side_blocks(linear, k_blocks, most);
    EXPECT_LE(linear.blocks + side, most);
    return side;
  };
  EXPECT_EQ(blocks(124, 35, 48, 132), 8);  // of the test above
  EXPECT_EQ(blocks(124, 30, 48, 132), 0);  // they would take longer than the others
  EXPECT_EQ(blocks(128, 40, 48, 132), 0);  // gdn_in of 27B: four would
  EXPECT_EQ(blocks(132, 40, 48, 132), 0);
  EXPECT_EQ(blocks(7, 6, 6, 132), 0);      // a tile each
  EXPECT_EQ(blocks(124, 35, 64, 132), 0);  // more side rows than a block has registers for
  EXPECT_EQ(blocks(124, 35, 0, 132), 0);
}

/// Layers of which a block has whole tile rows and parts of others, or several tiles of one, as those of the model: in the tests above it has a tile or two.
TEST(Sm90Linear, GivesDecodeRowsTheSameBitsWhereBlocksHaveWholeTileRows) {
  ONLY_SM90();
  for (const auto& [features, width, scheme] : {std::tuple{int64_t{17410}, int64_t{384}, WeightScheme::kFp8Block}, std::tuple{int64_t{17410}, int64_t{384}, WeightScheme::kBF16},
                                          std::tuple{int64_t{5120}, int64_t{1280}, WeightScheme::kFp8Block}, std::tuple{int64_t{5120}, int64_t{1280}, WeightScheme::kFp8Channel},
                                          std::tuple{int64_t{17410}, int64_t{384}, WeightScheme::kFp8Channel}}) {
    if (few_launches() && scheme == WeightScheme::kFp8Channel) continue;
    Bed bed;
    Random random(12);
    constexpr int64_t kRows = 256;
    const LinearCase linear(bed, random, {features, width, scheme});
    const TensorView in = bed.tensor(DType::kBF16, {kRows, width}, random.normals(kRows * width));
    const TensorView before = bed.tensor(DType::kBF16, {kRows, features}, random.normals(kRows * features)), x = bed.tensor(DType::kBF16, {kRows, features});
    const auto kernel = make_kernel<DownResidual>(bed, {linear.source.shape, ActivationLayout::kPlain, DType::kBF16, true});
    Buffer& packed = bed.packed(*kernel);
    kernel->pack(linear.source, packed, bed.stream());
    expect_same_bits(x, kRows, RowKind::kDecode, RowKind::kDecode, std::vector<int64_t>{3, 16, 33, 128, 200}, [&](int64_t first, int64_t count, RowKind kind) {
      bed.stream().copy(rows_from(before, first, count), rows_from(x, first, count));
      Launch launch = bed.launch(*kernel, count);
      kernel->enqueue(KindRows(count, kind).rows, {ActivationLayout::kPlain, rows_from(in, first, count), {}}, packed, rows_from(x, first, count), launch);
    });
    Vector expected;
    std::vector<float> actual;
    for (const int64_t row : {int64_t{0}, kRows - 1}) {
      const Vector y = multiply(linear.dense, seen_by(linear.source.shape, row_of(in, row)));
      for (int64_t i = 0; i < features; ++i) {
        expected.push_back(y[static_cast<size_t>(i)] + Bed::get(before, row * features + i));
        actual.push_back(Bed::get(x, row * features + i));
      }
    }
    EXPECT_LE(relative_rms(actual, expected), kBound);
  }
}

/// The same where launches are not awaited one by one, with in_proj_a and in_proj_b, which other warps compute beside: thousands of launches that overlap.
TEST(Sm90Linear, SmallLayersEndInAStreamThatRunsAhead) {
  ONLY_SM90();
  Bed bed;
  Random random(11);
  constexpr int64_t kHidden = 256, kQkv = 384, kZ = 128, kHeads = 2, kMost = 600;
  const LinearCase qkv(bed, random, {kQkv, kHidden, WeightScheme::kFp8Block}), z(bed, random, {kZ, kHidden, WeightScheme::kFp8Block});
  const LinearCase b(bed, random, {kHeads, kHidden, WeightScheme::kBF16}), a(bed, random, {kHeads, kHidden, WeightScheme::kBF16});
  const LinearCase down(bed, random, {kHidden, kQkv, WeightScheme::kFp8Block});
  const TensorView norm = bed.tensor(DType::kF32, {kHidden}, random.normals(kHidden, 0.2f));
  const std::vector<float> input = random.normals(kMost * kHidden);
  const auto gdn_in = make_kernel<GdnIn>(bed, {kHidden, qkv.source.shape, z.source.shape, b.source.shape, a.source.shape, kEps, DType::kBF16});
  const auto residual = make_kernel<DownResidual>(bed, {down.source.shape, ActivationLayout::kPlain, DType::kBF16, true});
  Buffer &in_packed = bed.packed(*gdn_in), &down_packed = bed.packed(*residual);
  gdn_in->pack({norm, qkv.source, z.source, b.source, a.source}, in_packed, bed.stream());
  residual->pack(down.source, down_packed, bed.stream());
  ASSERT_OK(bed.stream().finish());
  const std::unique_ptr<Device> device = backends::open_device(platform_under_test(), {}).value();
  const std::unique_ptr<Stream> stream = device->make_stream().value();
  constexpr std::pair<int64_t, RowKind> kSteps[] = {{1, RowKind::kDecode}, {2, RowKind::kDecode}, {3, RowKind::kDecode}, {4, RowKind::kDecode}, {5, RowKind::kDecode}, {9, RowKind::kDecode}, {40, RowKind::kDecode},
                                                    {100, RowKind::kDecode}, {200, RowKind::kDecode}, {130, RowKind::kPrompt}, {600, RowKind::kPrompt}};
  for (const auto& [rows, kind] : kSteps) {
    const GdnInputs projected{bed.tensor(DType::kBF16, {rows, kQkv}), bed.tensor(DType::kBF16, {rows, kZ}), bed.tensor(DType::kBF16, {rows, kHeads}), bed.tensor(DType::kBF16, {rows, kHeads})};
    const KindRows step(rows, kind);
    std::string bytes[2];
    for (int i = 0; i < 2; ++i) {
      const TensorView x = bed.tensor(DType::kBF16, {rows, kHidden}, std::vector<float>(input.begin(), input.begin() + rows * kHidden));
      Launch launch = bed.launch(*gdn_in, rows), other = bed.launch(*residual, rows);
      Launch first{i == 0 ? bed.stream() : *stream, launch.workspace}, second{first.stream, other.workspace};
      // The residual is added once; the projection is repeated, which changes nothing.
      gdn_in->enqueue(step.rows, x, in_packed, projected, first);
      residual->enqueue(step.rows, {ActivationLayout::kPlain, projected.qkv, {}}, down_packed, x, second);
      for (int turn = 0; turn < (i == 0 ? 1 : few_launches() ? 2 : 500); ++turn) gdn_in->enqueue(step.rows, x, in_packed, projected, first);
      ASSERT_OK(first.stream.finish());
      bytes[i] = Bed::bytes(x) + Bed::bytes(projected.qkv) + Bed::bytes(projected.z) + Bed::bytes(projected.b) + Bed::bytes(projected.a);
    }
    EXPECT_TRUE(bytes[0] == bytes[1]) << rows;
  }
}

/// Launches that overlap, each beginning to copy weights before the one before has ended, give the bits of launches that are awaited.
TEST(Sm90Linear, LayersThatOverlapGiveTheBitsOfSingleLaunches) {
  ONLY_SM90();
  Bed bed;
  Random random(8);
  constexpr int64_t kHidden = 1280, kWidth = 2304, kIn = 1536;
  const LinearCase out(bed, random, {kHidden, kIn, WeightScheme::kFp8Block}), gate(bed, random, {kWidth, kHidden, WeightScheme::kFp8Block}),
      up(bed, random, {kWidth, kHidden, WeightScheme::kFp8Block}), down(bed, random, {kHidden, kWidth, WeightScheme::kFp8Block});
  const TensorView norm = bed.tensor(DType::kBF16, {kHidden}, random.normals(kHidden, 0.2f));
  const auto out_kernel = make_kernel<OutResidual>(bed, {out.source.shape, ActivationLayout::kPlain, DType::kBF16, true});
  const auto mlp_kernel = make_kernel<MlpIn>(bed, {kHidden, kWidth, gate.source.shape, up.source.shape, kEps, DType::kBF16});
  const auto down_kernel = make_kernel<DownResidual>(bed, {down.source.shape, ActivationLayout::kPlain, DType::kBF16, true});
  Buffer &out_packed = bed.packed(*out_kernel), &mlp_packed = bed.packed(*mlp_kernel), &down_packed = bed.packed(*down_kernel);
  out_kernel->pack(out.source, out_packed, bed.stream());
  mlp_kernel->pack({norm, gate.source, up.source}, mlp_packed, bed.stream());
  down_kernel->pack(down.source, down_packed, bed.stream());
  // The launches of the bed's stream are awaited one by one; those of this device's are not.
  const std::unique_ptr<Device> device = backends::open_device(platform_under_test(), {}).value();
  const std::unique_ptr<Stream> stream = device->make_stream().value();
  constexpr std::pair<int64_t, RowKind> kSteps[] = {{1, RowKind::kDecode},  {3, RowKind::kDecode},   {8, RowKind::kDecode},  {9, RowKind::kDecode},
                                                    {40, RowKind::kDecode}, {200, RowKind::kDecode}, {70, RowKind::kPrompt}, {700, RowKind::kPrompt}};
  for (const auto& [rows, kind] : kSteps) {
    const TensorView in = bed.tensor(DType::kBF16, {rows, kIn}, random.normals(rows * kIn));
    const std::vector<float> before = random.normals(rows * kHidden);
    std::string bytes[2];
    for (int i = 0; i < 2; ++i) {
      const TensorView x = bed.tensor(DType::kBF16, {rows, kHidden}, before), middle = bed.tensor(DType::kBF16, {rows, kWidth});
      const KindRows step(rows, kind);
      Launch launch = bed.launch(*down_kernel, rows);
      Launch overlapped{i == 0 ? bed.stream() : *stream, launch.workspace};
      out_kernel->enqueue(step.rows, {ActivationLayout::kPlain, in, {}}, out_packed, x, overlapped);
      mlp_kernel->enqueue(step.rows, x, mlp_packed, {ActivationLayout::kPlain, middle, {}}, overlapped);
      down_kernel->enqueue(step.rows, {ActivationLayout::kPlain, middle, {}}, down_packed, x, overlapped);
      ASSERT_OK(overlapped.stream.finish());
      bytes[i] = Bed::bytes(x);
    }
    EXPECT_TRUE(bytes[0] == bytes[1]) << rows;
  }
}

}  // namespace
}  // namespace quern::ops::testing
