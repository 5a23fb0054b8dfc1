// What integer products over codes need of AVX2 with AVX-VNNI. code_vectors_512.hpp has the same
// functions.
#pragma once

#include <immintrin.h>

#include "ops/attend/cpu/code_bytes.hpp"
#include "ops/attend/cpu/packed_loaders.hpp"

namespace kvx::ops::cpu {
inline namespace KVX_CPU_LEVEL {

// sum += the products of four bytes a lane, the first operand's unsigned, the second's signed.
KVX_INLINE Ints add_dots(Ints sum, Ints unsigned_bytes, Ints signed_bytes) {
  return (Ints)_mm256_dpbusd_avx_epi32((__m256i)sum, (__m256i)unsigned_bytes,
                                       (__m256i)signed_bytes);
}

KVX_INLINE Ints to_nearest(Widest x) {
  return (Ints)_mm256_cvtps_epi32((__m256)x);
}

// As many vectors of sums and operands as the registers hold: eight tokens each of a key tile,
// parts of eight numbers of a value tile.
constexpr int key_vectors_together(int num_digits) {
  return num_digits == 1 ? 2 : 1;
}
inline constexpr int kPartsTogether = 1;

// Sixteen codes as the bytes of values, in the row's order.
template <class Codec, format::Packing P>
KVX_INLINE __m128i load_value_bytes(const uint8_t* row, int number) {
  if constexpr (CodeBytes<Codec>::kIsNibble) {
    const auto* bytes = reinterpret_cast<const __m128i*>(row + number / 2);
    return CodePart<Codec, P>::nibble_numbers(_mm_loadl_epi64(bytes));
  } else {
    const auto* bytes = reinterpret_cast<const __m128i*>(row + number);
    const __m128i flip = _mm_set1_epi8(static_cast<char>(CodeBytes<Codec>::kValueFlip));
    return _mm_xor_si128(_mm_loadu_si128(bytes), flip);
  }
}

// ---- Queries and keys

// The lowest bytes of eight numbers of a row; places are in its order.
template <class Codec, format::Packing>
KVX_INLINE void store_in_places(Ints numbers, int8_t* digits) {
  const __m256i bytes = _mm256_and_si256((__m256i)numbers, _mm256_set1_epi32(255));
  const __m256i words = _mm256_packus_epi32(bytes, bytes);
  const __m256i packed = _mm256_packus_epi16(words, words);  // four bytes a lane
  const int low = _mm256_extract_epi32(packed, 0);
  const int high = _mm256_extract_epi32(packed, 4);
  memcpy(digits, &low, sizeof low);
  memcpy(digits + 4, &high, sizeof high);
}

// Eight tokens. rows: [8].
template <class Codec, format::Packing P>
KVX_INLINE void unpack_keys(const uint8_t* const* rows, int row_bytes, uint8_t* tile,
                            Prefetcher& prefetcher) {
  using Code = CodeBytes<Codec>;
  // A value's byte and this are a key's.
  constexpr int kToKey = Code::kIsNibble ? Code::kKeyOffset : 128;
  const __m256i to_key = _mm256_set1_epi8(static_cast<char>(kToKey));
  const int head_dim = row_bytes * 8 / Codec::kBits;
  for (int number = 0; number < head_dim; number += 16, tile += 128) {
    prefetcher.step();
    __m256i r[4];  // r[i], lane l: token 4 l + i
    for (int i = 0; i < 4; ++i) {
      const __m256i values = _mm256_setr_m128i(load_value_bytes<Codec, P>(rows[i], number),
                                               load_value_bytes<Codec, P>(rows[i + 4], number));
      r[i] = _mm256_add_epi8(values, to_key);
    }
    const __m256i a = _mm256_unpacklo_epi32(r[0], r[1]);
    const __m256i b = _mm256_unpacklo_epi32(r[2], r[3]);
    const __m256i c = _mm256_unpackhi_epi32(r[0], r[1]);
    const __m256i d = _mm256_unpackhi_epi32(r[2], r[3]);
    const __m256i words[4] = {_mm256_unpacklo_epi64(a, b), _mm256_unpackhi_epi64(a, b),
                              _mm256_unpacklo_epi64(c, d), _mm256_unpackhi_epi64(c, d)};
    for (int w = 0; w < 4; ++w) {
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(tile + 32 * w), words[w]);
    }
  }
}

// How often unpack_keys lets the prefetcher step.
template <class Codec>
constexpr int unpack_key_steps(int row_bytes) {
  return row_bytes * 8 / Codec::kBits / 16;
}

// ---- Values and weights

template <class Codec>
constexpr float value_unit() {
  return CodeBytes<Codec>::kUnit;
}

// Four tokens, numbers [number, number + 16): [16 numbers x 4 tokens], as two parts of a place.
template <class Codec, format::Packing P>
KVX_INLINE void unpack_four(const uint8_t* const* rows, int number, int8_t* place) {
  __m128i tokens[4];
  for (int t = 0; t < 4; ++t) tokens[t] = load_value_bytes<Codec, P>(rows[t], number);
  const __m128i a = _mm_unpacklo_epi8(tokens[0], tokens[1]);
  const __m128i b = _mm_unpackhi_epi8(tokens[0], tokens[1]);
  const __m128i c = _mm_unpacklo_epi8(tokens[2], tokens[3]);
  const __m128i d = _mm_unpackhi_epi8(tokens[2], tokens[3]);
  const __m128i fours[4] = {_mm_unpacklo_epi16(a, c), _mm_unpackhi_epi16(a, c),
                            _mm_unpacklo_epi16(b, d), _mm_unpackhi_epi16(b, d)};
  for (int i = 0; i < 4; ++i) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(place + i / 2 * kPartBytes + i % 2 * 16), fours[i]);
  }
}

template <class Codec, format::Packing P>
KVX_INLINE void unpack_values(const PackedTile& values, int8_t* tile, Prefetcher& prefetcher) {
  const int num_fours = values.padded_tokens() / 4;
  prefetcher.pace(PhaseShares::kUnpackValues, num_fours);
  for (int place = 0; place < kPlaces; ++place) {
    if (four_at(place) >= num_fours) continue;
    prefetcher.step();
    const uint8_t* const* rows = values.codes + 4 * four_at(place);
    int8_t* out = tile + place * kPlaceBytes;
    for (int number = 0; number < values.head_dim; number += 16, out += 2 * kPartBytes) {
      unpack_four<Codec, P>(rows, number, out);
    }
  }
}

// Words from 0 to 32767.
using Words = __m256i;

KVX_INLINE Words pack_words(Ints a, Ints b) {
  return _mm256_packus_epi32((__m256i)a, (__m256i)b);
}
KVX_INLINE Words load_words(const uint16_t* words) {
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(words));
}
KVX_INLINE void store_words(Words numbers, uint16_t* words) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(words), numbers);
}

// a * b / 32768, to nearest.
KVX_INLINE Words multiply_words(Words a, Words b) {
  return _mm256_mulhrs_epi16(a, b);
}

// As digits, in the order of places if a and b came from four vectors in their order.
KVX_INLINE void store_digits(Words a, Words b, uint8_t* high, uint8_t* low) {
  const __m256i byte = _mm256_set1_epi16(255);
  const __m256i high_digits = _mm256_packus_epi16(_mm256_srli_epi16(a, 8), _mm256_srli_epi16(b, 8));
  const __m256i low_digits =
      _mm256_packus_epi16(_mm256_and_si256(a, byte), _mm256_and_si256(b, byte));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(high), high_digits);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(low), low_digits);
}

}  // namespace KVX_CPU_LEVEL
}  // namespace kvx::ops::cpu
