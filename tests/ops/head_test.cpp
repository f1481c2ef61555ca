#include "ops/cases.h"
#include "ops/linear_case.h"

namespace quern::ops::testing {
namespace {

constexpr int64_t kHidden = 160, kVocab = 300;

TEST(Head, NormsEveryRowAndGivesLogitsOfTheNamedOnes) {
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    Bed bed;
    Random random(8);
    const LinearCase lm_head(bed, random, {kVocab, kHidden, WeightScheme::kBF16});
    const auto kernel = make_kernel<Head>(bed, {kHidden, kVocab, lm_head.source.shape, false, 1e-6f, dtype});
    Buffer& packed = bed.packed(*kernel);
    kernel->pack(lm_head.source, packed, bed.stream());
    const TensorView norm = bed.tensor(DType::kF32, {kHidden}, random.normals(kHidden, 0.2f));
    const TensorView x = bed.tensor(dtype, {70, kHidden}, random.normals(70 * kHidden));
    const TensorView hidden = bed.tensor(dtype, {70, kHidden}), logits = bed.tensor(DType::kF32, {3, kVocab});
    const std::vector<int32_t> wanted = {69, 0, 64};
    const TensorView named = bed.ints({3}, wanted);
    const RowRun all{0, 0, 70, RowKind::kPrompt, true};
    Rows rows;
    rows.num_rows = 70;
    rows.runs = {&all, 1};
    Launch launch = bed.launch(*kernel, 70);
    kernel->enqueue(rows, x, norm, named, packed, hidden, logits, launch);
    Vector expected_hidden, expected_logits;
    for (size_t row = 0; row < 70; ++row)
      for (const double y : rms_norm(testing::row(Bed::doubles(x), row, kHidden), Bed::doubles(norm), 1e-6, 1.0))
        expected_hidden.push_back(y);
    for (const int32_t row : wanted)
      for (const double y : multiply(lm_head.dense, testing::row(Bed::doubles(hidden), static_cast<size_t>(row), kHidden)))
        expected_logits.push_back(y);
    EXPECT_LT(relative_rms(Bed::values(hidden), expected_hidden), dtype == DType::kF32 ? 1e-6 : 3e-3);
    EXPECT_LT(relative_rms(Bed::values(logits), expected_logits), 1e-6) << "logits are f32 in every mode";
  }
}

TEST(Head, ReadsTheEmbeddingsBufferWhenTied) {
  for (const WeightScheme scheme : kSchemes) {
    Bed bed;
    Random random(9);
    const LinearCase table(bed, random, {kVocab, kHidden, scheme});
    const auto embed = make_kernel<Embed>(bed, {kVocab, kHidden, scheme, DType::kBF16, true});
    const auto tied = make_kernel<Head>(bed, {kHidden, kVocab, table.source.shape, true, 1e-6f, DType::kBF16});
    const auto own = make_kernel<Head>(bed, {kHidden, kVocab, table.source.shape, false, 1e-6f, DType::kBF16});
    EXPECT_EQ(tied->packed_bytes(), 0u);
    Buffer &shared = bed.packed(*embed), &separate = bed.packed(*own);
    embed->pack(table.source, shared, bed.stream());
    own->pack(table.source, separate, bed.stream());
    const TensorView norm = bed.zeros(DType::kF32, {kHidden}), x = bed.tensor(DType::kBF16, {2, kHidden}, random.normals(2 * kHidden));
    const RowRun all{0, 0, 2, RowKind::kDecode, true};
    Rows rows;
    rows.num_rows = 2;
    rows.runs = {&all, 1};
    const TensorView both = bed.ints({2}, std::vector<int32_t>{0, 1});
    std::string bytes[2];
    for (int i = 0; i < 2; ++i) {
      const auto& kernel = i == 0 ? *tied : *own;
      const TensorView hidden = bed.tensor(DType::kBF16, {2, kHidden}), logits = bed.tensor(DType::kF32, {2, kVocab});
      Launch launch = bed.launch(kernel, 2);
      kernel.enqueue(rows, x, norm, both, i == 0 ? shared : separate, hidden, logits, launch);
      bytes[i] = Bed::bytes(logits);
    }
    EXPECT_EQ(embed->table_layout(), tied->table_layout());
    EXPECT_TRUE(bytes[0] == bytes[1]) << weight_scheme_name(scheme);
  }
}

}  // namespace
}  // namespace quern::ops::testing
