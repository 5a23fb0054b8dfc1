// The steps of a tile with AVX2 and F16C.
#pragma once

#include <immintrin.h>

#include "ops/attend/cpu/step_loops.hpp"

namespace kvx::ops::cpu {
inline namespace KVX_CPU_LEVEL {

KVX_INLINE void decode_f16_steps(const uint32_t* bits, int n, float factor, float* steps) {
  for (int i = 0; i < n; i += 8) {
    const auto* eight = reinterpret_cast<const __m128i*>(bits + i);
    const __m128i halves = _mm_packus_epi32(_mm_loadu_si128(eight), _mm_loadu_si128(eight + 1));
    _mm256_storeu_ps(steps + i, _mm256_mul_ps(_mm256_cvtph_ps(halves), _mm256_set1_ps(factor)));
  }
}

// load_steps for rows that the level has an order of its own for: none.
KVX_INLINE bool load_sorted_steps(const PackedTile&, format::ScaleType, int, float, float*) {
  return false;
}

}  // namespace KVX_CPU_LEVEL
}  // namespace kvx::ops::cpu
