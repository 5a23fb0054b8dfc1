// Sixteen codes as bytes of one register, and how they become a row's packed bytes. AVX-512 has
// these instructions too, and its level includes this file.
#pragma once

#include <immintrin.h>

#include "format/packing.hpp"
#include "ops/cpu/level.hpp"

namespace kvx::ops::cpu {
inline namespace KVX_CPU_LEVEL {

// Whether a product of bytes takes an unsigned one and a signed one.
inline constexpr bool kProductsMixSigns = true;

using PartBytes = __m128i;

KVX_INLINE PartBytes zero_codes() {
  return _mm_setzero_si128();
}

// Puts TurboMind's pairs among sixteen codes side by side, so that neighbours share a byte.
KVX_INLINE __m128i turbomind_order() {
  alignas(16) int8_t order[16];
  for (int byte = 0; byte < 8; ++byte) {
    const int first = byte / 4 * 8 + format::turbomind_first(byte % 4);
    order[2 * byte] = static_cast<int8_t>(first);
    order[2 * byte + 1] = static_cast<int8_t>(first + 2);
  }
  return _mm_load_si128(reinterpret_cast<const __m128i*>(order));
}

// Packs sixteen codes that are neighbours in order: the first of a pair in the low half of a byte.
KVX_INLINE void store_nibbles_of_part(PartBytes codes, uint8_t* target) {
  const __m128i pairs = _mm_and_si128(codes, _mm_set1_epi8(15));
  const __m128i nibbles = _mm_maddubs_epi16(pairs, _mm_set1_epi16(0x1001));  // low + 16 * high
  _mm_storel_epi64(reinterpret_cast<__m128i*>(target), _mm_packus_epi16(nibbles, nibbles));
}

// Stores sixteen codes, one a byte, as numbers [number, number + 16) of a row.
template <format::Packing P>
KVX_INLINE void store_codes(PartBytes codes, int number, uint8_t* row) {
  using format::Packing;
  if constexpr (P == Packing::kBytes) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(row + number), codes);
  } else if constexpr (P == Packing::kTurboMind) {
    store_nibbles_of_part(_mm_shuffle_epi8(codes, turbomind_order()), row + number / 2);
  } else if constexpr (P == Packing::kNibbles || P == Packing::kWords) {
    store_nibbles_of_part(codes, row + number / 2);
  } else {
    static_assert(format::kHasNoBranch<P>, "store_codes has no branch for this packing");
  }
}

}  // namespace KVX_CPU_LEVEL
}  // namespace kvx::ops::cpu
