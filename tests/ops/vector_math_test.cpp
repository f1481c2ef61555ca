#include "backends/cpu/vector_math.h"

#include "backends/cpu/cpu_info.h"
#include "backends/cpu/fma_tile.h"
#include "ops/bed.h"

// The loops of the vector candidates by themselves: near double precision, and the same bits whatever the instruction set.

namespace quern::ops::testing {
namespace {

using cpu::VectorMath;

/// Lengths with and without whole lanes and tiles.
constexpr std::array<int64_t, 7> kLengths = {1, 7, 16, 24, 33, 128, 300};

/// Everything that VectorMath computes from the same inputs, one value after the other.
std::vector<float> all_results(const VectorMath& math, int64_t n) {
  constexpr int64_t kRows = 7, kColumns = 5;
  Random random(static_cast<uint64_t>(n));
  const std::vector<float> a = random.normals(kRows * n), b = random.normals(kColumns * n), weight = random.normals(n);
  std::vector<float> all;
  const auto append = [&](std::span<const float> values) { all.insert(all.end(), values.begin(), values.end()); };

  std::vector<float> products(kRows * kColumns);
  math.dots(a.data(), n, kRows, b.data(), n, kColumns, n, products.data(), kColumns);
  append(products);
  std::vector<float> sums = a;
  math.add_products(products.data(), kColumns, 1, kRows, b.data(), n, kColumns, n, sums.data(), n);
  append(sums);
  std::vector<float> x = a;
  append(std::array{math.max(x.data(), n), math.exp_minus(x.data(), n, 1.5f)});
  append(x);
  math.rms_norm(a.data(), weight.data(), n, 1e-6f, x.data());
  math.multiply_silu(DType::kBF16, x.data(), a.data(), n);
  math.gate(DType::kBF16, x.data(), 0.37f, weight.data(), n);
  math.round(DType::kBF16, 0x1p60f, x.data(), n);
  append(x);
  std::vector<std::byte> stored(static_cast<size_t>(n) * 2), codes(static_cast<size_t>(n));
  math.store(a.data(), n, DType::kBF16, stored.data());
  math.load(stored.data(), DType::kBF16, n, x.data());
  append(x);
  for (size_t i = 0; i < codes.size(); ++i) codes[i] = std::byte{e4m3_encode(a[i])};
  math.load(codes.data(), DType::kE4M3, n, x.data());
  append(x);
  const std::byte* columns[4] = {stored.data(), nullptr, stored.data(), stored.data()};
  math.convolve(columns, DType::kBF16, a.data(), n, n, x.data());
  append(x);
  return all;
}

std::vector<const VectorMath*> vector_paths() {
  const DeviceTraits traits = cpu::host_traits();
  std::vector<const VectorMath*> paths;
  if (traits.avx2) paths.push_back(&cpu::avx2_math());
  if (traits.avx512) paths.push_back(&cpu::avx512_math());
  return paths;
}

TEST(VectorMath, AgreesWithThePortableLoops) {
  for (const VectorMath* math : vector_paths())
    for (const int64_t n : kLengths) {
      const std::vector<float> expected = all_results(cpu::plain_math(), n);
      const std::vector<double> wide(expected.begin(), expected.end());
      EXPECT_LT(relative_rms(all_results(*math, n), wide), 2e-3) << n;  // a bf16 that falls to the other side is 2^-9 away
    }
}

TEST(VectorMath, ExpIsWithinTwoUnitsOfTheLastPlaceAndKeepsTheExtremes) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  for (const VectorMath* math : vector_paths()) {
    std::vector<float> x;
    for (float value = -87.0f; value < 88.7f; value += 0.0137f) x.push_back(value);
    const std::vector<float> inputs = x;
    math->exp_minus(x.data(), std::ssize(x), 0.0f);
    for (size_t i = 0; i < x.size(); ++i) {
      const double expected = std::exp(static_cast<double>(inputs[i]));
      EXPECT_LT(std::abs(static_cast<double>(x[i]) - expected), 2.0 * 0x1p-23 * expected) << inputs[i];
    }
    std::vector<float> ends = {-kInfinity, -1000, -110, 89.5f, 1000, kInfinity, std::nanf(""), 0};
    math->exp_minus(ends.data(), std::ssize(ends), 0.0f);
    EXPECT_THAT(std::vector<float>(ends.begin(), ends.begin() + 6), ::testing::ElementsAre(0, 0, 0, kInfinity, kInfinity, kInfinity));
    EXPECT_TRUE(std::isnan(ends[6]));
    EXPECT_EQ(ends[7], 1.0f);
  }
}

TEST(VectorMath, DecodesEveryE4M3Code) {
  std::vector<std::byte> codes(256);
  for (size_t code = 0; code < codes.size(); ++code) codes[code] = static_cast<std::byte>(code);
  for (const VectorMath* math : vector_paths()) {
    std::vector<float> values(256);
    math->load(codes.data(), DType::kE4M3, 256, values.data());
    for (size_t code = 0; code < codes.size(); ++code) {
      if (std::isnan(kE4M3Table[code])) {
        EXPECT_TRUE(std::isnan(values[code])) << code;
      } else {
        EXPECT_EQ(values[code], kE4M3Table[code]) << code;
      }
    }
  }
}

TEST(VectorMath, GivesTheSameBitsOnAvx2AndAvx512) {
  if (vector_paths().size() < 2) GTEST_SKIP() << "this processor has no AVX-512";
  for (const int64_t n : kLengths) {
    const std::vector<float> narrow = all_results(cpu::avx2_math(), n), wide = all_results(cpu::avx512_math(), n);
    ASSERT_EQ(narrow.size(), wide.size());
    EXPECT_EQ(std::memcmp(narrow.data(), wide.data(), narrow.size() * sizeof(float)), 0) << n;
  }
}

TEST(MultiplyTile, GivesTheSameBitsOnAvx2AndAvx512ForEveryNumberOfRows) {
  if (vector_paths().size() < 2) GTEST_SKIP() << "this processor has no AVX-512";
  constexpr int64_t kColumns = 300, kMaxRows = 30;
  Random random(5);
  std::vector<std::byte> codes(cpu::kFeatureTile * kColumns);
  for (std::byte& code : codes) code = std::byte{e4m3_encode(20 * random.normal())};
  const std::vector<float> scales = {0.01f, 0.02f, 0.005f}, x = random.normals(kMaxRows * cpu::row_stride(kColumns), cpu::kInputScale);
  const cpu::LinearView view{cpu::kFeatureTile, kColumns, WeightScheme::kFp8Block, codes.data(), scales.data(), 0, 0, 3, cpu::LinearPath::kAvx2};
  alignas(64) float memory[cpu::kFeatureTile];
  const cpu::FmaTile tile(view, 0, memory);
  const std::vector<float> zeros(kMaxRows * cpu::kFeatureTile);
  for (int64_t rows = 1; rows <= kMaxRows; ++rows) {
    std::vector<float> narrow = zeros, wide = zeros;
    cpu::multiply_tile_avx2(tile, x.data(), cpu::row_stride(kColumns), rows, narrow.data());
    cpu::multiply_tile_avx512(tile, x.data(), cpu::row_stride(kColumns), rows, wide.data());
    EXPECT_EQ(std::memcmp(narrow.data(), wide.data(), narrow.size() * sizeof(float)), 0) << rows;
  }
}

}  // namespace
}  // namespace quern::ops::testing
