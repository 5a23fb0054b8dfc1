// encode against the exact definition: every f16 and bf16 input, and a sweep over binary32 that is
// 2^18 numbers by default and 2^26 with KVX_TEST_FULL=1 (./dev test --full).
#include <gtest/gtest.h>

#include <cstdlib>
#include <cstring>

#include "format/codec.hpp"
#include "format/scale.hpp"
#include "tests/format/exact_reference.hpp"

namespace kvx::format {
namespace {

using tests::ValueGrid;

struct Grids {
  ValueGrid e2m1 = tests::e2m1_grid();
  ValueGrid e4m3 = tests::e4m3_grid();
  ValueGrid e5m2 = tests::e5m2_grid();
};

template <class Codec>
bool is_nearest(const ValueGrid& grid, float x) {
  const uint32_t expected = tests::nearest_code(grid, x);
  const uint32_t found = Codec::encode(x);
  const bool round_trip_agrees =
      std::bit_cast<uint32_t>(Codec::rounded(x)) ==
      std::bit_cast<uint32_t>(Codec::decode(static_cast<uint8_t>(expected)));
  if (expected == found && round_trip_agrees) return true;
  ADD_FAILURE() << "encode(" << x << ", bits " << std::hex << std::bit_cast<uint32_t>(x) << ") is "
                << found << ", the nearest code is " << expected;
  return false;
}

template <class Codec>
bool is_nearest_integer(float x) {
  const int expected = tests::nearest_integer(x, static_cast<int>(Codec::kQmax));
  const auto found = Codec::decode(Codec::encode(x));
  if (found == static_cast<float>(expected) && Codec::rounded(x) == found) return true;
  ADD_FAILURE() << "encode(" << x << ") decodes to " << found << ", expected " << expected;
  return false;
}

// All element types. Stops a test at the first wrong number.
bool all_are_nearest(const Grids& grids, float x) {
  if (x != x) return true;  // NaN has no nearest number; encode_nonfinite has its own tests
  return is_nearest<E2M1Codec>(grids.e2m1, x) && is_nearest<E4M3Codec>(grids.e4m3, x) &&
         is_nearest<E5M2Codec>(grids.e5m2, x) && is_nearest_integer<Int8Codec>(x) &&
         is_nearest_integer<Int4Codec>(x);
}

TEST(ExactEncode, EveryF16InputGoesToTheNearestCode) {
  const Grids grids;
  for (uint32_t bits = 0; bits < 0x10000; ++bits) {
    ASSERT_TRUE(all_are_nearest(grids, f16_to_f32(static_cast<uint16_t>(bits))));
  }
}

TEST(ExactEncode, EveryBF16InputGoesToTheNearestCode) {
  const Grids grids;
  for (uint32_t bits = 0; bits < 0x10000; ++bits) {
    ASSERT_TRUE(all_are_nearest(grids, bf16_to_f32(static_cast<uint16_t>(bits))));
  }
}

bool wants_full_sweep() {
  const char* full = std::getenv("KVX_TEST_FULL");
  return full != nullptr && strcmp(full, "1") == 0;
}

// Binary32 from 2^-20 to 2^20, both signs, evenly in bits: the whole range where codes change.
TEST(ExactEncode, ASweepOfF32InputsGoesToTheNearestCode) {
  const Grids grids;
  const uint32_t first = std::bit_cast<uint32_t>(0x1p-20f);
  const uint32_t last = std::bit_cast<uint32_t>(0x1p20f);
  const uint32_t count = wants_full_sweep() ? 1u << 25 : 1u << 17;  // of each sign
  const uint32_t stride = (last - first) / count;
  ASSERT_GT(stride, 0u);
  for (uint32_t i = 0; i <= count; ++i) {
    const float x = std::bit_cast<float>(first + i * stride + i % stride);
    ASSERT_TRUE(all_are_nearest(grids, x));
    ASSERT_TRUE(all_are_nearest(grids, -x));
  }
}

TEST(ExactEncode, MiddlesAndTheirNeighboursGoToTheNearestCode) {
  const Grids grids;
  for (const ValueGrid* grid : {&grids.e2m1, &grids.e4m3, &grids.e5m2}) {
    for (size_t i = 0; i + 1 < grid->values.size(); ++i) {
      const auto middle = static_cast<float>((grid->values[i] + grid->values[i + 1]) / 2);
      for (const float x : {std::nextafter(middle, 0.0f), middle, std::nextafter(middle, 1e9f)}) {
        ASSERT_TRUE(all_are_nearest(grids, x));
        ASSERT_TRUE(all_are_nearest(grids, -x));
      }
    }
  }
}

// The nearest f16 or bf16 of a finite number by comparing doubles, overflow to infinity.
uint16_t nearest_16_bit(float x, int mantissa_bits, int bias) {
  const int exponent_bits = 15 - mantissa_bits;
  const int emax = (1 << exponent_bits) - 2 - bias;
  const double magnitude = std::fabs(static_cast<double>(x));
  int exponent = magnitude == 0 ? 1 - bias : std::ilogb(magnitude);
  exponent = std::max(exponent, 1 - bias);
  const double ulp = std::ldexp(1.0, exponent - mantissa_bits);
  const double steps = std::nearbyint(magnitude / ulp);  // exact: a division by a power of two
  const double value = steps * ulp;
  const uint16_t sign = std::signbit(x) ? 0x8000 : 0;
  const double limit = std::ldexp(2.0, emax);
  if (value >= limit)
    return static_cast<uint16_t>(sign | (((1 << exponent_bits) - 1) << mantissa_bits));
  const int biased = exponent + bias;
  const int code = static_cast<int>(steps) + ((biased - 1) << mantissa_bits);
  return static_cast<uint16_t>(sign | code);
}

TEST(ExactEncode, SixteenBitFloatsAreTheNearestOverASweepOfF32) {
  const uint64_t stride = wants_full_sweep() ? 61 : 16381;  // 2^26 numbers, or 2^18
  for (uint64_t full_precision = 0; full_precision < 0xFF800000u; full_precision += stride) {
    const float x = std::bit_cast<float>(static_cast<uint32_t>(full_precision));
    if (!std::isfinite(x)) continue;
    ASSERT_EQ(f32_to_f16(x), nearest_16_bit(x, 10, 15)) << x;
    ASSERT_EQ(f32_to_bf16(x), nearest_16_bit(x, 7, 127)) << x;
  }
}

// The smallest e with amax <= 6 * 2^e, over all exponents, where ceilf(log2f(amax / 6)) is
// wrong for some.
TEST(ExactEncode, TheCeilRuleIsTheSmallestPowerThatClipsNothing) {
  const uint32_t stride = wants_full_sweep() ? 31 : 8191;
  for (uint32_t bits = 1; bits < 0x7F800000u; bits += stride) {
    const double amax = std::bit_cast<float>(bits);
    int e = -127;
    const int guess = amax > 0 ? std::ilogb(amax) - 4 : -127;
    if (guess > e) e = guess;
    while (e < 127 && amax > std::ldexp(6.0, e)) ++e;
    const StoredScale stored = e8m0_scale(ScaleRule::kE8M0Ceil, static_cast<float>(amax));
    ASSERT_EQ(static_cast<int>(stored.bits), e + 127) << amax;
    ASSERT_NE(stored.bits, 255u) << "255 is NaN";
  }
}

TEST(ExactEncode, TheFloorRuleIsOcpsSharedExponent) {
  for (uint32_t bits = 1; bits < 0x7F800000u; bits += 8191) {
    const float amax = std::bit_cast<float>(bits);
    const int e = std::clamp(std::ilogb(amax) - 2, -127, 127);
    ASSERT_EQ(static_cast<int>(e8m0_scale(ScaleRule::kE8M0Floor, amax).bits), e + 127) << amax;
  }
}

}  // namespace
}  // namespace kvx::format
