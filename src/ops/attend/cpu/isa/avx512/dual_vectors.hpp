// What the kernels of dual-scale tiles need of AVX-512: codes of 2 and 3 bits as bytes. The AVX2
// level has the same functions.
#pragma once

#include "ops/attend/cpu/dual_codes.hpp"
#include "ops/attend/cpu/isa/avx512/code_vectors.hpp"

namespace kvx::ops::cpu {
inline namespace KVX_CPU_LEVEL {

// Bytes of four codes at bits 0 to 7, one of them each: code j of every byte. high: of 3 bits, with
// code j's high bit at bit 2 j.
template <int Bits, int J>
KVX_INLINE __m512i spread_codes(__m512i low, __m512i high) {
  const __m512i two = J == 0 ? low : _mm512_srli_epi16(low, 2 * J);
  if constexpr (Bits == 2) {
    return _mm512_and_si512(two, _mm512_set1_epi8(3));
  } else {
    const __m512i above = J == 0   ? _mm512_slli_epi16(high, 2)
                          : J == 1 ? high
                                   : _mm512_srli_epi16(high, 2 * J - 2);
    constexpr int kSelect = 0xCA;  // a ? b : c
    const __m512i code = _mm512_ternarylogic_epi32(_mm512_set1_epi8(3), two, above, kSelect);
    return _mm512_and_si512(code, _mm512_set1_epi8(7));
  }
}
template <int Bits>
KVX_INLINE void spread_four(__m512i low, __m512i high, __m512i* codes) {
  codes[0] = spread_codes<Bits, 0>(low, high);
  codes[1] = spread_codes<Bits, 1>(low, high);
  codes[2] = spread_codes<Bits, 2>(low, high);
  codes[3] = spread_codes<Bits, 3>(low, high);
}

// 64 codes of sixteen tokens as sixteen vectors of a key tile, in the order of order_dual_query.
// rows: [16], of each token the unit of 64 codes that begins at `offset`.
template <int Bits>
KVX_INLINE void spread_keys(const uint8_t* const* rows, int offset, uint8_t* tile) {
  __asm__("" : "+r"(rows));  // as load_keys
  __m512i r[4];
  for (int i = 0; i < 4; ++i) r[i] = load_chunks(rows + i, 4, offset + 16, offset);
  const __m512i a = _mm512_unpacklo_epi32(r[0], r[1]);
  const __m512i b = _mm512_unpacklo_epi32(r[2], r[3]);
  const __m512i c = _mm512_unpackhi_epi32(r[0], r[1]);
  const __m512i d = _mm512_unpackhi_epi32(r[2], r[3]);
  const __m512i words[4] = {_mm512_unpacklo_epi64(a, b), _mm512_unpackhi_epi64(a, b),
                            _mm512_unpacklo_epi64(c, d), _mm512_unpackhi_epi64(c, d)};
  __m512i high[4] = {};
  if constexpr (Bits == 3) {
    for (int i = 0; i < 4; ++i) {
      r[i] = load_chunks(rows + i, 4, offset + 24, offset + 16);
    }
    const __m512i e = _mm512_unpacklo_epi32(r[0], r[1]);
    const __m512i f = _mm512_unpacklo_epi32(r[2], r[3]);
    high[0] = _mm512_unpacklo_epi64(e, f);
    high[1] = _mm512_unpackhi_epi64(e, f);
    high[2] = _mm512_srli_epi16(high[0], 1);
    high[3] = _mm512_srli_epi16(high[1], 1);
  }
  for (int w = 0; w < 4; ++w) {
    __m512i codes[4];
    spread_four<Bits>(words[w], high[w], codes);
    for (int j = 0; j < 4; ++j) {
      _mm512_storeu_si512(tile + (4 * w + j) * 64, codes[j]);
    }
  }
}

// Where the sixteen numbers of part `part` of a unit have their low bits among four tokens' chunks,
// one a lane: [16 numbers x 4 tokens] bytes, of each the byte.
constexpr Table<uint8_t, 64> dual_low_index(int part) {
  Table<uint8_t, 64> index = {};
  for (int i = 0; i < 64; ++i) {
    index.at[i] = static_cast<uint8_t>(i % 4 * 16 + (16 * part + i / 4) / 4);
  }
  return index;
}
// The same of their high bits, in the eight bytes behind.
constexpr Table<uint8_t, 64> dual_high_index(int part) {
  Table<uint8_t, 64> index = {};
  for (int i = 0; i < 64; ++i) {
    index.at[i] = static_cast<uint8_t>(i % 4 * 16 + format::high_bit_at(16 * part + i / 4) / 8);
  }
  return index;
}
// By how many bits to turn a lane to have a number's high bit at bit 2.
constexpr Table<int32_t, 16> dual_high_turns(int part) {
  Table<int32_t, 16> turns = {};
  for (int n = 0; n < 16; ++n) {
    turns.at[n] = (format::high_bit_at(16 * part + n) % 8 + 30) % 32;
  }
  return turns;
}
constexpr Table<int32_t, 16> dual_low_shifts() {
  Table<int32_t, 16> shifts = {};
  for (int n = 0; n < 16; ++n) shifts.at[n] = n % 4 * 2;
  return shifts;
}

// Sixteen numbers of four tokens.
template <int Bits, int Part>
KVX_INLINE __m512i spread_part(__m512i low, __m512i high) {
  static constexpr Table<uint8_t, 64> kLow = dual_low_index(Part);
  static constexpr Table<int32_t, 16> kShifts = dual_low_shifts();
  const __m512i two = _mm512_srlv_epi32(_mm512_permutexvar_epi8(_mm512_load_si512(kLow.at), low),
                                        _mm512_load_si512(kShifts.at));
  if constexpr (Bits == 2) {
    return _mm512_and_si512(two, _mm512_set1_epi8(3));
  } else {
    static constexpr Table<uint8_t, 64> kHigh = dual_high_index(Part);
    static constexpr Table<int32_t, 16> kTurns = dual_high_turns(Part);
    const __m512i above = _mm512_rorv_epi32(
        _mm512_permutexvar_epi8(_mm512_load_si512(kHigh.at), high), _mm512_load_si512(kTurns.at));
    constexpr int kSelect = 0xCA;  // a ? b : c
    return _mm512_and_si512(_mm512_ternarylogic_epi32(_mm512_set1_epi8(3), two, above, kSelect),
                            _mm512_set1_epi8(7));
  }
}

// 64 codes of four tokens as a place of four parts of a value tile.
template <int Bits>
KVX_INLINE void spread_values(const uint8_t* const* rows, int offset, int8_t* place) {
  const __m512i low = load_chunks(rows, 1, offset + 16, offset);
  __m512i high = {};
  if constexpr (Bits == 3) high = load_chunks(rows, 1, offset + 24, offset + 16);
  _mm512_storeu_si512(place, spread_part<Bits, 0>(low, high));
  _mm512_storeu_si512(place + kPartBytes, spread_part<Bits, 1>(low, high));
  _mm512_storeu_si512(place + 2 * kPartBytes, spread_part<Bits, 2>(low, high));
  _mm512_storeu_si512(place + 3 * kPartBytes, spread_part<Bits, 3>(low, high));
}

}  // namespace KVX_CPU_LEVEL
}  // namespace kvx::ops::cpu
