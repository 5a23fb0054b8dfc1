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

}  // namespace KVX_CPU_LEVEL
}  // namespace kvx::ops::cpu
