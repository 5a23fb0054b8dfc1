// Chunks of sixteen bytes of a row in a register. AVX-512 has these instructions too, and its level
// includes this file.
#pragma once

#include <immintrin.h>

#include "ops/attend/cpu/code_chunks.hpp"

namespace kvx::ops::cpu {
inline namespace KVX_CPU_LEVEL {

// Sixteen bytes of a row, or the last eight. Requires: row_bytes is a multiple of 8.
KVX_INLINE __m128i load_chunk(const uint8_t* row, int row_bytes, int offset) {
  const auto* chunk = reinterpret_cast<const __m128i*>(row + offset);
  return offset + 16 <= row_bytes ? _mm_loadu_si128(chunk) : _mm_loadl_epi64(chunk);
}

// Whether one of n bytes, a multiple of 16, is `least` or more under a mask.
KVX_INLINE bool reaches(const uint8_t* bytes, int n, uint8_t mask, uint8_t least) {
  const __m128i least_of_all = _mm_set1_epi8(static_cast<char>(least));
  __m128i found = _mm_setzero_si128();
  for (int i = 0; i < n; i += 16) {
    const __m128i masked =
        _mm_and_si128(_mm_loadu_si128(reinterpret_cast<const __m128i*>(bytes + i)),
                      _mm_set1_epi8(static_cast<char>(mask)));
    found = _mm_or_si128(found, _mm_cmpeq_epi8(_mm_max_epu8(masked, least_of_all), masked));
  }
  return _mm_movemask_epi8(found) != 0;
}

}  // namespace KVX_CPU_LEVEL
}  // namespace kvx::ops::cpu
