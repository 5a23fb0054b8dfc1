// What the kernels of dual-scale tiles need of AVX2: codes of 2 and 3 bits as bytes. The AVX-512
// level has the same functions.
#pragma once

#include "ops/attend/cpu/dual_codes.hpp"
#include "ops/attend/cpu/isa/avx2/code_vectors.hpp"

namespace kvx::ops::cpu {
inline namespace KVX_CPU_LEVEL {

// Bytes of four codes each, one of them: code J of every byte. high: of 3 bits, with code J's high
// bit at bit 2 J.
template <int Bits, int J>
KVX_INLINE __m256i spread_codes(__m256i low, __m256i high) {
  const __m256i two = _mm256_and_si256(_mm256_srli_epi16(low, 2 * J), _mm256_set1_epi8(3));
  if constexpr (Bits == 2) {
    return two;
  } else {
    const __m256i above =
        J == 0 ? _mm256_slli_epi16(high, 2) : _mm256_srli_epi16(high, J == 0 ? 0 : 2 * J - 2);
    return _mm256_or_si256(two, _mm256_and_si256(above, _mm256_set1_epi8(4)));
  }
}

// 64 codes of eight tokens as sixteen vectors of a key tile, in the order of order_dual_query.
// rows: [8], of each token the unit of 64 codes that begins at `offset`.
template <int Bits>
KVX_INLINE void spread_keys(const uint8_t* const* rows, int offset, uint8_t* tile) {
  const auto load_pair = [&](int i, int at, int end) {
    return _mm256_setr_m128i(load_chunk(rows[i], end, at), load_chunk(rows[i + 4], end, at));
  };
  __m256i r[4];  // r[i], lane l: token 4 l + i
  for (int i = 0; i < 4; ++i) r[i] = load_pair(i, offset, offset + 16);
  const __m256i a = _mm256_unpacklo_epi32(r[0], r[1]);
  const __m256i b = _mm256_unpacklo_epi32(r[2], r[3]);
  const __m256i c = _mm256_unpackhi_epi32(r[0], r[1]);
  const __m256i d = _mm256_unpackhi_epi32(r[2], r[3]);
  const __m256i words[4] = {_mm256_unpacklo_epi64(a, b), _mm256_unpackhi_epi64(a, b),
                            _mm256_unpacklo_epi64(c, d), _mm256_unpackhi_epi64(c, d)};
  __m256i high[4] = {};
  if constexpr (Bits == 3) {
    for (int i = 0; i < 4; ++i) r[i] = load_pair(i, offset + 16, offset + 24);
    const __m256i e = _mm256_unpacklo_epi32(r[0], r[1]);
    const __m256i f = _mm256_unpacklo_epi32(r[2], r[3]);
    high[0] = _mm256_unpacklo_epi64(e, f);
    high[1] = _mm256_unpackhi_epi64(e, f);
    high[2] = _mm256_srli_epi16(high[0], 1);
    high[3] = _mm256_srli_epi16(high[1], 1);
  }
  auto* out = reinterpret_cast<__m256i*>(tile);
  for (int w = 0; w < 4; ++w, out += 4) {
    _mm256_storeu_si256(out, spread_codes<Bits, 0>(words[w], high[w]));
    _mm256_storeu_si256(out + 1, spread_codes<Bits, 1>(words[w], high[w]));
    _mm256_storeu_si256(out + 2, spread_codes<Bits, 2>(words[w], high[w]));
    _mm256_storeu_si256(out + 3, spread_codes<Bits, 3>(words[w], high[w]));
  }
}

// Eight numbers of four tokens, from two bytes of each, `pair` of four tokens' bytes side by side.
KVX_INLINE __m256i bytes_of_numbers(__m128i four, int pair) {
  const __m256i index = _mm256_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1);
  return _mm256_permutevar8x32_epi32(_mm256_castsi128_si256(four),
                                     _mm256_add_epi32(index, _mm256_set1_epi32(2 * pair)));
}

// 64 codes of four tokens as a place of eight parts of a value tile.
template <int Bits>
KVX_INLINE void spread_values(const uint8_t* const* rows, int offset, int8_t* place) {
  const __m256i shifts = _mm256_setr_epi32(0, 2, 4, 6, 0, 2, 4, 6);
  __m128i low[4];
  __m128i high[4] = {};
  interleave_chunks(rows, offset + 16, offset, low);
  if constexpr (Bits == 3) {
    interleave_chunks(rows, offset + 24, offset + 16, high);
    high[2] = _mm_srli_epi16(high[0], 1);
    high[3] = _mm_srli_epi16(high[1], 1);
  }
  for (int part = 0; part < 8; ++part, place += kPartBytes) {
    __m256i codes = _mm256_and_si256(
        _mm256_srlv_epi32(bytes_of_numbers(low[part / 2], part % 2), shifts), _mm256_set1_epi8(3));
    if constexpr (Bits == 3) {
      const __m256i bits = _mm256_srlv_epi32(bytes_of_numbers(high[part / 2], part % 2), shifts);
      codes =
          _mm256_or_si256(codes, _mm256_slli_epi16(_mm256_and_si256(bits, _mm256_set1_epi8(1)), 2));
    }
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(place), codes);
  }
}

}  // namespace KVX_CPU_LEVEL
}  // namespace kvx::ops::cpu
