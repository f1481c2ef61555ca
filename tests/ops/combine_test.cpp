#include "ops/bed.h"

namespace quern::ops::testing {
namespace {

TEST(Combine, AddsTheRoundedSumOfThePartialsInRankOrder) {
  for (const DType dtype : {DType::kF32, DType::kBF16})
    for (const int32_t ranks : {1, 2, 3, 8})
      for (const int64_t rows : {0, 1, 5}) {
        SCOPED_TRACE(::testing::Message() << dtype_name(dtype) << ", " << ranks << " ranks, " << rows << " rows");
        Bed bed;
        Random random(21);
        const int64_t hidden = rows == 1 ? 300 : 320;
        const auto kernel = make_kernel<Combine>(bed, {hidden, ranks, dtype});
        std::vector<TensorView> partials;
        for (int32_t rank = 0; rank < ranks; ++rank) partials.push_back(bed.tensor(dtype, {rows, hidden}, random.normals(rows * hidden)));
        const TensorView x = bed.tensor(dtype, {rows, hidden}, random.normals(rows * hidden, 4.0f));
        const std::vector<float> before = Bed::values(x);
        Launch launch = bed.launch(*kernel, rows);
        kernel->enqueue(partials, x, launch);
        for (int64_t i = 0; i < rows * hidden; ++i) {
          float sum = 0;
          for (const TensorView& partial : partials) sum += Bed::get(partial, i);
          const auto rounded = [&](float value) { return dtype == DType::kBF16 ? round_bf16(value) : value; };
          ASSERT_EQ(Bed::get(x, i), rounded(before[static_cast<size_t>(i)] + rounded(sum))) << i;
        }
      }
}

}  // namespace
}  // namespace quern::ops::testing
