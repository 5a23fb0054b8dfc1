// What the kernels of dual-scale tiles need of AVX2: codes of 2 and 3 bits as bytes, and the orders
// of channels. The AVX-512 level has the same functions.
#pragma once

#include <initializer_list>

#include "ops/attend/cpu/dual_codes.hpp"
#include "ops/attend/cpu/isa/avx2/code_vectors.hpp"

namespace kvx::ops::cpu {
inline namespace KVX_CPU_LEVEL {

KVX_INLINE Ints widen_bytes(const uint8_t* bytes) {
  return (Ints)_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(bytes)));
}
// E4M3 numbers that are not NaN. An F16's exponent has a bias larger by 8.
KVX_INLINE Widest common_e4m3(const uint8_t* bytes) {
  const __m128i words = _mm_cvtepi8_epi16(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(bytes)));
  const __m128i bits = _mm_set1_epi16(static_cast<short>(0xBF80));
  return (Widest)_mm256_cvtph_ps(_mm_and_si128(_mm_slli_epi16(words, 7), bits)) * 256.0f;
}

// Whether one of n bytes, a multiple of 16, is `least` or more under a mask.
KVX_INLINE bool reaches(const uint8_t* bytes, int n, uint8_t mask, uint8_t least) {
  const __m128i least_of_all = _mm_set1_epi8(static_cast<char>(least));
  __m128i found = _mm_setzero_si128();
  for (int i = 0; i < n; i += 16) {
    const __m128i masked =
        _mm_and_si128(_mm_loadu_si128(reinterpret_cast<const __m128i*>(bytes + i)),
                      _mm_set1_epi8(static_cast<char>(mask)));
    found = _mm_or_si128(found, _mm_cmpeq_epi8(_mm_max_epu8(masked, least_of_all), masked));
  }
  return _mm_movemask_epi8(found) != 0;
}

// ---- Orders of the 64 channels of a unit

// Within sixteen channels, those of the words that they make in a key tile, word after word.
template <int Bits>
constexpr Table<int8_t, 16> order_of_words() {
  Table<int8_t, 16> order = {};
  for (int i = 0; i < 16; ++i) {
    order.at[i] = static_cast<int8_t>(key_channel<Bits>(i / 4 * kIntLanes + i % 4));
  }
  return order;
}

template <int Bits>
struct KeyOrder {
  KVX_INLINE static void sort(const uint8_t* unit, uint8_t* sorted) {
    static constexpr Table<int8_t, 16> kWords = order_of_words<Bits>();
    const __m256i words =
        _mm256_broadcastsi128_si256(_mm_load_si128(reinterpret_cast<const __m128i*>(kWords.at)));
    const __m256i vectors = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    for (int i = 0; i < kUnitNumbers; i += kKeyChannels) {
      const __m256i bytes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(unit + i));
      const __m256i by_word = _mm256_shuffle_epi8(bytes, words);
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(sorted + i),
                          _mm256_permutevar8x32_epi32(by_word, vectors));
    }
  }
};

// Vector 4 h + j of a value tile's unit has code j of eight bytes, which is the order of a key
// tile.
template <int Bits>
struct ValueOrder {
  KVX_INLINE static void sort(const uint8_t* unit, uint8_t* sorted) {
    KeyOrder<Bits>::sort(unit, sorted);
  }
  // Eight vectors of numbers in this order.
  KVX_INLINE static void undo(Widest* numbers) {
    for (Widest* half : {numbers, numbers + 4}) {
      const auto x = [half](int i) { return (__m256)half[i]; };
      // Codes 0 and 1, and codes 2 and 3, of two bytes of each four.
      const __m256d a = _mm256_castps_pd(_mm256_unpacklo_ps(x(0), x(1)));
      const __m256d b = _mm256_castps_pd(_mm256_unpackhi_ps(x(0), x(1)));
      const __m256d c = _mm256_castps_pd(_mm256_unpacklo_ps(x(2), x(3)));
      const __m256d d = _mm256_castps_pd(_mm256_unpackhi_ps(x(2), x(3)));
      const __m256d bytes[4] = {_mm256_unpacklo_pd(a, c), _mm256_unpackhi_pd(a, c),
                                _mm256_unpacklo_pd(b, d), _mm256_unpackhi_pd(b, d)};
      half[0] = (Widest)_mm256_permute2f128_pd(bytes[0], bytes[1], 0x20);
      half[1] = (Widest)_mm256_permute2f128_pd(bytes[2], bytes[3], 0x20);
      half[2] = (Widest)_mm256_permute2f128_pd(bytes[0], bytes[1], 0x31);
      half[3] = (Widest)_mm256_permute2f128_pd(bytes[2], bytes[3], 0x31);
    }
  }
};
template <>
struct ValueOrder<4> {
  KVX_INLINE static void sort(const uint8_t* unit, uint8_t* sorted) {
    memcpy(sorted, unit, kUnitNumbers);
  }
  KVX_INLINE static void undo(Widest*) {}
};

// ---- Queries

KVX_INLINE __m256i pack_numbers(const Ints& a, const Ints& b) {
  return _mm256_packs_epi32((__m256i)a, (__m256i)b);
}
KVX_INLINE void store_thirty_two(__m256i bytes, int8_t* at) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(at), bytes);
}

// The bytes of four vectors of numbers, in the order that key_channel tells.
KVX_INLINE void store_query_bytes(const Ints* numbers, int8_t* bytes) {
  const __m256i a = pack_numbers(numbers[0], numbers[1]);
  const __m256i b = pack_numbers(numbers[2], numbers[3]);
  store_thirty_two(_mm256_packs_epi16(a, b), bytes);
}
// The same of numbers of 16 bits as two digits.
KVX_INLINE void store_query_digits(const Ints* numbers, int8_t* high, int8_t* low) {
  const __m256i a = pack_numbers(numbers[0], numbers[1]);
  const __m256i b = pack_numbers(numbers[2], numbers[3]);
  const __m256i half = _mm256_set1_epi16(128);
  const __m256i byte = _mm256_set1_epi16(255);
  const __m256i a_high = _mm256_srai_epi16(_mm256_add_epi16(a, half), 8);
  const __m256i b_high = _mm256_srai_epi16(_mm256_add_epi16(b, half), 8);
  store_thirty_two(_mm256_packs_epi16(a_high, b_high), high);
  store_thirty_two(_mm256_packus_epi16(_mm256_and_si256(a, byte), _mm256_and_si256(b, byte)), low);
}

// ---- Codes

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

// 64 codes of eight tokens as sixteen vectors of a key tile, in the order of key_channel.
// rows: [8], of each token the unit of 64 codes that begins at `offset`.
template <int Bits, class Rows>
KVX_INLINE void spread_keys(Rows rows, int offset, uint8_t* tile) {
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

// 64 codes of four tokens as a place of eight parts of a value tile, in ValueOrder.
template <int Bits, class Rows>
KVX_INLINE void spread_values(Rows rows, int offset, int8_t* place) {
  __m128i fours[4];
  interleave_chunks(rows, offset + 16, offset, fours);
  const __m256i low[2] = {_mm256_setr_m128i(fours[0], fours[1]),
                          _mm256_setr_m128i(fours[2], fours[3])};
  __m256i high[2] = {};
  if constexpr (Bits == 3) {
    interleave_chunks(rows, offset + 24, offset + 16, fours);
    high[0] = _mm256_setr_m128i(fours[0], fours[1]);
    high[1] = _mm256_srli_epi16(high[0], 1);
  }
  for (int half = 0; half < 2; ++half, place += 4 * kPartBytes) {
    const auto store = [place](int part, __m256i codes) {
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(place + part * kPartBytes), codes);
    };
    store(0, spread_codes<Bits, 0>(low[half], high[half]));
    store(1, spread_codes<Bits, 1>(low[half], high[half]));
    store(2, spread_codes<Bits, 2>(low[half], high[half]));
    store(3, spread_codes<Bits, 3>(low[half], high[half]));
  }
}

}  // namespace KVX_CPU_LEVEL
}  // namespace kvx::ops::cpu
