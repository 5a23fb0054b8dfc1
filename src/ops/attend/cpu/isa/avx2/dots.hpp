// Dot products of bytes with AVX2 alone: of pairs, then of words.
#pragma once

#include <immintrin.h>

#include "ops/attend/cpu/code_bytes.hpp"

namespace kvx::ops::cpu {
inline namespace KVX_CPU_LEVEL {

// Whether a codec's fixed-point numbers are words. add_dots needs sums of two products that fit in
// 16 bits: those of nibbles, at most 24 times a digit, do.
template <class Codec>
constexpr bool takes_words() {
  return !CodeBytes<Codec>::kIsNibble;
}

// sum += the products of four bytes a lane, the first operand's unsigned, the second's signed.
template <Operands>
KVX_INLINE Ints add_dots(Ints sum, Ints unsigned_bytes, Ints signed_bytes) {
  const __m256i pairs = _mm256_maddubs_epi16((__m256i)unsigned_bytes, (__m256i)signed_bytes);
  return sum + (Ints)_mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
}

// add_dots takes three instructions, and four sums of pairs share the last two: at most 4 * 255 *
// 15
// * 2 < 2^15.
inline constexpr bool kAddsFours = true;

}  // namespace KVX_CPU_LEVEL
}  // namespace kvx::ops::cpu
