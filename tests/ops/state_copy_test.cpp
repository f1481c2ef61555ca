#include "ops/bed.h"

// state_copy and combine.

namespace quern::ops::testing {
namespace {

TEST(StateCopy, CopiesPiecesAndClearsThoseWithoutASource) {
  Bed bed;
  Random random(3);
  const auto kernel = make_kernel<StateCopy>(bed, {});
  const TensorView from = bed.tensor(DType::kF32, {3, 5}, random.normals(15)), to = bed.tensor(DType::kF32, {3, 5});
  const StateCopy::Copy copies[] = {{from.at(2), to.at(0)}, {{}, to.at(1)}};
  Launch launch = bed.launch(*kernel, 0);
  kernel->enqueue(copies, launch);
  EXPECT_EQ(Bed::bytes(to.at(0)), Bed::bytes(from.at(2)));
  EXPECT_EQ(Bed::bytes(to.at(1)), std::string(20, '\0'));
  EXPECT_EQ(Bed::bytes(to.at(2)), std::string(20, '\xff'));
}

TEST(StateCopy, KeepsTheHiddensThatLaterStepsNeed) {
  constexpr int64_t kHidden = 8, kWindow = 4;
  Bed bed;
  Random random(6);
  const auto kernel = make_kernel<StateCopy>(bed, {});
  const SlotTables slots = make_slots(bed, 3, 0, 2);
  const TensorView window = bed.tensor(DType::kF32, {3, kWindow, kHidden}), boundary_hidden = bed.tensor(DType::kF32, {3, kHidden});
  const TensorView sequence = bed.tensor(DType::kF32, {140, kHidden}, random.normals(140 * kHidden));
  const auto set = [&](const TensorView& table, int64_t value) { table.data<int32_t>()[1] = static_cast<int32_t>(value); };
  const auto store = [&](int64_t cursor, int64_t rows, bool committed) {
    set(slots.cursor, cursor);
    const Step step(bed, {{1, 0, static_cast<int32_t>(rows), RowKind::kDecode, committed}}, slots);
    TensorView hidden = sequence;
    hidden.offset_bytes = sequence.at(cursor).offset_bytes;
    Launch launch = bed.launch(*kernel, rows);
    kernel->store_hidden(step.rows, hidden.first(rows), window, boundary_hidden, launch);
    set(slots.boundary, (committed ? cursor + rows : cursor) / 64 * 64);
  };
  store(0, 62, true);
  for (int64_t index = 58; index < 62; ++index) EXPECT_EQ(Bed::bytes(window.at(1).at(index % kWindow)), Bed::bytes(sequence.at(index)));
  store(62, 4, false);  // a verify across the boundary stores no fold
  EXPECT_EQ(Bed::bytes(boundary_hidden.at(1)), std::string(kHidden * 4, '\xff'));
  store(65, 3, false);  // its row 63 is in the window, about to be written over
  EXPECT_EQ(Bed::bytes(boundary_hidden.at(1)), Bed::bytes(sequence.at(63)));
  store(66, 70, true);  // passes 128 with rows of this step
  EXPECT_EQ(Bed::bytes(boundary_hidden.at(1)), Bed::bytes(sequence.at(127)));
  EXPECT_EQ(Bed::bytes(window.at(0)), std::string(kWindow * kHidden * 4, '\xff')) << "other slots are left alone";
}

TEST(Combine, RoundsTheSumOfAllRanksOnceBeforeTheResidual) {
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    Bed bed;
    Random random(4);
    const auto kernel = make_kernel<Combine>(bed, {64, 3, dtype});
    std::vector<TensorView> partials;
    for (int rank = 0; rank < 3; ++rank) partials.push_back(bed.tensor(dtype, {7, 64}, random.normals(7 * 64)));
    const TensorView x = bed.tensor(dtype, {7, 64}, random.normals(7 * 64, 4.0f)), before = bed.tensor(dtype, {7, 64});
    bed.stream().copy(x, before);
    Launch launch = bed.launch(*kernel, 7);
    kernel->enqueue(partials, x, launch);
    for (int64_t i = 0; i < 7 * 64; ++i) {
      const float sum = Bed::get(partials[0], i) + Bed::get(partials[1], i) + Bed::get(partials[2], i);
      const float expected = dtype == DType::kF32 ? Bed::get(before, i) + sum : round_bf16(Bed::get(before, i) + round_bf16(sum));
      ASSERT_EQ(Bed::get(x, i), expected);
    }
  }
}

}  // namespace
}  // namespace quern::ops::testing
