#include "ops/cases.h"
#include "ops/linear_case.h"

namespace quern::ops::testing {
namespace {

TEST(Embed, LooksUpRowsOfEveryScheme) {
  for (const WeightScheme scheme : kSchemes)
    for (const DType dtype : {DType::kF32, DType::kBF16}) {
      Bed bed;
      Random random(5);
      const LinearCase table(bed, random, {200, 300, scheme});
      const auto kernel = make_kernel<Embed>(bed, {200, 300, scheme, dtype});
      Buffer& packed = bed.packed(*kernel);
      kernel->pack(table.source, packed, bed.stream());
      const std::vector<int32_t> ids = {0, 199, 127, 128, 0};
      const TensorView x = bed.tensor(dtype, {5, 300});
      Launch launch = bed.launch(*kernel, 5);
      kernel->enqueue_lookup(bed.ints({5}, ids), packed, x, launch);
      for (size_t row = 0; row < ids.size(); ++row)
        for (size_t i = 0; i < 300; ++i) {
          const auto value =
              static_cast<float>(table.dense[static_cast<size_t>(ids[row]) * 300 + i]);  // e4m3 times a bf16 scale is exact in f32
          ASSERT_EQ(Bed::get(x, static_cast<int64_t>(row * 300 + i)), dtype == DType::kF32 ? value : round_bf16(value))
              << weight_scheme_name(scheme);
        }
    }
}

TEST(Embed, GivesZerosForIdsOfOtherRanksSoThatTheRanksRowsAddUp) {
  Bed bed;
  Random random(15);
  const LinearCase table(bed, random, {70, 304, WeightScheme::kBF16});
  const std::vector<int32_t> ids = {0, 49, 50, 119, 120, 149};
  // The table's rows are the ids 50 .. 119 of 150; a rank without a table has zeros for all.
  for (const int64_t vocab : {70, 0}) {
    const auto kernel = make_kernel<Embed>(bed, {.vocab_size = vocab, .hidden = 304, .activation = DType::kBF16, .first_id = 50, .num_ids = 150});
    Buffer& packed = bed.packed(*kernel);
    if (vocab > 0) kernel->pack(table.source, packed, bed.stream());
    const TensorView x = bed.tensor(DType::kBF16, {6, 304}, random.normals(6 * 304));
    Launch launch = bed.launch(*kernel, 6);
    kernel->enqueue_lookup(bed.ints({6}, ids), packed, x, launch);
    for (size_t row = 0; row < ids.size(); ++row)
      for (size_t i = 0; i < 304; ++i) {
        const bool own = vocab > 0 && ids[row] >= 50 && ids[row] < 120;
        const float wanted = own ? round_bf16(static_cast<float>(table.dense[static_cast<size_t>(ids[row] - 50) * 304 + i])) : 0.0f;
        ASSERT_EQ(Bed::get(x, static_cast<int64_t>(row * 304 + i)), wanted) << "id " << ids[row] << " of a table of " << vocab;
      }
  }
}

TEST(Embed, ResolvesTokensIndicesAndPositionsOfPromptDecodeVerifyAndPaddingRows) {
  Bed bed;
  Random random(6);
  const LinearCase table(bed, random, {50, 32, WeightScheme::kBF16});
  const auto kernel = make_kernel<Embed>(bed, {50, 32, WeightScheme::kBF16, DType::kBF16});
  Buffer& packed = bed.packed(*kernel);
  kernel->pack(table.source, packed, bed.stream());
  const SlotTables slots = make_slots(bed, 4, 3, 2);
  const auto set = [](const TensorView& view, int64_t i, int32_t value) { view.data<int32_t>()[i] = value; };
  set(slots.cursor, 1, 64);
  set(slots.cursor, 2, 10);
  set(slots.cursor, 3, 20);
  set(slots.last_token, 2, 41);
  set(slots.last_token, 3, 42);
  set(slots.position_delta, 2, -4);
  set(slots.position_delta, 3, 7);
  for (int32_t i = 0; i < 3; ++i) set(slots.drafts, 2 * 3 + i, 30 + i);
  Step step(bed,
            {{1, 0, 2, RowKind::kPrompt, true},
             {2, 2, 3, RowKind::kDecode, false},
             {3, 5, 1, RowKind::kDecode, true},
             {0, 6, 2, RowKind::kDecode, true}},
            slots, 9);
  for (const TensorView& view : {step.rows.tokens, step.rows.indices, step.rows.positions})
    bed.stream().copy(bed.tensor(view.dtype, view.shape), view);
  step.rows.given_tokens = bed.ints({9}, std::vector<int32_t>{7, 8, -1, -1, -1, -1, 9, 10, 13});
  step.rows.run_positions = bed.ints({4, 3}, std::vector<int32_t>{5, 6, 7, 0, 0, 0, 0, 0, 0, 0, 0, 0});
  const TensorView x = bed.tensor(DType::kBF16, {9, 32});
  Launch launch = bed.launch(*kernel, 9);
  kernel->enqueue(step.rows, packed, x, launch);
  const auto ints = [](const TensorView& view) {
    return std::vector<int32_t>(view.data<int32_t>(), view.data<int32_t>() + view.shape.num_elements());
  };
  const std::vector<int32_t> tokens = {7, 8, 41, 30, 31, 42, 9, 10, 0};
  EXPECT_EQ(ints(step.rows.tokens), tokens);
  EXPECT_EQ(ints(step.rows.indices), (std::vector<int32_t>{64, 65, 10, 11, 12, 20, 0, 1, -1}));
  EXPECT_EQ(ints(step.rows.positions), (std::vector<int32_t>{5, 6, 7, 6, 7, 8, 6, 6, 6, 7, 7, 7, 8, 8, 8, 27, 27, 27, 0, 0, 0, 1, 1, 1, 0, 0, 0}));
  for (size_t row = 0; row < tokens.size(); ++row)
    EXPECT_EQ(Bed::bytes(x.at(static_cast<int64_t>(row))), Bed::bytes(table.source.weight.at(tokens[row])));
}

}  // namespace
}  // namespace quern::ops::testing
