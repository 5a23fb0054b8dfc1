// Floats as two BF16 parts, in AVX-512 registers.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "ops/cpu/level.hpp"
#include "ops/cpu/vector_types.hpp"

namespace kvx::ops::cpu {
inline namespace KVX_CPU_LEVEL {

// The BF16 parts of 32 floats in their order.
struct Parts {
  __m512i high;
  __m512i low;
};

KVX_INLINE __m512i round_to_bf16(__m512 first, __m512 second) {
  return reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(second, first));
}

KVX_INLINE Parts parts_of(__m512 first, __m512 second) {
  const __m512i high = round_to_bf16(first, second);
  const __m512i first_high = _mm512_cvtepu16_epi32(_mm512_castsi512_si256(high));
  const __m512i second_high = _mm512_cvtepu16_epi32(_mm512_extracti64x4_epi64(high, 1));
  const auto rest_of = [](__m512 number, __m512i bits) {
    return _mm512_sub_ps(number, _mm512_castsi512_ps(_mm512_slli_epi32(bits, 16)));
  };
  return {high, round_to_bf16(rest_of(first, first_high), rest_of(second, second_high))};
}

// Watches whether all numbers have two parts, and whether any has a second one.
class PartsWatch {
 public:
  KVX_INLINE void see(__m512 first, __m512 second) {
    largest_ = _mm512_max_epu32(largest_, magnitude(first));
    largest_ = _mm512_max_epu32(largest_, magnitude(second));
  }
  KVX_INLINE void see_low(__m512i low) { low_ = _mm512_or_si512(low_, _mm512_slli_epi16(low, 1)); }

  bool all_have_parts() const {
    constexpr unsigned kTwoToThe127 = 0x7F000000;
    return _mm512_cmpgt_epu32_mask(largest_, _mm512_set1_epi32(kTwoToThe127)) == 0;
  }
  bool has_low_part() const { return _mm512_test_epi32_mask(low_, low_) != 0; }

 private:
  KVX_INLINE static __m512i magnitude(__m512 number) {
    return _mm512_and_si512(_mm512_castps_si512(number), _mm512_set1_epi32(0x7FFFFFFF));
  }

  __m512i largest_ = _mm512_setzero_si512();
  __m512i low_ = _mm512_setzero_si512();
};

}  // namespace KVX_CPU_LEVEL
}  // namespace kvx::ops::cpu
