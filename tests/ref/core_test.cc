// The small things that everything stands on: 16-bit floats and the generator of the dropout mask.
// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <limits>

#include "core/half.h"
#include "core/philox.h"

namespace ffpa {
namespace {

// Value of a float with `mantissa` stored bits and a 5 or 8 bit exponent, by its definition.
double defined_value(uint32_t bits, int mantissa, int exponent_bits) {
  const int all_ones = (1 << exponent_bits) - 1, bias = all_ones / 2;
  const int exponent = static_cast<int>(bits >> mantissa) & all_ones;
  const double fraction = std::ldexp(static_cast<double>(bits & ((1u << mantissa) - 1)), -mantissa);
  const double sign = bits >> (mantissa + exponent_bits) & 1 ? -1.0 : 1.0;
  if (exponent == all_ones)
    return fraction != 0 ? std::numeric_limits<double>::quiet_NaN() : sign * std::numeric_limits<double>::infinity();
  return sign * (exponent ? std::ldexp(1 + fraction, exponent - bias) : std::ldexp(fraction, 1 - bias));
}

struct Half {
  const char* name;
  int mantissa, exponent_bits;
  float (*widen)(uint16_t);
  uint16_t (*narrow)(float);
};

class HalfTest : public testing::TestWithParam<Half> {};
INSTANTIATE_TEST_SUITE_P(All, HalfTest,
                         testing::Values(Half{"fp16", 10, 5, float_from_fp16, fp16_from_float},
                                         Half{"bf16", 7, 8, float_from_bf16, bf16_from_float}),
                         [](const auto& info) { return info.param.name; });

TEST_P(HalfTest, EveryValueWidensAndComesBack) {
  const Half& half = GetParam();
  for (uint32_t bits = 0; bits < 65536; ++bits) {
    const double expected = defined_value(bits, half.mantissa, half.exponent_bits);
    const float wide = half.widen(static_cast<uint16_t>(bits));
    if (std::isnan(expected)) {
      ASSERT_TRUE(std::isnan(wide)) << bits;
      ASSERT_TRUE(std::isnan(half.widen(half.narrow(wide)))) << bits;
    } else {
      ASSERT_EQ(wide, expected) << bits;
      ASSERT_EQ(half.narrow(wide), bits);
    }
  }
}

TEST_P(HalfTest, RoundsToNearestEven) {
  const Half& half = GetParam();
  const uint32_t infinity = ((1u << half.exponent_bits) - 1) << half.mantissa;
  for (uint32_t bits = 0; bits < infinity;
       ++bits) {  // between each value and the next; beyond the largest: as if it went on
    const double low = defined_value(bits, half.mantissa, half.exponent_bits);
    const double below = bits ? defined_value(bits - 1, half.mantissa, half.exponent_bits) : 0;
    const double high =
        bits + 1 < infinity ? defined_value(bits + 1, half.mantissa, half.exponent_bits) : 2 * low - below;
    const auto middle = static_cast<float>((low + high) / 2);
    if (std::isinf(middle) || middle != (low + high) / 2) continue;  // not a float: none is halfway
    const uint32_t even = bits & 1 ? bits + 1 : bits;
    const uint32_t sign = 1u << (half.mantissa + half.exponent_bits);
    ASSERT_EQ(half.narrow(middle), even) << bits;
    ASSERT_EQ(half.narrow(-middle), even | sign) << bits;
    ASSERT_EQ(half.narrow(std::nextafter(middle, 0.f)), bits);
    ASSERT_EQ(half.narrow(std::nextafter(middle, HUGE_VALF)), bits + 1);
  }
  EXPECT_EQ(half.narrow(HUGE_VALF), infinity);
  EXPECT_EQ(half.narrow(std::numeric_limits<float>::max()), infinity);
}

// The known answers that the generator's authors publish.
TEST(Philox, KnownAnswers) {
  struct {
    Philox4 counter;
    uint32_t key[2];
    Philox4 expected;
  } constexpr kCases[] = {
      {{{0, 0, 0, 0}}, {0, 0}, {{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}}},
      {{{~0u, ~0u, ~0u, ~0u}}, {~0u, ~0u}, {{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}}},
      {{{0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}},
       {0xa4093822, 0x299f31d0},
       {{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}}},
  };
  for (const auto& c : kCases) {
    const Philox4 got = philox4x32_10(c.counter, c.key[0], c.key[1]);
    for (int i = 0; i < 4; ++i) EXPECT_EQ(got.word[i], c.expected.word[i]);
  }
}

TEST(Philox, PiecesAreThe16BitsLowestFirst) {
  const Philox4 bits{{0x00010000, 0x00030002, 0x00050004, 0x00070006}};
  for (uint32_t j = 0; j < 8; ++j) EXPECT_EQ(Dropout::piece(bits, static_cast<int>(j)), j);
}

TEST(Philox, EveryArgumentMatters) {
  const Dropout base{.seed = 1ull << 40, .offset = 1ull << 33, .threshold = 0};
  const auto differs = [&](const Dropout& d, uint32_t batch_head, uint32_t row, uint32_t group) {
    const Philox4 a = base.bits(3, 4, 5), b = d.bits(batch_head, row, group);
    return a.word[0] != b.word[0] && a.word[3] != b.word[3];
  };
  EXPECT_TRUE(differs(base, 2, 4, 5) && differs(base, 3, 5, 5) && differs(base, 3, 4, 6));
  for (int shift : {0, 31, 32, 63}) {
    Dropout seed = base, offset = base;
    seed.seed ^= 1ull << shift;
    offset.offset ^= 1ull << shift;
    EXPECT_TRUE(differs(seed, 3, 4, 5) && differs(offset, 3, 4, 5)) << shift;
  }
}

}  // namespace
}  // namespace ffpa
