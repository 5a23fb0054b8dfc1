// Parts of sixteen floats of 16 and 8 bits with AVX2 and F16C. The other levels have the same
// functions.
#pragma once

#include <immintrin.h>

#include "ops/cpu/lanes.hpp"

namespace kvx::ops::cpu {
inline namespace KVX_CPU_LEVEL {

KVX_INLINE __m128i load_sixteen_bytes(const uint8_t* bytes) {
  return _mm_loadu_si128(reinterpret_cast<const __m128i*>(bytes));
}

KVX_INLINE Widest widen_halves(__m128i halves) {
  return __builtin_bit_cast(Widest, _mm256_cvtph_ps(halves));
}

KVX_INLINE void widen_bf16_part(const uint8_t* numbers, Widest* part) {
  for (int v = 0; v < 2; ++v) {
    const __m256i words = _mm256_cvtepu16_epi32(load_sixteen_bytes(numbers + 16 * v));
    part[v] = __builtin_bit_cast(Widest, _mm256_slli_epi32(words, 16));
  }
}

KVX_INLINE void widen_f16_part(const uint8_t* numbers, Widest* part) {
  for (int v = 0; v < 2; ++v) part[v] = widen_halves(load_sixteen_bytes(numbers + 16 * v));
}

KVX_INLINE void widen_e5m2_part(const uint8_t* numbers, Widest* part) {
  const __m128i codes = load_sixteen_bytes(numbers);
  const __m128i zeros = _mm_setzero_si128();
  part[0] = widen_halves(_mm_unpacklo_epi8(zeros, codes));
  part[1] = widen_halves(_mm_unpackhi_epi8(zeros, codes));
}

KVX_INLINE void widen_e4m3_part(const uint8_t* numbers, Widest* part) {
  const __m256i codes = _mm256_cvtepi8_epi16(load_sixteen_bytes(numbers));
  const __m256i halves =
      _mm256_and_si256(_mm256_slli_epi16(codes, 7), _mm256_set1_epi16(static_cast<short>(0xBFFF)));
  part[0] = widen_halves(_mm256_castsi256_si128(halves));
  part[1] = widen_halves(_mm256_extracti128_si256(halves, 1));
}

}  // namespace KVX_CPU_LEVEL
}  // namespace kvx::ops::cpu
