// What integer products over codes need of AVX2, with AVX-VNNI or without; dots.hpp has what
// differs. The AVX-512 level has the same functions.
#pragma once

#include "ops/attend/cpu/isa/avx2/chunks.hpp"

namespace kvx::ops::cpu {
inline namespace KVX_CPU_LEVEL {

// sum += the products of four vectors' bytes, of keys or values, with four times four bytes, of
// queries or weights, which every lane takes. vectors: [4]. fours: [16] bytes.
template <Operands O>
KVX_INLINE Ints add_four_dots(Ints sum, const Ints* vectors, const void* fours) {
  const auto products = [&](int i) {
    int32_t four;
    memcpy(&four, static_cast<const uint8_t*>(fours) + 4 * i, sizeof four);
    const __m256i word = _mm256_set1_epi32(four);
    return O == Operands::kKeysAndQueries ? _mm256_maddubs_epi16((__m256i)vectors[i], word)
                                          : _mm256_maddubs_epi16(word, (__m256i)vectors[i]);
  };
  __m256i pairs = products(0);
  for (int i = 1; i < 4; ++i) pairs = _mm256_add_epi16(pairs, products(i));
  return sum + (Ints)_mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
}

// A lane's bytes 0 and 2, and 1 and 3, as words.
struct Pairs {
  Ints even, odd;
};

KVX_INLINE Pairs widen_unsigned(Ints bytes) {
  return {(Ints)_mm256_and_si256((__m256i)bytes, _mm256_set1_epi16(255)),
          (Ints)_mm256_srli_epi16((__m256i)bytes, 8)};
}
KVX_INLINE Pairs widen_signed(Ints bytes) {
  return {(Ints)_mm256_srai_epi16(_mm256_slli_epi16((__m256i)bytes, 8), 8),
          (Ints)_mm256_srai_epi16((__m256i)bytes, 8)};
}

// sum += the products of two words a lane.
KVX_INLINE Ints add_pairs(Ints sum, Ints a, Ints b) {
  sum += (Ints)_mm256_madd_epi16((__m256i)a, (__m256i)b);
  // Hides that sums may be taken in any order: the compilers take dozens of products before they
  // add one, more than the registers hold.
  asm("" : "+x"(sum));
  return sum;
}

// Word by word.
KVX_INLINE Ints add_words(Ints a, Ints b) {
  return (Ints)_mm256_add_epi16((__m256i)a, (__m256i)b);
}

// sum += 32768 times the words of a lane.
KVX_INLINE Ints add_word_middles(Ints sum, Ints totals) {
  return sum - add_pairs(Ints{}, totals, (Ints)_mm256_set1_epi16(-32768));
}

KVX_INLINE Ints to_nearest(Widest x) {
  return (Ints)_mm256_cvtps_epi32((__m256)x);
}

// As many vectors of sums and operands as the registers hold: eight tokens each of a key tile,
// parts of eight numbers of a value tile.
constexpr int key_vectors_together(Fixed form) {
  return form == Fixed::kTwoDigits ? 1 : 2;
}
inline constexpr int kPartsTogether = 1;

template <class Codec, int Offset>
KVX_INLINE __m256i nibble_table() {
  static constexpr Table<int8_t, 16> kBytes = CodeBytes<Codec>::nibble_bytes(Offset);
  return _mm256_broadcastsi128_si256(_mm_load_si128(reinterpret_cast<const __m128i*>(kBytes.at)));
}

// ---- Queries and keys

// The lowest bytes of eight numbers of a row, in the order of places.
template <class Codec, format::Packing P>
KVX_INLINE void store_in_places(Ints numbers, int8_t* chunk, int number) {
  static constexpr Table<int8_t, 16> kOrder = order_of_places<Codec, P>();
  const __m256i bytes = _mm256_and_si256((__m256i)numbers, _mm256_set1_epi32(255));
  const __m128i words =
      _mm_packus_epi32(_mm256_castsi256_si128(bytes), _mm256_extracti128_si256(bytes, 1));
  const __m128i packed = _mm_shuffle_epi8(
      _mm_packus_epi16(words, words), _mm_load_si128(reinterpret_cast<const __m128i*>(kOrder.at)));
  _mm_storel_epi64(reinterpret_cast<__m128i*>(chunk + number), packed);
}

// Of four words each the pairs that meet the even and the odd bytes of a lane.
KVX_INLINE __m256i sort_pairs(__m256i words) {
  return _mm256_shufflehi_epi16(_mm256_shufflelo_epi16(words, 0xD8), 0xD8);
}

// Eight numbers of a row that are words, as pairs.
KVX_INLINE void store_pairs(Ints numbers, int8_t* words) {
  const auto all = (__m256i)numbers;
  const __m128i packed =
      _mm_packs_epi32(_mm256_castsi256_si128(all), _mm256_extracti128_si256(all, 1));
  const __m256i pairs = sort_pairs(_mm256_castsi128_si256(packed));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(words), _mm256_castsi256_si128(pairs));
}

// A key's byte of each low nibble, of bytes that may have anything in the high one.
template <class Codec>
KVX_INLINE __m256i key_bytes(__m256i codes) {
  using Code = CodeBytes<Codec>;
  const __m256i nibbles = _mm256_and_si256(codes, _mm256_set1_epi8(15));
  if constexpr (is_flipped_nibble<Codec>()) {
    return _mm256_xor_si256(nibbles, _mm256_set1_epi8(Code::kNibbleFlip));
  } else {
    return _mm256_shuffle_epi8(nibble_table<Codec, Code::kKeyOffset>(), nibbles);
  }
}

// The bytes from `offset` on of eight tokens. rows: [8]. keys: [kKeysAChunk], in the order of the
// tile; of a row's last eight bytes the first half.
template <class Codec>
KVX_INLINE void load_keys(const uint8_t* const* rows, int row_bytes, int offset, Ints* keys) {
  using Code = CodeBytes<Codec>;
  __m256i r[4];  // r[i], lane l: token 4 l + i
  for (int i = 0; i < 4; ++i) {
    r[i] = _mm256_setr_m128i(load_chunk(rows[i], row_bytes, offset),
                             load_chunk(rows[i + 4], row_bytes, offset));
  }
  const __m256i a = _mm256_unpacklo_epi32(r[0], r[1]);
  const __m256i b = _mm256_unpacklo_epi32(r[2], r[3]);
  const __m256i c = _mm256_unpackhi_epi32(r[0], r[1]);
  const __m256i d = _mm256_unpackhi_epi32(r[2], r[3]);
  const __m256i words[4] = {_mm256_unpacklo_epi64(a, b), _mm256_unpackhi_epi64(a, b),
                            _mm256_unpacklo_epi64(c, d), _mm256_unpackhi_epi64(c, d)};
  for (int w = 0; w < 4; ++w) {
    if constexpr (Code::kIsNibble) {
      keys[2 * w] = (Ints)key_bytes<Codec>(words[w]);
      keys[2 * w + 1] = (Ints)key_bytes<Codec>(_mm256_srli_epi16(words[w], 4));
    } else {
      const __m256i flip = _mm256_set1_epi8(static_cast<char>(Code::kKeyFlip));
      keys[w] = (Ints)_mm256_xor_si256(words[w], flip);
    }
  }
}

// ---- Values and weights

template <class Codec>
constexpr float value_unit() {
  return CodeBytes<Codec>::kUnit;
}
template <class Codec>
constexpr int value_bias() {
  return CodeBytes<Codec>::kValueBias;
}

// Byte j of four tokens' chunks, side by side: [4] of four js each.
template <class Rows>
KVX_INLINE void interleave_chunks(Rows rows, int row_bytes, int offset, __m128i* fours) {
  __m128i tokens[4];
  for (int t = 0; t < 4; ++t) tokens[t] = load_chunk(rows[t], row_bytes, offset);
  const __m128i a = _mm_unpacklo_epi8(tokens[0], tokens[1]);
  const __m128i b = _mm_unpackhi_epi8(tokens[0], tokens[1]);
  const __m128i c = _mm_unpacklo_epi8(tokens[2], tokens[3]);
  const __m128i d = _mm_unpackhi_epi8(tokens[2], tokens[3]);
  fours[0] = _mm_unpacklo_epi16(a, c);
  fours[1] = _mm_unpackhi_epi16(a, c);
  fours[2] = _mm_unpacklo_epi16(b, d);
  fours[3] = _mm_unpackhi_epi16(b, d);
}

// The same of 32 bytes of a row, of which each lane has half.
template <class Rows>
KVX_INLINE void interleave_halves(Rows rows, int offset, __m256i* fours) {
  __m256i tokens[4];
  for (int t = 0; t < 4; ++t) {
    tokens[t] = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(rows[t] + offset));
  }
  const __m256i a = _mm256_unpacklo_epi8(tokens[0], tokens[1]);
  const __m256i b = _mm256_unpackhi_epi8(tokens[0], tokens[1]);
  const __m256i c = _mm256_unpacklo_epi8(tokens[2], tokens[3]);
  const __m256i d = _mm256_unpackhi_epi8(tokens[2], tokens[3]);
  fours[0] = _mm256_unpacklo_epi16(a, c);
  fours[1] = _mm256_unpackhi_epi16(a, c);
  fours[2] = _mm256_unpacklo_epi16(b, d);
  fours[3] = _mm256_unpackhi_epi16(b, d);
}

// Numbers 0 to 3, and 4 to 7, of each lane's eight, which have two parts.
KVX_INLINE void store_lanes(__m256i first, __m256i second, int8_t* part, int8_t* other_part) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(part),
                      _mm256_permute2x128_si256(first, second, 0x20));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(other_part),
                      _mm256_permute2x128_si256(first, second, 0x31));
}

// Of each lane four bytes of four tokens, which are eight numbers of a part.
template <class Codec, format::Packing P>
KVX_INLINE void store_nibbles(__m256i bytes, int8_t* part, int8_t* other_part) {
  const __m256i low_four = _mm256_set1_epi8(15);
  const __m256i table = nibble_table<Codec, CodeBytes<Codec>::kValueBias>();
  const __m256i low = _mm256_shuffle_epi8(table, _mm256_and_si256(bytes, low_four));
  const __m256i high =
      _mm256_shuffle_epi8(table, _mm256_and_si256(_mm256_srli_epi16(bytes, 4), low_four));
  if constexpr (P == format::Packing::kTurboMind) {
    const __m256 a = _mm256_castsi256_ps(low);
    const __m256 b = _mm256_castsi256_ps(high);
    store_lanes(_mm256_castps_si256(_mm256_shuffle_ps(a, b, 0x88)),
                _mm256_castps_si256(_mm256_shuffle_ps(a, b, 0xDD)), part, other_part);
  } else {
    static_assert(P == format::Packing::kNibbles, "store_nibbles has no branch for this packing");
    store_lanes(_mm256_unpacklo_epi32(low, high), _mm256_unpackhi_epi32(low, high), part,
                other_part);
  }
}

// 32 bytes of four tokens' rows.
template <class Codec, format::Packing P>
KVX_INLINE void unpack_halves(const uint8_t* const* rows, int offset, int8_t* part) {
  __m256i fours[4];
  interleave_halves(rows, offset, fours);
  if constexpr (CodeBytes<Codec>::kIsNibble) {
    for (int i = 0; i < 4; ++i, part += kPartBytes) {
      store_nibbles<Codec, P>(fours[i], part, part + 4 * kPartBytes);
    }
  } else {
    const __m256i flip = _mm256_set1_epi8(static_cast<char>(CodeBytes<Codec>::kValueFlip));
    for (int i = 0; i < 4; i += 2, part += kPartBytes) {
      store_lanes(_mm256_xor_si256(fours[i], flip), _mm256_xor_si256(fours[i + 1], flip), part,
                  part + 2 * kPartBytes);
    }
  }
}

// The last bytes of four tokens' rows: sixteen, or eight.
template <class Codec, format::Packing P>
KVX_INLINE void unpack_rest(const uint8_t* const* rows, int row_bytes, int offset, int8_t* part) {
  __m128i fours[4];
  interleave_chunks(rows, row_bytes, offset, fours);
  const __m256i halves[2] = {_mm256_setr_m128i(fours[0], fours[1]),
                             _mm256_setr_m128i(fours[2], fours[3])};
  for (int i = 0; i < 2 && offset + 8 * i < row_bytes; ++i) {
    if constexpr (CodeBytes<Codec>::kIsNibble) {
      store_nibbles<Codec, P>(halves[i], part + 2 * i * kPartBytes,
                              part + (2 * i + 1) * kPartBytes);
    } else {
      const __m256i flip = _mm256_set1_epi8(static_cast<char>(CodeBytes<Codec>::kValueFlip));
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(part + i * kPartBytes),
                          _mm256_xor_si256(halves[i], flip));
    }
  }
}

template <class Codec, format::Packing P>
KVX_INLINE void unpack_values(const PackedTile& values, int8_t* tile, Prefetcher& prefetcher) {
  constexpr int kPartsOfEight = 8 / Codec::kBits;  // parts that eight bytes of a row make
  const int row_bytes = values.head_dim * Codec::kBits / 8;
  const int num_fours = values.padded_tokens() / 4;
  prefetcher.pace(PhaseShares::kUnpackValues, num_fours);
  for (int place = 0; place < kPlaces; ++place) {
    if (four_at(place) >= num_fours) continue;
    prefetcher.step();
    const uint8_t* const* rows = values.codes + 4 * four_at(place);
    int8_t* part = tile + place * kPlaceBytes;
    int offset = 0;
    for (; offset + 32 <= row_bytes; offset += 32, part += 4 * kPartsOfEight * kPartBytes) {
      unpack_halves<Codec, P>(rows, offset, part);
    }
    for (; offset < row_bytes; offset += 16, part += 2 * kPartsOfEight * kPartBytes) {
      unpack_rest<Codec, P>(rows, row_bytes, offset, part);
    }
  }
}

// Words from 0 to 65535, which sums and products take modulo 65536.
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

// Less 32768, as multiply_words takes them.
KVX_INLINE Words words_to_signed(Words numbers) {
  return _mm256_xor_si256(numbers, _mm256_set1_epi16(static_cast<short>(0x8000)));
}

// (a + 32768) * b / 32768, to nearest: the instruction takes words with a sign. b: at most 32767.
KVX_INLINE Words multiply_words(Words a, Words b) {
  return _mm256_add_epi16(_mm256_mulhrs_epi16(a, b), b);
}

// As pairs, in the order of places if a and b came from four vectors in their order. pairs: [64].
KVX_INLINE void store_weight_pairs(Words a, Words b, uint8_t* pairs) {
  const __m256i first = sort_pairs(a);
  const __m256i second = sort_pairs(b);
  auto* to = reinterpret_cast<__m256i*>(pairs);
  _mm256_storeu_si256(to, _mm256_permute2x128_si256(first, second, 0x20));
  _mm256_storeu_si256(to + 1, _mm256_permute2x128_si256(first, second, 0x31));
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
