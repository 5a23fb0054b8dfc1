// Encoding by definition: the nearest of all values of a type, found by comparing exact distances.
// Written from docs/numbers.md without looking at src/format, which it judges.
#pragma once

#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

namespace kvx::tests {

// A type's non-negative values in the order of their codes; the sign is one more bit above.
struct ValueGrid {
  std::vector<double> values;  // of code 0, 1, 2, ...
  uint32_t sign_bit;
};

// Every code below `count` of a float with this many mantissa bits and this bias.
inline ValueGrid float_grid(int mantissa_bits, int bias, int count, uint32_t sign_bit) {
  ValueGrid grid{{}, sign_bit};
  for (int code = 0; code < count; ++code) {
    const int exponent = code >> mantissa_bits;
    const int mantissa = code & ((1 << mantissa_bits) - 1);
    const double significand =
        exponent == 0 ? mantissa : mantissa + static_cast<double>(1 << mantissa_bits);
    const int power = (exponent == 0 ? 1 : exponent) - bias - mantissa_bits;
    grid.values.push_back(std::ldexp(significand, power));
  }
  return grid;
}

inline ValueGrid e2m1_grid() {
  return float_grid(1, 1, 8, 0x8);
}
inline ValueGrid e4m3_grid() {
  return float_grid(3, 7, 127, 0x80);
}  // 127 is NaN
inline ValueGrid e5m2_grid() {
  return float_grid(2, 15, 124, 0x80);
}  // 124 is infinity

// The nearest code; a tie goes to the even one; beyond the last, the last. Doubles hold binary32
// and its distances to these grids exactly where it matters: the two neighbours are found by
// comparison, and their middle has at most 25 significant bits.
inline uint32_t nearest_code(const ValueGrid& grid, double x) {
  const double magnitude = std::fabs(x);
  const uint32_t sign = std::signbit(x) ? grid.sign_bit : 0;
  uint32_t above = 0;
  while (above < grid.values.size() && grid.values[above] < magnitude) ++above;
  if (above == 0) return sign;
  if (above == grid.values.size()) return sign | (above - 1);
  const double middle = (grid.values[above - 1] + grid.values[above]) / 2;
  if (magnitude < middle) return sign | (above - 1);
  if (magnitude > middle) return sign | above;
  return sign | (above % 2 == 0 ? above : above - 1);
}

// Round half to even, clamp to [-most, most], as an integer.
inline int nearest_integer(double x, int most) {
  const double magnitude = std::fabs(x);
  if (magnitude >= most) return std::signbit(x) ? -most : most;
  const double below = std::floor(magnitude);
  const double rest = magnitude - below;
  const bool goes_up = rest > 0.5 || (rest == 0.5 && std::fmod(below, 2) == 1);
  const int rounded = static_cast<int>(below) + (goes_up ? 1 : 0);
  return std::signbit(x) ? -rounded : rounded;
}

}  // namespace kvx::tests
