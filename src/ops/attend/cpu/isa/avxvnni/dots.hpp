// Dot products of bytes with AVX-VNNI.
#pragma once

#include <immintrin.h>

#include "ops/attend/cpu/code_bytes.hpp"

namespace kvx::ops::cpu {
inline namespace KVX_CPU_LEVEL {

// Whether a codec's fixed-point numbers are words.
template <class Codec>
constexpr bool takes_words() {
  return false;
}

// sum += the products of four bytes a lane, the first operand's unsigned, the second's signed.
template <Operands>
KVX_INLINE Ints add_dots(Ints sum, Ints unsigned_bytes, Ints signed_bytes) {
  return (Ints)_mm256_dpbusd_avx_epi32((__m256i)sum, (__m256i)unsigned_bytes,
                                       (__m256i)signed_bytes);
}

// Whether add_four_dots is faster than four times add_dots.
inline constexpr bool kAddsFours = false;

}  // namespace KVX_CPU_LEVEL
}  // namespace kvx::ops::cpu
