#include "base/float_convert.h"

#include <cmath>

#include "support/test_support.h"

namespace quern {
namespace {

/// The value of a finite E4M3 code by its definition: bias 7, three bits of mantissa.
double e4m3_value(int code) {
  const int exponent = code >> 3 & 15, mantissa = code & 7;
  const double magnitude = exponent == 0 ? std::ldexp(mantissa, -9) : std::ldexp(8 + mantissa, exponent - 10);
  return code & 0x80 ? -magnitude : magnitude;
}

/// The nearest code with x's sign by looking at all of them, the even one on ties, saturating.
uint8_t nearest_e4m3(float x) {
  const int sign = std::signbit(x) ? 0x80 : 0;
  int best = sign;
  for (int code = sign; code < sign + 0x7f; ++code) {
    const double distance = std::abs(e4m3_value(code) - x), least = std::abs(e4m3_value(best) - x);
    if (distance < least || (distance == least && code % 2 == 0)) best = code;
  }
  return static_cast<uint8_t>(best);
}

TEST(E4M3, DecodesAllCodesAsDefined) {
  for (int code = 0; code < 256; ++code) {
    const float value = e4m3_decode(static_cast<uint8_t>(code));
    EXPECT_EQ(std::isnan(value), (code & 0x7f) == 0x7f) << code;
    EXPECT_EQ(e4m3_is_nan(static_cast<uint8_t>(code)), (code & 0x7f) == 0x7f) << code;
    if (std::isnan(value)) continue;
    EXPECT_EQ(value, e4m3_value(code)) << code;
    EXPECT_EQ(std::signbit(value), code >= 0x80) << code;
    EXPECT_EQ(kE4M3Table[static_cast<size_t>(code)], value);
  }
  EXPECT_EQ(e4m3_decode(0x7e), 448.0f);
  EXPECT_EQ(e4m3_decode(0x01), 0x1p-9f);
  EXPECT_EQ(e4m3_decode(0x08), 0x1p-6f);
}

TEST(E4M3, EncodesEveryValueTieAndNeighbourToTheNearestEvenCode) {
  for (int code = 0; code < 256; ++code) {
    if (e4m3_is_nan(static_cast<uint8_t>(code))) continue;
    const float value = e4m3_decode(static_cast<uint8_t>(code));
    EXPECT_EQ(e4m3_encode(value), code);
    if ((code & 0x7f) == 0x7e) continue;
    const float middle = (value + e4m3_decode(static_cast<uint8_t>(code + 1))) / 2;  // exact in f32
    for (const float x : {middle, std::nextafter(middle, 0.0f), std::nextafter(middle, 2 * middle)})
      EXPECT_EQ(e4m3_encode(x), nearest_e4m3(x)) << code << " " << x;
  }
}

TEST(E4M3, EncodesValuesAcrossTheWholeRangeToTheNearestCode) {
  for (int step = -2000; step <= 2000; ++step)
    for (const float sign : {1.0f, -1.0f}) {
      const float x = sign * std::exp2(static_cast<float>(step) / 150.0f);  // 2^-13 .. 2^13: underflow, subnormals, saturation
      EXPECT_EQ(e4m3_encode(x), nearest_e4m3(x)) << x;
    }
}

TEST(E4M3, SaturatesAndKeepsNaNAndTheSignOfZero) {
  for (const float x : {449.0f, 464.0f, 480.0f, 1e9f, std::numeric_limits<float>::infinity()}) {
    EXPECT_EQ(e4m3_encode(x), 0x7e);
    EXPECT_EQ(e4m3_encode(-x), 0xfe);
  }
  EXPECT_TRUE(e4m3_is_nan(e4m3_encode(std::nanf(""))));
  EXPECT_EQ(e4m3_encode(0.0f), 0x00);
  EXPECT_EQ(e4m3_encode(-0.0f), 0x80);
  EXPECT_EQ(e4m3_encode(0x1p-10f), 0x00) << "half the smallest value is a tie, and zero is even";
  EXPECT_EQ(e4m3_encode(std::nextafter(0x1p-10f, 1.0f)), 0x01);
}

TEST(Bf16, RoundsToNearestEven) {
  EXPECT_EQ(round_bf16(1.0f + 0x1p-8f), 1.0f) << "a tie goes to the even neighbour below";
  EXPECT_EQ(round_bf16(1.0f + 3 * 0x1p-8f), 1.0f + 0x1p-6f) << "and above";
  EXPECT_EQ(round_bf16(std::nextafter(1.0f + 0x1p-8f, 2.0f)), 1.0f + 0x1p-7f);
  EXPECT_EQ(round_bf16(-1.0f - 0x1p-8f), -1.0f);
  EXPECT_EQ(round_bf16(std::numeric_limits<float>::max()), std::numeric_limits<float>::infinity());
  EXPECT_EQ(round_bf16(-std::numeric_limits<float>::infinity()), -std::numeric_limits<float>::infinity());
  EXPECT_TRUE(std::isnan(round_bf16(std::bit_cast<float>(0x7f800001u)))) << "a NaN whose upper bits are an infinity's";
}

TEST(Bf16, WidensAndNarrowsEveryCodeToItself) {
  for (uint32_t code = 0; code < 0x10000; ++code) {
    const bf16 x{static_cast<uint16_t>(code)};
    if (std::isnan(to_f32(x)))
      EXPECT_TRUE(std::isnan(to_f32(to_bf16(to_f32(x)))));
    else
      ASSERT_EQ(to_bf16(to_f32(x)), x);
  }
}

TEST(F16, DecodesAllCodesAsDefined) {
  for (int code = 0; code < 0x10000; ++code) {
    const int exponent = code >> 10 & 31, mantissa = code & 1023;
    const float value = f16_to_f32(static_cast<uint16_t>(code));
    if (exponent == 31) {
      EXPECT_EQ(std::isnan(value), mantissa != 0);
      EXPECT_EQ(std::isinf(value), mantissa == 0);
      continue;
    }
    const double magnitude = exponent == 0 ? std::ldexp(mantissa, -24) : std::ldexp(1024 + mantissa, exponent - 25);
    ASSERT_EQ(value, code & 0x8000 ? -magnitude : magnitude);
  }
  EXPECT_EQ(e5m2_decode(0x7b), 57344.0f);
  EXPECT_TRUE(std::isinf(e5m2_decode(0x7c)));
}

}  // namespace
}  // namespace quern
