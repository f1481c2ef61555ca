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
