// Codes of dual-scale formats as the tensor cores' path decodes them: words whose two halves hold
// the same number of codes become registers of two f16 numbers.
//
// A code at bits b and up of an f16 number that has nothing else is code * 2^(b - 24): up to 2^11
// of them, the subnormal numbers and the lowest exponent's are the multiples of 2^-24. So a mask is
// all that a code needs, and what it is multiplied by takes its power of two. Sums of products lose
// digits where codes lie low, as if tensor cores aligned by the exponent that all of these numbers
// have: so codes go to the highest bits that few shifts reach.
//
//   kHalfCodes    codes of half a word; register j has codes j of both halves
//   kFragments    fragments of sums that a chunk of values fills: 2 * kFragments = kHalfCodes
//   bit(j)        where register j's codes begin
//   unpack(...)   a word, of 3 bits with the word of its high bits: bit 2 j of a half is code j's
#pragma once

#include <bit>

#include "ops/attend/cuda/common/mma.cuh"

namespace kvx::ops::cuda {

// What a code of 1 at bit 0 is.
inline constexpr float kDualCodeUnit = 0x1p-24f;

__device__ constexpr uint32_t in_both_halves(uint32_t bits) {
  return bits << 16 | bits;
}
// Two of a number that f16 has.
__device__ constexpr uint32_t f16_twice(float x) {
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  return in_both_halves((bits >> 16 & 0x8000u) | ((bits >> 13 & 0x3FFFFu) - (112u << 10)));
}

template <int Bits>
struct DualCodes;

// 2^(Exponent + bit) of register 2 pair + which, in both halves: of four pairs, since a pair is a
// lane's number. The lower byte of a power of two is 0.
template <class Codes, int Exponent>
__device__ uint32_t powers_of(int pair, int which) {
  constexpr auto kUpperBytes = [](int of) {
    uint32_t bytes = 0;
    for (int p = 0; p < 4; ++p) {
      const int exponent = Exponent + Codes::bit((2 * p + of) % Codes::kHalfCodes);
      bytes |= static_cast<uint32_t>(15 + exponent) << (2 + 8 * p);
    }
    return bytes;
  };
  constexpr uint32_t kFirst = kUpperBytes(0), kSecond = kUpperBytes(1);
  const auto place = static_cast<uint32_t>(pair) * 0x1010u + 0x0404u;
  return __byte_perm(which == 0 ? kFirst : kSecond, 0, place);
}

template <>
struct DualCodes<2> {
  static constexpr int kHalfCodes = 8;
  static constexpr int kFragments = 4;
  // Shifted left by 4, as it is, and shifted right by 6.
  __device__ static constexpr int bit(int j) {
    constexpr uint32_t kBits = 0x86486864u;  // four a register: no table in memory
    return static_cast<int>(kBits >> (4 * j) & 15u);
  }
  __device__ static void unpack(uint32_t word, uint32_t (&r)[kHalfCodes]) {
    const uint32_t left = word << 4, right = word >> 6;
#pragma unroll
    for (int j = 0; j < kHalfCodes; ++j) {
      const uint32_t shifted = j < 3 ? left : j < 5 ? word : right;
      r[j] = shifted & in_both_halves(3u << bit(j));
    }
  }
};

template <>
struct DualCodes<3> {
  static constexpr int kHalfCodes = 8;
  static constexpr int kFragments = 4;
  // Codes of even and of odd numbers become words of their own, four bits a code: shifted left by
  // 4, as it is, and shifted right by 4.
  __device__ static constexpr int bit(int j) { return j < 2 ? 4 : 8; }
  __device__ static void unpack(uint32_t low, uint32_t high, uint32_t (&r)[kHalfCodes]) {
    const uint32_t words[2] = {merged(low, high << 2), merged(low >> 2, high)};
#pragma unroll
    for (int j = 0; j < kHalfCodes; ++j) {
      const uint32_t word = words[j % 2];
      const uint32_t shifted = j < 4 ? word << 4 : j < 6 ? word : word >> 4;
      r[j] = shifted & in_both_halves(7u << bit(j));
    }
  }

 private:
  __device__ static uint32_t merged(uint32_t low, uint32_t high) {
    constexpr uint32_t kLow = 0x33333333u;
    return (low & kLow) | (high & ~kLow);
  }
};

template <>
struct DualCodes<4> {
  static constexpr int kHalfCodes = 4;
  static constexpr int kFragments = 2;
  // Shifted left by 3 or right by 5.
  __device__ static constexpr int bit(int j) { return 3 + j % 2 * 4; }
  __device__ static void unpack(uint32_t word, uint32_t (&r)[kHalfCodes]) {
    const uint32_t words[2] = {word << 3, word >> 5};
#pragma unroll
    for (int j = 0; j < kHalfCodes; ++j) r[j] = words[j / 2] & in_both_halves(15u << bit(j));
  }
};

}  // namespace kvx::ops::cuda
