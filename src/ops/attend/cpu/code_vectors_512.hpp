// What integer products over codes need of AVX-512 with VNNI and VBMI. code_vectors_256.hpp has the
// same functions; the loops over them are code_keys.hpp and code_values.hpp.
#pragma once

#include <immintrin.h>

#include "ops/attend/cpu/code_bytes.hpp"

namespace kvx::ops::cpu {
inline namespace KVX_CPU_LEVEL {

// sum += the products of four bytes a lane, the first operand's unsigned, the second's signed.
KVX_INLINE Ints add_dots(Ints sum, Ints unsigned_bytes, Ints signed_bytes) {
  return (Ints)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)unsigned_bytes, (__m512i)signed_bytes);
}

KVX_INLINE Ints to_nearest(Widest x) {
  return (Ints)_mm512_cvtps_epi32((__m512)x);
}

// As many vectors of sums and operands as the registers hold: sixteen tokens each of a key tile,
// parts of sixteen numbers of a value tile.
constexpr int key_vectors_together(int num_digits) {
  return num_digits == 1 ? 4 : 2;
}
inline constexpr int kPartsTogether = 2;

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

template <class Codec, int Offset>
KVX_INLINE __m512i nibble_table() {
  static constexpr Table<int8_t, 16> kBytes = CodeBytes<Codec>::nibble_bytes(Offset);
  return _mm512_broadcast_i32x4(_mm_load_si128(reinterpret_cast<const __m128i*>(kBytes.at)));
}

// ---- Queries and keys

// Which number of the row stands at a place of the key tile.
template <class Codec, format::Packing P>
constexpr int number_at(int place) {
  if (!CodeBytes<Codec>::kIsNibble) return place;
  const int byte = place / 8 * 4 + place % 4;
  return place % 8 < 4 ? low_nibble_number<P>(byte) : high_nibble_number<P>(byte);
}

template <class Codec, format::Packing P>
constexpr Table<int8_t, 16> order_of_places() {
  Table<int8_t, 16> order = {};
  for (int place = 0; place < 16; ++place) {
    order.at[place] = static_cast<int8_t>(number_at<Codec, P>(place));
  }
  return order;
}

// The lowest bytes of sixteen numbers of a row, in the order of places.
template <class Codec, format::Packing P>
KVX_INLINE void store_in_places(Ints numbers, int8_t* digits) {
  static constexpr Table<int8_t, 16> kOrder = order_of_places<Codec, P>();
  const __m128i bytes =
      _mm_shuffle_epi8(_mm512_cvtepi32_epi8((__m512i)numbers),
                       _mm_load_si128(reinterpret_cast<const __m128i*>(kOrder.at)));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(digits), bytes);
}

// Sixteen tokens. rows: [16].
template <class Codec, format::Packing>
KVX_INLINE void unpack_keys(const uint8_t* const* rows, int row_bytes, uint8_t* tile,
                            Prefetcher& prefetcher) {
  using Code = CodeBytes<Codec>;
  const __m512i table = Code::kIsNibble ? nibble_table<Codec, Code::kKeyOffset>() : __m512i{};
  const __m512i low_four = _mm512_set1_epi8(15);
  const __m512i flip = _mm512_set1_epi8(static_cast<char>(Code::kKeyFlip));
  for (int offset = 0; offset < row_bytes; offset += 16) {
    prefetcher.step();
    __m512i r[4];  // r[i], lane l: token 4 l + i
    for (int i = 0; i < 4; ++i) r[i] = load_chunks(rows + i, 4, row_bytes, offset);
    const __m512i a = _mm512_unpacklo_epi32(r[0], r[1]);
    const __m512i b = _mm512_unpacklo_epi32(r[2], r[3]);
    const __m512i c = _mm512_unpackhi_epi32(r[0], r[1]);
    const __m512i d = _mm512_unpackhi_epi32(r[2], r[3]);
    const __m512i words[4] = {_mm512_unpacklo_epi64(a, b), _mm512_unpackhi_epi64(a, b),
                              _mm512_unpacklo_epi64(c, d), _mm512_unpackhi_epi64(c, d)};
    const int num_words = row_bytes - offset >= 16 ? 4 : 2;
    for (int w = 0; w < num_words; ++w) {
      if constexpr (Code::kIsNibble) {
        const __m512i low = _mm512_and_si512(words[w], low_four);
        const __m512i high = _mm512_and_si512(_mm512_srli_epi16(words[w], 4), low_four);
        _mm512_storeu_si512(tile, _mm512_shuffle_epi8(table, low));
        _mm512_storeu_si512(tile + 64, _mm512_shuffle_epi8(table, high));
        tile += 128;
      } else {
        _mm512_storeu_si512(tile, _mm512_xor_si512(words[w], flip));
        tile += 64;
      }
    }
  }
}

// How often unpack_keys lets the prefetcher step.
template <class Codec>
constexpr int unpack_key_steps(int row_bytes) {
  return (row_bytes + 15) / 16;
}

// ---- Values and weights

// Of four tokens' chunks, one a lane, to [16 numbers x 4 tokens]: the byte of the chunk that has a
// part's number. first: the byte of a chunk at which the part begins.
template <class Codec, format::Packing P>
constexpr Table<uint8_t, 64> interleave_index(int first) {
  Table<uint8_t, 64> index = {};
  for (int token = 0; token < 4; ++token) {
    for (int byte = 0; byte < (CodeBytes<Codec>::kIsNibble ? 8 : 16); ++byte) {
      const auto chunk_byte = static_cast<uint8_t>(token * 16 + first + byte);
      if (CodeBytes<Codec>::kIsNibble) {
        index.at[4 * low_nibble_number<P>(byte) + token] = chunk_byte;
        index.at[4 * high_nibble_number<P>(byte) + token] = chunk_byte;
      } else {
        index.at[4 * byte + token] = chunk_byte;
      }
    }
  }
  return index;
}

// By how many bits to shift a number's byte to have its nibble in the low four.
template <format::Packing P>
constexpr Table<int32_t, 16> nibble_shifts() {
  Table<int32_t, 16> shifts = {};
  for (int byte = 0; byte < 8; ++byte) shifts.at[high_nibble_number<P>(byte)] = 4;
  return shifts;
}

template <class Codec, format::Packing P>
KVX_INLINE void unpack_values(const PackedTile& values, int8_t* tile, Prefetcher& prefetcher) {
  using Code = CodeBytes<Codec>;
  const int row_bytes = values.head_dim * Codec::kBits / 8;
  const int num_fours = values.padded_tokens() / 4;
  const __m512i table = Code::kIsNibble ? nibble_table<Codec, 0>() : __m512i{};
  const __m512i low_four = _mm512_set1_epi8(15);
  const __m512i flip = _mm512_set1_epi8(static_cast<char>(Code::kValueFlip));
  static constexpr Table<uint8_t, 64> kFirst = interleave_index<Codec, P>(0);
  static constexpr Table<uint8_t, 64> kSecond = interleave_index<Codec, P>(8);
  static constexpr Table<int32_t, 16> kShifts = nibble_shifts<P>();
  const __m512i first_part = _mm512_load_si512(kFirst.at);
  const __m512i second_part = _mm512_load_si512(kSecond.at);
  const __m512i shifts = _mm512_load_si512(kShifts.at);
  const auto nibbles = [&](__m512i chunks, __m512i index) {
    const __m512i columns = _mm512_permutexvar_epi8(index, chunks);
    const __m512i codes = _mm512_and_si512(_mm512_srlv_epi32(columns, shifts), low_four);
    return _mm512_shuffle_epi8(table, codes);
  };
  prefetcher.pace(PhaseShares::kUnpackValues, num_fours);
  for (int place = 0; place < kPlaces; ++place) {
    if (four_at(place) >= num_fours) continue;
    prefetcher.step();
    const uint8_t* const* rows = values.codes + 4 * four_at(place);
    int8_t* out = tile + place * kPlaceBytes;
    for (int offset = 0; offset < row_bytes; offset += 16) {
      const __m512i chunks = load_chunks(rows, 1, row_bytes, offset);
      if constexpr (Code::kIsNibble) {
        _mm512_storeu_si512(out, nibbles(chunks, first_part));
        out += kPartBytes;
        if (offset + 16 > row_bytes) break;
        _mm512_storeu_si512(out, nibbles(chunks, second_part));
      } else {
        const __m512i codes = _mm512_permutexvar_epi8(first_part, chunks);
        _mm512_storeu_si512(out, _mm512_xor_si512(codes, flip));
      }
      out += kPartBytes;
    }
  }
}

// Sixty-four whole numbers from 0 to 65535 as digits in the order of places. high, low: [64].
KVX_INLINE void store_digits(const Ints* fixed, uint8_t* high, uint8_t* low) {
  const __m512i a = _mm512_packus_epi32((__m512i)fixed[0], (__m512i)fixed[1]);
  const __m512i b = _mm512_packus_epi32((__m512i)fixed[2], (__m512i)fixed[3]);
  const __m512i byte = _mm512_set1_epi16(255);
  _mm512_storeu_si512(high, _mm512_packus_epi16(_mm512_srli_epi16(a, 8), _mm512_srli_epi16(b, 8)));
  _mm512_storeu_si512(low,
                      _mm512_packus_epi16(_mm512_and_si512(a, byte), _mm512_and_si512(b, byte)));
}

}  // namespace KVX_CPU_LEVEL
}  // namespace kvx::ops::cpu
