// What integer products over codes need of AVX-512 with VNNI and VBMI. The AVX2 level
// has the same functions; the loops over them are code_keys.hpp and code_values.hpp.
#pragma once

#include "ops/attend/cpu/isa/avx2/chunks.hpp"
#include "ops/attend/cpu/no_words.hpp"

namespace kvx::ops::cpu {
inline namespace KVX_CPU_LEVEL {

// sum += the products of four bytes a lane, the first operand's unsigned, the second's signed.
template <Operands>
KVX_INLINE Ints add_dots(Ints sum, Ints unsigned_bytes, Ints signed_bytes) {
  return (Ints)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)unsigned_bytes, (__m512i)signed_bytes);
}

inline constexpr bool kAddsFours = false;
template <Operands>
Ints add_four_dots(Ints sum, const Ints* vectors, const void* fours);

KVX_INLINE Ints to_nearest(Widest x) {
  return (Ints)_mm512_cvtps_epi32((__m512)x);
}

// As many vectors of sums and operands as the registers hold: sixteen tokens each of a key tile,
// parts of sixteen numbers of a value tile.
constexpr int key_vectors_together(Fixed form) {
  return form == Fixed::kTwoDigits ? 2 : 4;
}
inline constexpr int kPartsTogether = 2;

// The chunks of rows 0, distance, 2 * distance and 3 * distance, one a lane.
template <class Rows>
KVX_INLINE __m512i load_chunks(Rows rows, int distance, int row_bytes, int offset) {
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

// The lowest bytes of sixteen numbers of a row, in the order of places.
template <class Codec, format::Packing P>
KVX_INLINE void store_in_places(Ints numbers, int8_t* chunk, int number) {
  static constexpr Table<int8_t, 16> kOrder = order_of_places<Codec, P>();
  const __m128i bytes =
      _mm_shuffle_epi8(_mm512_cvtepi32_epi8((__m512i)numbers),
                       _mm_load_si128(reinterpret_cast<const __m128i*>(kOrder.at)));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(chunk + number), bytes);
}

// A key's byte of each low nibble, of bytes that may have anything in the high one.
template <class Codec>
KVX_INLINE __m512i key_bytes(__m512i codes) {
  using Code = CodeBytes<Codec>;
  const __m512i low_four = _mm512_set1_epi8(15);
  if constexpr (is_flipped_nibble<Codec>()) {
    constexpr int kXorAnd = 0x28;  // (a ^ b) & c
    const __m512i flip = _mm512_set1_epi8(Code::kNibbleFlip);
    return _mm512_ternarylogic_epi32(codes, flip, low_four, kXorAnd);
  } else {
    return _mm512_shuffle_epi8(nibble_table<Codec, Code::kKeyOffset>(),
                               _mm512_and_si512(codes, low_four));
  }
}

// The bytes from `offset` on of sixteen tokens. rows: [16]. keys: [kKeysAChunk], in the order of
// the tile; of a row's last eight bytes the first half.
template <class Codec>
KVX_INLINE void load_keys(const uint8_t* const* rows, int row_bytes, int offset, Ints* keys) {
  using Code = CodeBytes<Codec>;
  // Sixteen addresses do not fit in registers, and moving them to vectors costs more than loading
  // them again.
  __asm__("" : "+r"(rows));
  __m512i r[4];  // r[i], lane l: token 4 l + i
  for (int i = 0; i < 4; ++i) r[i] = load_chunks(rows + i, 4, row_bytes, offset);
  const __m512i a = _mm512_unpacklo_epi32(r[0], r[1]);
  const __m512i b = _mm512_unpacklo_epi32(r[2], r[3]);
  const __m512i c = _mm512_unpackhi_epi32(r[0], r[1]);
  const __m512i d = _mm512_unpackhi_epi32(r[2], r[3]);
  const __m512i words[4] = {_mm512_unpacklo_epi64(a, b), _mm512_unpackhi_epi64(a, b),
                            _mm512_unpacklo_epi64(c, d), _mm512_unpackhi_epi64(c, d)};
  for (int w = 0; w < 4; ++w) {
    if constexpr (Code::kIsNibble) {
      keys[2 * w] = (Ints)key_bytes<Codec>(words[w]);
      keys[2 * w + 1] = (Ints)key_bytes<Codec>(_mm512_srli_epi16(words[w], 4));
    } else {
      keys[w] =
          (Ints)_mm512_xor_si512(words[w], _mm512_set1_epi8(static_cast<char>(Code::kKeyFlip)));
    }
  }
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
      if constexpr (CodeBytes<Codec>::kIsNibble) {
        index.at[4 * low_nibble_number<P>(byte) + token] = chunk_byte;
        index.at[4 * high_nibble_number<P>(byte) + token] = chunk_byte;
      } else {
        index.at[4 * byte + token] = chunk_byte;
      }
    }
  }
  return index;
}

// An integer's nibble in the high half of a byte is sixteen times its value, sign and all. Unsigned
// ones count from their middle there.
template <class Codec>
constexpr int value_factor() {
  return is_flipped_nibble<Codec>() ? 16 : 1;
}
template <class Codec>
constexpr float value_unit() {
  return CodeBytes<Codec>::kUnit / static_cast<float>(value_factor<Codec>());
}
template <class Codec>
constexpr int value_bias() {
  return CodeBytes<Codec>::kValueBias * value_factor<Codec>();
}

// By how many bits to shift a number's byte to have its nibble where a value's byte has it.
template <class Codec, format::Packing P>
constexpr Table<int32_t, 16> nibble_shifts() {
  Table<int32_t, 16> shifts = {};
  if constexpr (CodeBytes<Codec>::kIsNibble) {
    for (int byte = 0; byte < 8; ++byte) {
      const bool is_high = value_factor<Codec>() > 1;
      shifts.at[is_high ? low_nibble_number<P>(byte) : high_nibble_number<P>(byte)] = 4;
    }
  }
  return shifts;
}

// Parts of sixteen numbers in a chunk.
template <class Codec>
inline constexpr int kPartsAChunk = CodeBytes<Codec>::kIsNibble ? 2 : 1;

// The chunks of four tokens as a place of the value tile. parts: [kPartsAChunk].
template <class Codec, format::Packing P>
KVX_INLINE void split_values(__m512i chunks, __m512i* parts) {
  using Code = CodeBytes<Codec>;
  static constexpr Table<uint8_t, 64> kIndex[2] = {interleave_index<Codec, P>(0),
                                                   interleave_index<Codec, P>(8)};
  static constexpr Table<int32_t, 16> kShifts = nibble_shifts<Codec, P>();
  for (int i = 0; i < kPartsAChunk<Codec>; ++i) {
    const __m512i columns = _mm512_permutexvar_epi8(_mm512_load_si512(kIndex[i].at), chunks);
    if constexpr (!Code::kIsNibble) {
      const __m512i flip = _mm512_set1_epi8(static_cast<char>(Code::kValueFlip));
      parts[i] = _mm512_xor_si512(columns, flip);
    } else if constexpr (value_factor<Codec>() > 1) {
      constexpr int kAndXor = 0x6A;  // (a & b) ^ c
      const __m512i high_four = _mm512_set1_epi8(static_cast<char>(0xF0));
      const __m512i flip = _mm512_set1_epi8(static_cast<char>(Code::kValueFlip));
      const __m512i codes = _mm512_sllv_epi32(columns, _mm512_load_si512(kShifts.at));
      parts[i] = _mm512_ternarylogic_epi32(codes, high_four, flip, kAndXor);
    } else {
      const __m512i codes = _mm512_and_si512(
          _mm512_srlv_epi32(columns, _mm512_load_si512(kShifts.at)), _mm512_set1_epi8(15));
      parts[i] = _mm512_shuffle_epi8(nibble_table<Codec, 0>(), codes);
    }
  }
}

template <class Codec, format::Packing P>
KVX_INLINE void unpack_values(const PackedTile& values, int8_t* tile, Prefetcher& prefetcher) {
  constexpr int kParts = kPartsAChunk<Codec>;
  const int row_bytes = values.head_dim * Codec::kBits / 8;
  const int num_fours = values.padded_tokens() / 4;
  prefetcher.pace(PhaseShares::kUnpackValues, num_fours);
  for (int place = 0; place < kPlaces; ++place) {
    if (four_at(place) >= num_fours) continue;
    prefetcher.step();
    const uint8_t* const* rows = values.codes + 4 * four_at(place);
    int8_t* out = tile + place * kPlaceBytes;
    for (int offset = 0; offset < row_bytes; offset += 16) {
      __m512i parts[kParts];
      split_values<Codec, P>(load_chunks(rows, 1, row_bytes, offset), parts);
      for (int i = 0; i < kParts && offset + 8 * i < row_bytes; ++i, out += kPartBytes) {
        _mm512_storeu_si512(out, parts[i]);
      }
    }
  }
}

// Words from 0 to 65535, which sums and products take modulo 65536.
using Words = __m512i;

KVX_INLINE Words pack_words(Ints a, Ints b) {
  return _mm512_packus_epi32((__m512i)a, (__m512i)b);
}
KVX_INLINE Words load_words(const uint16_t* words) {
  return _mm512_loadu_si512(words);
}
KVX_INLINE void store_words(Words numbers, uint16_t* words) {
  _mm512_storeu_si512(words, numbers);
}

// Less 32768, as multiply_words takes them.
KVX_INLINE Words words_to_signed(Words numbers) {
  return _mm512_xor_si512(numbers, _mm512_set1_epi16(static_cast<short>(0x8000)));
}

// (a + 32768) * b / 32768, to nearest: the instruction takes words with a sign. b: at most 32767.
KVX_INLINE Words multiply_words(Words a, Words b) {
  return _mm512_add_epi16(_mm512_mulhrs_epi16(a, b), b);
}

void store_weight_pairs(Words a, Words b, uint8_t* pairs);

// As digits, in the order of places if a and b came from four vectors in their order.
KVX_INLINE void store_digits(Words a, Words b, uint8_t* high, uint8_t* low) {
  const __m512i byte = _mm512_set1_epi16(255);
  const __m512i high_digits = _mm512_packus_epi16(_mm512_srli_epi16(a, 8), _mm512_srli_epi16(b, 8));
  const __m512i low_digits =
      _mm512_packus_epi16(_mm512_and_si512(a, byte), _mm512_and_si512(b, byte));
  _mm512_storeu_si512(high, high_digits);
  _mm512_storeu_si512(low, low_digits);
}

}  // namespace KVX_CPU_LEVEL
}  // namespace kvx::ops::cpu
