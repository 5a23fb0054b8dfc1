// Lanes: short vectors of floats in the compilers' own vector types, and the two functions that
// attention needs of them, exp and tanh. Every function takes a vector or a single float: a loop's
// remainder is the same code with one lane.
#pragma once

#include <cstdint>
#include <utility>

#include "ops/cpu/vectors.hpp"

namespace kvx::ops::cpu {
inline namespace KVX_CPU_LEVEL {

// Rows are taken in parts of sixteen numbers, the same at every level.
inline constexpr int kPartNumbers = 16;
inline constexpr int kPartVectors = kPartNumbers / kLanes<Widest>;

template <class V>
KVX_INLINE V load(const float* source) {
  V lanes;
  __builtin_memcpy(&lanes, source, sizeof lanes);
  return lanes;
}

template <class V>
KVX_INLINE void store(const V& lanes, float* target) {
  __builtin_memcpy(target, &lanes, sizeof lanes);
}

template <class V>
KVX_INLINE V splat(float value) {
  return V{} + value;
}

// The sum and the largest of a vector's lanes, halves first.
template <class V, class Combine, int... Lane>
KVX_INLINE auto fold(const V& lanes, const Combine& combine,
                     std::integer_sequence<int, Lane...> first_half) {
  constexpr int kHalf = kLanes<V> / 2;
  if constexpr (kHalf == 2) {  // a vector of two lanes would pass through memory
    (void)first_half;
    return combine(combine(lanes[0], lanes[2]), combine(lanes[1], lanes[3]));
  } else {
    const auto low = __builtin_shufflevector(lanes, lanes, Lane...);
    const auto high = __builtin_shufflevector(lanes, lanes, (Lane + kHalf)...);
    return fold(combine(low, high), combine, std::make_integer_sequence<int, kHalf / 2>());
  }
}
template <class V>
KVX_INLINE float sum_of_lanes(const V& lanes) {
  return fold(
      lanes, [](const auto& a, const auto& b) { return a + b; },
      std::make_integer_sequence<int, kLanes<V> / 2>());
}
template <class V>
KVX_INLINE auto max_of_lanes(const V& lanes) {
  return fold(
      lanes, [](const auto& a, const auto& b) { return a > b ? a : b; },
      std::make_integer_sequence<int, kLanes<V> / 2>());
}

// Calls body.operator()<V>(i) for every full vector of [first, n), from the widest type down to
// single floats.
template <class V = Widest, class Body>
KVX_INLINE void for_lanes(int n, const Body& body, int first = 0) {
  int i = first;
  for (; i + kLanes<V> <= n; i += kLanes<V>) body.template operator()<V>(i);
  if constexpr (kLanes < V >> 1) for_lanes<typename LanesOf<V>::Narrower>(n, body, i);
}

// exp(x) for x <= 0, relative error below 2e-7; 0 below -87, where it would leave the normal
// floats. exp(x) = 2^n * exp(r) with |r| <= ln(2) / 2 and a polynomial fitted to exp(r) for small
// relative error.
template <class V>
KVX_INLINE V exp_of_negative(const V& x) {
  constexpr float kLowest = -87.0f;
  constexpr float kLog2E = 0x1.715476p0f;
  constexpr float kLn2High = 0x1.62E4p-1f;  // few bits: n * kLn2High is exact
  constexpr float kLn2Low = 0x1.7F7D1Cp-20f;
  constexpr float kMagic = 0x1.8p23f;  // adding it leaves the rounded integer in the low bits
  using Bits = typename LanesOf<V>::Bits;
  const V clamped = x < kLowest ? splat<V>(kLowest) : x;  // a NaN stays
  const V shifted = clamped * kLog2E + kMagic;
  const V n = shifted - kMagic;
  const V r = (clamped - n * kLn2High) - n * kLn2Low;
  V p = r * 0x1.6A2448p-10f + 0x1.1239D4p-7f;
  p = p * r + 0x1.5558F2p-5f;
  p = p * r + 0x1.555492p-3f;
  p = p * r + 0x1.FFFFFCp-2f;
  p = (p * r) * r + r + 1.0f;
  const Bits power = (__builtin_bit_cast(Bits, shifted) << 23) + 0x3F800000u;
  return x < kLowest ? splat<V>(0.0f) : p * __builtin_bit_cast(V, power);
}

// tanh(x), relative error below 3e-7: an odd polynomial near 0, (1 - e) / (1 + e) with e =
// exp(-2 |x|) elsewhere.
template <class V>
KVX_INLINE V tanh_of(const V& x) {
  const V zero = splat<V>(0.0f);
  const V magnitude = x < zero ? -x : x;
  const V u = x * x;
  V p = u * -0x1.75E1A8p-8f + 0x1.522692p-6f;
  p = p * u - 0x1.B83C58p-5f;
  p = p * u + 0x1.110726p-3f;
  p = p * u - 0x1.555532p-2f;
  const V near_zero = (p * u) * x + x;
  const V e = exp_of_negative<V>(magnitude * -2.0f);
  const V far = (1.0f - e) / (1.0f + e);
  return magnitude < 0.625f ? near_zero : (x < zero ? -far : far);
}

// One step of a transpose: lanes whose index has the bit `Step` swap with the lanes of the other
// row that lack it.
template <int Step, class V, int... Lane>
KVX_INLINE void swap_lanes(V& low, V& high, std::integer_sequence<int, Lane...>) {
  constexpr int kN = kLanes<V>;
  const V a = low;
  const V b = high;
  low = __builtin_shufflevector(a, b, ((Lane & Step) != 0 ? kN + Lane - Step : Lane)...);
  high = __builtin_shufflevector(a, b, ((Lane & Step) != 0 ? kN + Lane : Lane + Step)...);
}

template <int Step, class V>
KVX_INLINE void transpose_steps(V* rows) {
  constexpr int kN = kLanes<V>;
  if constexpr (Step < kN) {
    for (int i = 0; i < kN; ++i) {
      if ((i & Step) != 0) continue;
      swap_lanes<Step>(rows[i], rows[i + Step], std::make_integer_sequence<int, kN>());
    }
    transpose_steps<Step * 2>(rows);
  }
}

// Lane j of the result is all lanes of rows[j] folded, halves first. rows: [kLanes<V>], spent.
template <class V, class Combine, int Step = kLanes<V> / 2>
KVX_INLINE V fold_each(V* rows, const Combine& combine) {
  for (int i = 0; i < Step; ++i) {
    swap_lanes<Step>(rows[i], rows[i + Step], std::make_integer_sequence<int, kLanes<V>>());
    rows[i] = combine(rows[i], rows[i + Step]);
  }
  if constexpr (Step > 1) {
    return fold_each<V, Combine, Step / 2>(rows, combine);
  } else {
    return rows[0];
  }
}

}  // namespace KVX_CPU_LEVEL
}  // namespace kvx::ops::cpu
