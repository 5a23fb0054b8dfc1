// Parts of sixteen floats of 16 and 8 bits with AVX-512. The other levels have the same functions.
#pragma once

#include <immintrin.h>

#include "ops/cpu/lanes.hpp"

namespace kvx::ops::cpu {
inline namespace KVX_CPU_LEVEL {

KVX_INLINE void widen_halves(__m256i halves, Widest* part) {
  *part = __builtin_bit_cast(Widest, _mm512_cvtph_ps(halves));
}

KVX_INLINE void widen_bf16_part(const uint8_t* numbers, Widest* part) {
  const __m256i shorts = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(numbers));
  *part = __builtin_bit_cast(Widest, _mm512_slli_epi32(_mm512_cvtepu16_epi32(shorts), 16));
}

KVX_INLINE void widen_f16_part(const uint8_t* numbers, Widest* part) {
  widen_halves(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(numbers)), part);
}

KVX_INLINE void widen_e5m2_part(const uint8_t* numbers, Widest* part) {
  const __m128i codes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(numbers));
  widen_halves(_mm256_slli_epi16(_mm256_cvtepu8_epi16(codes), 8), part);
}

KVX_INLINE void widen_e4m3_part(const uint8_t* numbers, Widest* part) {
  const __m128i codes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(numbers));
  const __m256i shifted = _mm256_slli_epi16(_mm256_cvtepi8_epi16(codes), 7);
  widen_halves(_mm256_and_si256(shifted, _mm256_set1_epi16(static_cast<short>(0xBFFF))), part);
}

}  // namespace KVX_CPU_LEVEL
}  // namespace kvx::ops::cpu
