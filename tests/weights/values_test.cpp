// Conversions and generators below the loader.

#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <map>
#include <vector>

#include "base/hash.h"
#include "support/test_support.h"
#include "weights/dummy.h"
#include "weights/encode_fp8.h"
#include "weights/made_checkpoint.h"
#include "weights/stored_values.h"
#include "weights/synthetic.h"

namespace quern::weights {
namespace {

using ops::WeightScheme;
using testing::cut;
using testing::MadeCheckpoint;
using testing::stage;
using tools::SynthScheme;

TEST(FindNonFinite, SeesEveryNanAndInfinityAtEveryPlace) {
  struct Case {
    DType dtype;
    std::vector<uint32_t> bad, good;
  };
  const Case cases[] = {
      {DType::kE4M3, {0x7f, 0xff}, {0x00, 0x7e, 0xfe, 0x80, 0x77}},
      {DType::kBF16, {0x7f80, 0xff80, 0x7fc0, 0xff81}, {0x0000, 0x7f7f, 0xff7f, 0x8000, 0x3f80}},
      {DType::kF16, {0x7c00, 0xfc00, 0x7e01}, {0x7bff, 0xfbff, 0x8000, 0x03ff}},
      {DType::kF32, {0x7f800000, 0xff800000, 0x7fc00001}, {0x7f7fffff, 0xff7fffff, 0x80000000, 0x007fffff}},
  };
  for (const Case& c : cases) {
    const size_t element = dtype_size(c.dtype);
    for (const size_t count : {size_t{1}, size_t{7}, size_t{4099}, size_t{9001}}) {
      std::vector<std::byte> bytes(count * element);
      for (size_t i = 0; i < count; ++i) std::memcpy(&bytes[i * element], &c.good[i % c.good.size()], element);
      EXPECT_FALSE(find_non_finite(bytes, c.dtype).has_value());
      for (const size_t at : {size_t{0}, count / 2, count - 1}) {
        for (const uint32_t bad : c.bad) {
          std::vector<std::byte> spoiled = bytes;
          std::memcpy(&spoiled[at * element], &bad, element);
          EXPECT_EQ(find_non_finite(spoiled, c.dtype), at) << dtype_name(c.dtype) << " " << bad;
        }
      }
    }
  }
}

TEST(QuantizeRowFp8, RoundsAsTheConversionDoes) {
  SplitMix64 random(3);
  std::vector<float> row(4096);
  for (int round = 0; round < 200; ++round) {
    const float spread = std::ldexp(1.0f, static_cast<int>(random.next() % 60) - 30);
    for (float& x : row)
      x = spread * (static_cast<float>(random.next() >> 40) * 0x1p-23f - 1.0f) * std::ldexp(1.0f, -static_cast<int>(random.next() % 20));
    row[random.next() % row.size()] = -spread;
    std::vector<uint8_t> codes(row.size());
    const float scale = quantize_row_fp8(row.data(), row.size(), codes.data());
    float largest = 0;
    for (const float x : row) largest = std::max(largest, std::fabs(x));
    ASSERT_EQ(scale, largest / 448.0f);
    for (size_t i = 0; i < row.size(); ++i) ASSERT_EQ(codes[i], e4m3_encode(row[i] / scale)) << row[i] << " / " << scale;
  }
}

TEST(QuantizeRowFp8, IsExactForEveryCode) {
  std::vector<float> row;
  for (int code = 0; code < 256; ++code)
    if (!e4m3_is_nan(static_cast<uint8_t>(code))) row.push_back(e4m3_decode(static_cast<uint8_t>(code)) * 0.25f);
  std::vector<uint8_t> codes(row.size());
  EXPECT_EQ(quantize_row_fp8(row.data(), row.size(), codes.data()), 0.25f);
  for (size_t i = 0; i < row.size(); ++i) EXPECT_EQ(e4m3_decode(codes[i]) * 0.25f, row[i]);
}

TEST(QuantizeRowFp8, KeepsZeroAndTinyRowsFinite) {
  for (const float value : {0.0f, 1e-45f, 1e-40f, -3e-39f}) {
    const std::vector<float> row(5, value);
    std::vector<uint8_t> codes(row.size(), 0xff);
    const float scale = quantize_row_fp8(row.data(), row.size(), codes.data());
    EXPECT_GT(scale, 0);
    for (const uint8_t code : codes) {
      EXPECT_FALSE(e4m3_is_nan(code));
      EXPECT_NEAR(e4m3_decode(code) * scale, value, 1e-40f);
    }
  }
}

TEST(RuntimeQuantization, ScalesWholeRowsSoThatCutsAgree) {
  MadeCheckpoint made(SynthScheme::kBf16);
  LoadOptions options;
  options.quantize_fp8 = true;
  const auto source = made.open(options);
  ASSERT_OK(source);
  const std::string name = "layers.0.mlp.down_proj.weight";
  const ops::LinearShape& linear = (*source)->inventory().linears.at(name);
  EXPECT_EQ(linear.scheme, WeightScheme::kFp8Channel);
  const std::vector<float> original = made.values(name);
  std::vector<float> expected = original;
  for (int64_t r = 0; r < linear.out_features; ++r) {
    float* row = &expected[static_cast<size_t>(r * linear.in_features)];
    float largest = 0;
    for (int64_t c = 0; c < linear.in_features; ++c) largest = std::max(largest, std::fabs(row[c]));
    for (int64_t c = 0; c < linear.in_features; ++c) row[c] = e4m3_decode(e4m3_encode(row[c] / (largest / 448))) * (largest / 448);
  }
  for (const bool in_place : {true, false}) {
    EXPECT_EQ(stage(**source, name, {}, in_place), expected);
    for (const Slice& slice : {Slice{0, -1, 128, -1}, Slice{3, 9, 1, 100}})
      EXPECT_EQ(stage(**source, name, slice, in_place), cut(expected, linear.in_features, slice));
  }
  EXPECT_EQ((*source)->inventory().linears.at("layers.0.linear_attn.in_proj_a.weight").scheme, WeightScheme::kBF16);
  EXPECT_EQ(stage(**source, "lm_head.weight"), made.values("lm_head.weight"));
}

TEST(SyntheticTensor, GivesTheSameElementsInAnyPieces) {
  const SyntheticTensor tensor("layers.0.mlp.up_proj.weight", {100, 77}, 5);
  for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16, DType::kE4M3}) {
    const size_t element = dtype_size(dtype);
    const auto fill = [&](int64_t begin, int64_t count, std::byte* out) {
      dtype == DType::kE4M3 ? tensor.fill_codes(begin, count, out) : tensor.fill(dtype, begin, count, out);
    };
    std::vector<std::byte> whole(7700 * element), pieces(whole.size());
    fill(0, 7700, whole.data());
    for (int64_t begin = 0, step = 1; begin < 7700; begin += step, step = step % 29 + 1) {
      step = std::min<int64_t>(step, 7700 - begin);
      fill(begin, step, &pieces[static_cast<size_t>(begin) * element]);
    }
    EXPECT_EQ(whole, pieces) << dtype_name(dtype);
    EXPECT_FALSE(find_non_finite(whole, dtype).has_value());
  }
}

TEST(SyntheticTensor, DependsOnSeedAndName) {
  std::vector<std::byte> a(1000), b(1000), c(1000);
  SyntheticTensor("layers.0.mlp.up_proj.weight", {10, 100}, 1).fill_codes(0, 1000, a.data());
  SyntheticTensor("layers.0.mlp.up_proj.weight", {10, 100}, 2).fill_codes(0, 1000, b.data());
  SyntheticTensor("layers.1.mlp.up_proj.weight", {10, 100}, 1).fill_codes(0, 1000, c.data());
  EXPECT_NE(a, b);
  EXPECT_NE(a, c);
}

TEST(SyntheticTensor, AgreesBetweenF32AndItsRoundings) {
  const SyntheticTensor tensor("layers.0.linear_attn.A_log", {4096}, 5);
  std::vector<std::byte> f32(4096 * 4), narrow(4096 * 2), half(4096 * 2);
  tensor.fill(DType::kF32, 0, 4096, f32.data());
  tensor.fill(DType::kBF16, 0, 4096, narrow.data());
  tensor.fill(DType::kF16, 0, 4096, half.data());
  for (size_t i = 0; i < 4096; ++i) {
    const float exact = MadeCheckpoint::read(&f32[4 * i], DType::kF32);
    EXPECT_EQ(MadeCheckpoint::read(&narrow[2 * i], DType::kBF16), round_bf16(exact));
    EXPECT_NEAR(MadeCheckpoint::read(&half[2 * i], DType::kF16), exact, 0.003);
    EXPECT_GT(std::exp(exact), 0.004);
    EXPECT_LT(std::exp(exact), 0.37);
  }
}

TEST(DummySource, MakesWhatAGeneratedCheckpointOfTheSameSeedHolds) {
  for (const SynthScheme scheme : {SynthScheme::kBf16, SynthScheme::kBlockFp8, SynthScheme::kStaticFp8, SynthScheme::kFp8Dynamic,
                                   SynthScheme::kMixed, SynthScheme::kModelOptFp8}) {
    SCOPED_TRACE(tools::synth_scheme_names()[static_cast<size_t>(scheme)]);
    MadeCheckpoint made(scheme, [](auto& options) { options.seed = 11; });
    const auto stored = made.open();
    ASSERT_OK(stored);
    LoadOptions options;
    options.format = LoadFormat::kDummy;
    options.dummy_seed = 11;
    const auto dummy = open_weights("/no directory is needed", made.config(), options);
    ASSERT_OK(dummy);
    EXPECT_EQ((*dummy)->inventory().linears, (*stored)->inventory().linears);
    for (const auto& [name, linear] : (*dummy)->inventory().linears) {
      EXPECT_EQ(stage(**dummy, name), stage(**stored, name)) << name;
      const Slice slice{linear.out_features / 2, -1, linear.in_features / 3, -1};
      EXPECT_EQ(stage(**dummy, name, slice, false), stage(**stored, name, slice)) << name;
      const Slice pieces{0, linear.out_features / 4, 0, -1, {{linear.out_features / 4, linear.out_features / 2}, {linear.out_features - 1, linear.out_features}}};
      if (linear.scheme != ops::WeightScheme::kFp8Block) {
        EXPECT_EQ(stage(**dummy, name, pieces, false), stage(**stored, name, pieces)) << name;
      }
    }
    quern::testing::HostDevice device(false);
    auto stream = device.make_stream();
    for (const auto& [name, vector] : (*dummy)->inventory().vectors) {
      const auto a = (*dummy)->vector(name, {}, device, **stream), b = (*stored)->vector(name, {}, device, **stream);
      ASSERT_OK(a);
      ASSERT_OK(b);
      ASSERT_OK((*stream)->finish());
      EXPECT_EQ(a->view.shape, b->view.shape) << name;
      EXPECT_EQ(std::memcmp(a->view.data<std::byte>(), b->view.data<std::byte>(), a->view.size_bytes()), 0) << name;
      // Pieces of the first extent, joined.
      const int64_t rows = vector.second[0], half = rows / 2;
      const Slice pieces{half, rows, 0, -1, {{0, half}}};
      const auto c = (*dummy)->vector(name, pieces, device, **stream), d = (*stored)->vector(name, pieces, device, **stream);
      ASSERT_OK(c);
      ASSERT_OK(d);
      ASSERT_OK((*stream)->finish());
      EXPECT_EQ(d->view.shape, b->view.shape) << name;
      EXPECT_EQ(std::memcmp(c->view.data<std::byte>(), d->view.data<std::byte>(), d->view.size_bytes()), 0) << name;
      const size_t front = b->view.size_bytes() / static_cast<size_t>(rows) * static_cast<size_t>(half), back = b->view.size_bytes() - front;
      EXPECT_EQ(std::memcmp(d->view.data<std::byte>(), b->view.data<std::byte>() + front, back), 0) << name;
      EXPECT_EQ(std::memcmp(d->view.data<std::byte>() + back, b->view.data<std::byte>(), front), 0) << name;
    }
  }
}

}  // namespace
}  // namespace quern::weights
