// Codes of dual-scale formats as the tensor cores' path decodes them: words whose two halves hold
// the same number of codes become registers of two f16 numbers.
//
// A code that is moved to bits b and up of an f16 mantissa, below the exponent of 2^(10 - b), is
// the number 2^(10 - b) + code: no conversion, and one base a register, which the sums take away
// again. Codes go to the highest bits that few shifts reach, so that bases stay small beside them.
//
//   kHalfCodes    codes of half a word; register j has codes j of both halves
//   kFragments    fragments of sums that a chunk of values fills: 2 * kFragments = kHalfCodes
//   bit(j)        where register j's codes begin, which decides its base
//   unpack(...)   a word, of 3 bits with the word of its high bits: bit 2 j of a half is code j's
#pragma once

#include <bit>

#include "ops/attend/cuda/common/mma.cuh"

namespace kvx::ops::cuda {

// The mask and the exponent of codes at bits `bit` and up of both halves.
__device__ constexpr uint32_t in_both_halves(uint32_t bits) {
  return bits << 16 | bits;
}
__device__ constexpr uint32_t exponent_of_base(int bit) {
  return in_both_halves(static_cast<uint32_t>(15 + 10 - bit) << 10);
}
// Two of a number that f16 has.
__device__ constexpr uint32_t f16_twice(float x) {
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  return in_both_halves((bits >> 16 & 0x8000u) | ((bits >> 13 & 0x3FFFFu) - (112u << 10)));
}

template <int Bits>
struct DualCodes;

// The bases of register 2 pair + which, in both halves: of four pairs, since a pair is a lane's
// number. They are powers of two, whose lower byte is 0.
template <class Codes>
__device__ uint32_t bases_of(int pair, int which) {
  constexpr auto kUpperBytes = [](int of) {
    uint32_t bytes = 0;
    for (int p = 0; p < 4; ++p) {
      bytes |= (exponent_of_base(Codes::bit((2 * p + of) % Codes::kHalfCodes)) >> 24) << (8 * p);
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
      r[j] = and_or(shifted, in_both_halves(3u << bit(j)), exponent_of_base(bit(j)));
    }
  }
};

template <>
struct DualCodes<3> {
  static constexpr int kHalfCodes = 8;
  static constexpr int kFragments = 4;
  // Low bits shifted left by 1 or right by 7; the high bit goes right above them.
  __device__ static constexpr int bit(int j) { return 1 + j % 4 * 2; }
  __device__ static void unpack(uint32_t low, uint32_t high, uint32_t (&r)[kHalfCodes]) {
    const uint32_t lows[2] = {low << 1, low >> 7};
    const uint32_t highs[2] = {high << 3, high >> 5};
#pragma unroll
    for (int j = 0; j < kHalfCodes; ++j) {
      r[j] = merged(lows[j / 4], highs[j / 4], bit(j));
    }
  }

 protected:
  __device__ static uint32_t merged(uint32_t low, uint32_t high, int bit) {
    const uint32_t upper = and_or(high, in_both_halves(4u << bit), exponent_of_base(bit));
    return and_or(low, in_both_halves(3u << bit), upper);
  }
};

template <>
struct DualCodes<4> {
  static constexpr int kHalfCodes = 4;
  static constexpr int kFragments = 2;
  // Shifted left by 2 or right by 6.
  __device__ static constexpr int bit(int j) { return j % 2 == 0 ? 2 : 6; }
  __device__ static void unpack(uint32_t word, uint32_t (&r)[kHalfCodes]) {
    const uint32_t shifted[2] = {word << 2, word >> 6};
#pragma unroll
    for (int j = 0; j < kHalfCodes; ++j) {
      r[j] = and_or(shifted[j / 2], in_both_halves(15u << bit(j)), exponent_of_base(bit(j)));
    }
  }
};

// As values take them. A base is in sums of weights over a stage, where what the tensor cores round
// away is no token's alone: it adds up. So 3 bits take four shifts more.
template <int Bits>
struct DualValueCodes : DualCodes<Bits> {};
template <>
struct DualValueCodes<3> : DualCodes<3> {
  __device__ static constexpr int bit(int j) { return j % 4 < 3 ? 3 + j % 4 * 2 : 7; }
  __device__ static void unpack(uint32_t low, uint32_t high, uint32_t (&r)[kHalfCodes]) {
    const uint32_t lows[4] = {low << 3, low << 1, low >> 5, low >> 7};
    const uint32_t highs[4] = {high << 5, high << 3, high >> 3, high >> 5};
#pragma unroll
    for (int j = 0; j < kHalfCodes; ++j) {
      const int from = j / 4 * 2 + j % 4 / 3;
      r[j] = merged(lows[from], highs[from], bit(j));
    }
  }
};

}  // namespace kvx::ops::cuda
