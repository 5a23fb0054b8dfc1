// Integer codes as bytes that vpdpbusd multiplies, for attention with AVX-512 VNNI and VBMI:
// queries and probabilities become fixed-point numbers of two 8-bit digits, codes stay codes, and
// dot products are integer. E2M1 codes count halves, so they are integers too.
//
// Error: a query's digits carry 16 bits of the largest number in a span, a probability's 16 bits of
// the largest in its tile, so a result is off by some 1e-5 of its size.
#pragma once

#include <immintrin.h>

#include "ops/attend/cpu/code_order.hpp"
#include "ops/attend/cpu/packed_steps.hpp"
#include "ops/attend/cpu/row_chunks.hpp"

namespace kvx::ops::cpu {
inline namespace KVX_CPU_LEVEL {

// A key byte is unsigned, a value byte signed: vpdpbusd multiplies one of each.
// number = (byte - bias) * kUnit * step (+ zero). Unsigned codes count from their middle, so that a
// query's rounding meets small numbers; their zero moves with it.
template <class Codec>
struct CodeBytes {
  static constexpr bool kIsNibble = Codec::kBits == 4;
  static constexpr bool kIsUnsigned = is_unsigned_code<Codec>();
  static constexpr float kUnit = code_unit<Codec>();
  static constexpr float kLowest = kIsUnsigned ? -static_cast<float>(1 << (Codec::kBits - 1))
                                   : Codec::decode(1 << (Codec::kBits - 1)) < 0.0f
                                       ? Codec::decode(1 << (Codec::kBits - 1))
                                       : -Codec::kQmax;
  static constexpr int kKeyBias = static_cast<int>(-kLowest / kUnit);
  static constexpr int kValueBias = kIsUnsigned && !kIsNibble ? -128 : 0;

  // What to exclusive-or a stored byte with.
  static constexpr int kKeyFlip = kIsUnsigned ? 0 : 0x80;
  static constexpr int kValueFlip = kIsUnsigned ? 0x80 : 0;

  // The bytes of the sixteen nibbles plus an offset, in each lane of 16 bytes.
  static constexpr int kKeyOffset = kIsUnsigned ? 0 : kKeyBias;
  static constexpr Table<int8_t, 16> nibble_bytes(int offset) {
    Table<int8_t, 16> bytes = {};
    for (int code = 0; code < 16; ++code) {
      bytes.at[code] = static_cast<int8_t>(
          static_cast<int>(Codec::decode(static_cast<uint8_t>(code)) / kUnit) + offset);
    }
    return bytes;
  }
  template <int Offset>
  KVX_INLINE static __m512i nibble_table() {
    static constexpr Table<int8_t, 16> kBytes = nibble_bytes(Offset);
    return _mm512_broadcast_i32x4(_mm_load_si128(reinterpret_cast<const __m128i*>(kBytes.at)));
  }
};

// Sixteen bytes of a row, or the eight that are left. Requires: row_bytes is a multiple of 8.
KVX_INLINE __m128i load_chunk(const uint8_t* row, int row_bytes, int offset) {
  const auto* chunk = reinterpret_cast<const __m128i*>(row + offset);
  return offset + 16 <= row_bytes ? _mm_loadu_si128(chunk) : _mm_loadl_epi64(chunk);
}

// The chunks of rows 0, distance, 2 * distance and 3 * distance, one a lane.
KVX_INLINE __m512i load_chunks(const uint8_t* const* rows, int distance, int row_bytes,
                               int offset) {
  __m512i chunks = _mm512_castsi128_si512(load_chunk(rows[0], row_bytes, offset));
  chunks = _mm512_inserti32x4(chunks, load_chunk(rows[distance], row_bytes, offset), 1);
  chunks = _mm512_inserti32x4(chunks, load_chunk(rows[2 * distance], row_bytes, offset), 2);
  return _mm512_inserti32x4(chunks, load_chunk(rows[3 * distance], row_bytes, offset), 3);
}

// The fixed-point numbers of the digits' integer sums.
KVX_INLINE __m512i join_digits(__m512i high, __m512i low) {
  return _mm512_add_epi32(_mm512_slli_epi32(high, 8), low);
}

// Four digits, to every 32-bit lane.
KVX_INLINE __m512i splat_digits(const void* four) {
  int32_t word;
  memcpy(&word, four, sizeof word);
  return _mm512_set1_epi32(word);
}

}  // namespace KVX_CPU_LEVEL
}  // namespace kvx::ops::cpu
