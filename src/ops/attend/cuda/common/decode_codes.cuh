// Element types as the tensor cores' path decodes them: a 32-bit word of codes into registers of
// two 16-bit numbers. What a register's two numbers are (neighbours in a row, or one channel of two
// tokens) is the business of tile_keys.cuh and tile_values.cuh.
//
//   kBits       of a code
//   Mma         the tensor cores' type that holds every code exactly
//   kUnit       a decoded number is the code's value divided by this
//   for_values  (8 bits) a word b0 b1 b2 b3 into (b0, b2), (b1, b3)
//               (4 bits) a word of halves l, h into (l0, h0), (l1, h1), (l2, h2), (l3, h3)
//   for_keys    (8 bits) a word b0 b1 b2 b3 into (b0, b1), (b2, b3)
//               (4 bits) a word into pairs; register j has the nibbles that key_pair(j) names
//
// Codes without a sign come as values less kMiddle, the middle of what they can be: a sum over
// large positive numbers that their rows' zeros take away again would lose digits.
//
// Integers as keys keep the offset that the exponent trick leaves: the queries know what it adds to
// a score, and the sum begins with minus that.
//   kHasKeyOffset  whether there is one
//   key_offset     what register j of for_keys has beside the code, times key_factor
//   key_factor     what multiplies the queries that meet register j
#pragma once

#include "format/interleaved_order.hpp"
#include "ops/attend/cuda/common/mma.cuh"

namespace kvx::ops::cuda {

struct Four {
  uint32_t r[4];
};

struct TileBf16 {
  static constexpr int kBits = 16;
  using Mma = MmaBf16;
  static constexpr float kUnit = 1.0f;
  static constexpr bool kHasKeyOffset = false;
};
struct TileF16 {
  static constexpr int kBits = 16;
  using Mma = MmaF16;
  static constexpr float kUnit = 1.0f;
  static constexpr bool kHasKeyOffset = false;
};

struct TileE4M3 {
  static constexpr int kBits = 8;
  using Mma = MmaF16;
  static constexpr float kUnit = 1.0f;
  static constexpr bool kHasKeyOffset = false;
  __device__ static Two for_keys(uint32_t w) { return e4m3x4_to_f16x2(w); }
  __device__ static Two for_values(uint32_t w) { return for_keys(__byte_perm(w, 0, 0x3120)); }
};

// E5M2 is the upper half of f16.
struct TileE5M2 {
  static constexpr int kBits = 8;
  using Mma = MmaF16;
  static constexpr float kUnit = 1.0f;
  static constexpr bool kHasKeyOffset = false;
  __device__ static Two for_keys(uint32_t w) {
    return {__byte_perm(w, 0, 0x1404), __byte_perm(w, 0, 0x3424)};
  }
  __device__ static Two for_values(uint32_t w) {
    return {__byte_perm(w, 0, 0x2404), __byte_perm(w, 0, 0x3414)};
  }
};

// 0x6400 | u is 1024 + u in f16. Flip: what makes a code with a sign unsigned.
template <uint32_t Flip>
struct TileInteger8 {
  static constexpr int kBits = 8;
  using Mma = MmaF16;
  static constexpr float kUnit = 1.0f;
  static constexpr float kMiddle = Flip != 0 ? 0.0f : 128.0f;
  static constexpr bool kHasKeyOffset = true;
  __device__ static float key_offset(int) { return Flip != 0 ? 1024.0f + 128.0f : 1024.0f; }
  __device__ static float key_factor(int) { return 1.0f; }
  __device__ static Two for_keys(uint32_t w) {
    return {raised(w ^ Flip, 0x4140), raised(w ^ Flip, 0x4342)};
  }
  __device__ static Two for_values(uint32_t w) {
    constexpr uint32_t kMinus1152 = 0xE480E480u;  // 1024 + 128
    return {add_f16x2(raised(w ^ Flip, 0x4240), kMinus1152),
            add_f16x2(raised(w ^ Flip, 0x4341), kMinus1152)};
  }

 private:
  __device__ static uint32_t raised(uint32_t w, uint32_t bytes) {
    return __byte_perm(w, 0x64646464u, bytes);
  }
};
using TileInt8 = TileInteger8<0x80808080u>;
using TileUInt8 = TileInteger8<0u>;

// As above; the second nibble of a byte lies four bits higher and counts 16 times.
template <uint32_t Flip>
struct TileInteger4 {
  static constexpr int kBits = 4;
  using Mma = MmaF16;
  static constexpr float kUnit = 1.0f;
  static constexpr float kMiddle = Flip != 0 ? 0.0f : 8.0f;
  static constexpr bool kHasKeyOffset = true;
  // Odd registers are 1024 + 16 u, and meet a sixteenth of the query.
  __device__ static float key_factor(int j) { return j % 2 == 0 ? 1.0f : 0.0625f; }
  __device__ static float key_offset(int j) {
    constexpr float kZero = Flip != 0 ? 8.0f : 0.0f;  // u of code 0
    return 1024.0f + (j % 2 == 0 ? kZero : 16.0f * kZero);
  }
  __device__ static int2 key_pair(int j) { return {j, j + 4}; }
  __device__ static Four for_keys(uint32_t w) {
    const uint32_t h = w >> 8;
    return {and_xor(w, 0x000F000Fu, kLow), and_xor(w, 0x00F000F0u, kHigh),
            and_xor(h, 0x000F000Fu, kLow), and_xor(h, 0x00F000F0u, kHigh)};
  }
  __device__ static Four for_values(uint32_t w) {
    constexpr uint32_t kSixteenth = 0x2C002C00u;
    constexpr uint32_t kMinus1032 = 0xE408E408u, kMinus72 = 0xD480D480u;  // 1024 + 8, 64 + 8
    const Four x = for_keys(w);
    return {add_f16x2(x.r[0], kMinus1032), fma_f16x2(x.r[1], kSixteenth, kMinus72),
            add_f16x2(x.r[2], kMinus1032), fma_f16x2(x.r[3], kSixteenth, kMinus72)};
  }

 private:
  static constexpr uint32_t kLow = 0x64006400u ^ (Flip & 0x000F000Fu);
  static constexpr uint32_t kHigh = 0x64006400u ^ (Flip & 0x00F000F0u);
};
using TileInt4 = TileInteger4<0x88888888u>;
using TileUInt4 = TileInteger4<0u>;

// E2M1's sign, exponent and mantissa at E4M3's: the value times 2^-6, which the instruction for
// E4M3 turns into f16. Cheaper than placing the bits in f16, which takes a shift and a mask a
// number more.
struct TileE2M1 {
  static constexpr int kBits = 4;
  using Mma = MmaF16;
  static constexpr float kUnit = 64.0f;
  static constexpr bool kHasKeyOffset = false;
  __device__ static int2 key_pair(int j) {
    const int first = j / 2 + j % 2 * 4;
    return {first, first + 2};
  }
  __device__ static Four for_keys(uint32_t w) {
    const Two even = e4m3x4_to_f16x2(even_nibbles(w)), odd = e4m3x4_to_f16x2(odd_nibbles(w));
    return {even.a, even.b, odd.a, odd.b};
  }
  __device__ static Four for_values(uint32_t w) {
    const uint32_t x = __byte_perm(w, 0, 0x3120);
    const Two even = e4m3x4_to_f16x2(even_nibbles(x)), odd = e4m3x4_to_f16x2(odd_nibbles(x));
    return {even.a, odd.a, even.b, odd.b};
  }

 private:
  static constexpr uint32_t kMagnitude = 0x1C1C1C1Cu;
  static constexpr uint32_t kSign = 0x80808080u;
  // As E4M3, a byte each.
  __device__ static uint32_t even_nibbles(uint32_t w) {
    return and_or(w << 2, kMagnitude, (w << 4) & kSign);
  }
  __device__ static uint32_t odd_nibbles(uint32_t w) {
    return and_or(w >> 2, kMagnitude, w & kSign);
  }
};

// E2M1 in interleaved order (format/interleaved.hpp): fewer instructions than nibbles take, and
// more of them for the pipe that products have. Keys begin with the codes that take the fewest.
struct TileE2M1Interleaved {
  static constexpr int kBits = 4;
  using Mma = MmaF16;
  static constexpr float kUnit = 16384.0f;
  static constexpr bool kHasKeyOffset = false;
  __device__ static int2 key_pair(int j) { return {3 - j, 7 - j}; }
  __device__ static Four for_keys(uint32_t w) {
    return {format::f16x2_from_interleaved<3>(w), format::f16x2_from_interleaved<2>(w),
            format::f16x2_from_interleaved<1>(w), format::f16x2_from_interleaved<0>(w)};
  }
  __device__ static Four for_values(uint32_t w) {
    return {format::f16x2_from_interleaved<0>(w), format::f16x2_from_interleaved<1>(w),
            format::f16x2_from_interleaved<2>(w), format::f16x2_from_interleaved<3>(w)};
  }
};

// Where E2M1 has an instruction, the scales of nvfp4 take it: theirs and the numbers' product lies
// in f16's range. E8M0 scales need the room that TileE2M1's unit gives them.
#if KVX_HAS_E2M1_CONVERSION
struct TileE2M1UnderE4M3 {
  static constexpr int kBits = 4;
  using Mma = MmaF16;
  static constexpr float kUnit = 1.0f;
  static constexpr bool kHasKeyOffset = false;
  __device__ static int2 key_pair(int j) { return {2 * j, 2 * j + 1}; }
  __device__ static Four for_keys(uint32_t w) {
    Four x;
    e2m1x8_to_f16x2(w, x.r);
    return x;
  }
  // A byte of each pair: the lower half's code, then the upper half's.
  __device__ static Four for_values(uint32_t w) {
    const uint32_t even = and_or(w, 0x00000F0Fu, w >> 12 & 0x0000F0F0u);      // pairs 0 and 2
    const uint32_t odd = and_or(w >> 4, 0x00000F0Fu, w >> 16 & 0x0000F0F0u);  // 1 and 3
    return for_keys(__byte_perm(even, odd, 0x5140));
  }
};
#else
using TileE2M1UnderE4M3 = TileE2M1;
#endif

}  // namespace kvx::ops::cuda
