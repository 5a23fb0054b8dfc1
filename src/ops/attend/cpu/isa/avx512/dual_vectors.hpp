// What the kernels of dual-scale tiles need of AVX-512: codes of 2 and 3 bits as bytes, and the
// orders of channels. The AVX2 level has the same functions.
#pragma once

#include <initializer_list>
#include <type_traits>

#include "ops/attend/cpu/dual_codes.hpp"
#include "ops/attend/cpu/isa/avx512/code_vectors.hpp"

namespace kvx::ops::cpu {
inline namespace KVX_CPU_LEVEL {

KVX_INLINE Ints widen_bytes(const uint8_t* bytes) {
  return (Ints)_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(bytes)));
}
// E4M3 numbers that are not NaN. An F16's exponent has a bias larger by 8.
KVX_INLINE Widest common_e4m3(const uint8_t* bytes) {
  const __m256i words =
      _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(bytes)));
  const __m256i bits = _mm256_set1_epi16(static_cast<short>(0xBF80));
  const __m256i halves = _mm256_and_si256(_mm256_slli_epi16(words, 7), bits);
  return (Widest)_mm512_cvtph_ps(halves) * 256.0f;
}

// Whether one of n bytes is `least` or more under a mask.
KVX_INLINE bool reaches(const uint8_t* bytes, int n, uint8_t mask, uint8_t least) {
  __mmask64 found = 0;
  for (int i = 0; i < n; i += 64) {
    const __mmask64 exist = n - i < 64 ? (__mmask64{1} << (n - i)) - 1 : ~__mmask64{0};
    const __m512i masked = _mm512_and_si512(_mm512_maskz_loadu_epi8(exist, bytes + i),
                                            _mm512_set1_epi8(static_cast<char>(mask)));
    found |= _mm512_cmpge_epu8_mask(masked, _mm512_set1_epi8(static_cast<char>(least)));
  }
  return found != 0;
}

// ---- Orders of the 64 channels of a unit

template <class Order>
constexpr Table<uint8_t, 64> order_of_channels() {
  Table<uint8_t, 64> order = {};
  for (int place = 0; place < 64; ++place) {
    order.at[place] = static_cast<uint8_t>(Order::channel(place));
  }
  return order;
}
template <class Order>
KVX_INLINE void sort_channels(const uint8_t* unit, uint8_t* sorted) {
  static constexpr Table<uint8_t, 64> kOrder = order_of_channels<Order>();
  _mm512_store_si512(
      sorted, _mm512_permutexvar_epi8(_mm512_load_si512(kOrder.at), _mm512_loadu_si512(unit)));
}

template <int Bits>
struct KeyOrder {
  static constexpr int channel(int place) { return key_channel<Bits>(place); }
  KVX_INLINE static void sort(const uint8_t* unit, uint8_t* sorted) {
    sort_channels<KeyOrder>(unit, sorted);
  }
};

constexpr Table<int32_t, 16> zipped_halves(int half) {
  Table<int32_t, 16> index = {};
  for (int i = 0; i < 16; ++i) index.at[i] = i % 2 * 16 + half * 8 + i / 2;
  return index;
}
constexpr Table<int32_t, 16> zipped_pairs(int half) {
  Table<int32_t, 16> index = {};
  for (int i = 0; i < 16; ++i) index.at[i] = i / 2 % 2 * 16 + half * 8 + i / 4 * 2 + i % 2;
  return index;
}

// Vector j of a value tile's unit has code j of sixteen bytes.
template <int Bits>
struct ValueOrder {
  static constexpr int channel(int place) { return place % 16 * 4 + place / 16; }
  KVX_INLINE static void sort(const uint8_t* unit, uint8_t* sorted) {
    sort_channels<ValueOrder>(unit, sorted);
  }
  // Four vectors of numbers in this order.
  KVX_INLINE static void undo(Widest* numbers) {
    static constexpr Table<int32_t, 16> kHalves[2] = {zipped_halves(0), zipped_halves(1)};
    static constexpr Table<int32_t, 16> kPairs[2] = {zipped_pairs(0), zipped_pairs(1)};
    Widest natural[4];
    const auto zip = [](Widest a, const Table<int32_t, 16>& index, Widest b) {
      return _mm512_permutex2var_ps((__m512)a, _mm512_load_si512(index.at), (__m512)b);
    };
    for (int half = 0; half < 2; ++half) {
      // Codes 0 and 1 of eight bytes, and codes 2 and 3.
      const auto first = (Widest)zip(numbers[0], kHalves[half], numbers[1]);
      const auto last = (Widest)zip(numbers[2], kHalves[half], numbers[3]);
      natural[2 * half] = (Widest)zip(first, kPairs[0], last);
      natural[2 * half + 1] = (Widest)zip(first, kPairs[1], last);
    }
    for (int i = 0; i < 4; ++i) numbers[i] = natural[i];
  }
};
template <>
struct ValueOrder<4> {
  KVX_INLINE static void sort(const uint8_t* unit, uint8_t* sorted) { memcpy(sorted, unit, 64); }
  KVX_INLINE static void undo(Widest*) {}
};

// ---- Queries

// The bytes of four vectors of numbers, in the order that key_channel tells.
KVX_INLINE void store_query_bytes(const Ints* numbers, int8_t* bytes) {
  const __m512i a = _mm512_packs_epi32((__m512i)numbers[0], (__m512i)numbers[1]);
  const __m512i b = _mm512_packs_epi32((__m512i)numbers[2], (__m512i)numbers[3]);
  _mm512_storeu_si512(bytes, _mm512_packs_epi16(a, b));
}
// The same of numbers of 16 bits as two digits.
KVX_INLINE void store_query_digits(const Ints* numbers, int8_t* high, int8_t* low) {
  const __m512i a = _mm512_packs_epi32((__m512i)numbers[0], (__m512i)numbers[1]);
  const __m512i b = _mm512_packs_epi32((__m512i)numbers[2], (__m512i)numbers[3]);
  const __m512i half = _mm512_set1_epi16(128);
  const __m512i byte = _mm512_set1_epi16(255);
  const __m512i a_high = _mm512_srai_epi16(_mm512_add_epi16(a, half), 8);
  const __m512i b_high = _mm512_srai_epi16(_mm512_add_epi16(b, half), 8);
  _mm512_storeu_si512(high, _mm512_packs_epi16(a_high, b_high));
  _mm512_storeu_si512(low,
                      _mm512_packus_epi16(_mm512_and_si512(a, byte), _mm512_and_si512(b, byte)));
}

// ---- Codes

// Bit i of a byte is made of these bits of another, for vgf2p8affineqb.
constexpr int64_t bit_matrix(std::initializer_list<int> bits) {
  uint64_t matrix = 0;
  int to = 0;
  for (const int from : bits) matrix |= uint64_t{1} << from << (8 * (7 - to++));
  return static_cast<int64_t>(matrix);
}
KVX_INLINE __m512i pick_bits(__m512i bytes, __m512i matrix) {
  return _mm512_gf2p8affine_epi64_epi8(bytes, matrix, 0);
}

// Bytes of four codes of 2 bits each, as four vectors of codes.
KVX_INLINE void spread_twos(__m512i four, __m512i* codes) {
  codes[0] = _mm512_and_si512(four, _mm512_set1_epi8(3));
  codes[1] = pick_bits(four, _mm512_set1_epi64(bit_matrix({2, 3})));
  codes[2] = pick_bits(four, _mm512_set1_epi64(bit_matrix({4, 5})));
  codes[3] = pick_bits(four, _mm512_set1_epi64(bit_matrix({6, 7})));
}

// What picks codes of 3 bits out of bytes that have two codes' low bits beside four high ones, of
// which `odd` tells every code's: of codes 0 and 1 they are above, of codes 2 and 3 below.
constexpr int64_t matrix_of_code(int code, int odd) {
  switch (code) {
    case 0:
      return bit_matrix({0, 1, 4 + odd});
    case 1:
      return bit_matrix({2, 3, 6 + odd});
    case 2:
      return bit_matrix({4, 5, 0 + odd});
    default:
      return bit_matrix({6, 7, 2 + odd});
  }
}

// The high bits of four codes at bits 0, 2, 4 and 6 of a byte, and of four others at the bits
// between, for spread_threes.
struct HighBits {
  __m512i up, down;
  KVX_INLINE explicit HighBits(__m512i high)
      : up(_mm512_slli_epi16(high, 4)), down(_mm512_srli_epi16(high, 4)) {}
};
// matrices: [4], matrix_of_code's.
KVX_INLINE void spread_threes(__m512i low, const HighBits& high, const __m512i* matrices,
                              __m512i* codes) {
  constexpr int kSelect = 0xCA;  // a ? b : c
  const __m512i below = _mm512_set1_epi8(15);
  const __m512i first = _mm512_ternarylogic_epi32(below, low, high.up, kSelect);
  const __m512i last = _mm512_ternarylogic_epi32(below, high.down, low, kSelect);
  codes[0] = pick_bits(first, matrices[0]);
  codes[1] = pick_bits(first, matrices[1]);
  codes[2] = pick_bits(last, matrices[2]);
  codes[3] = pick_bits(last, matrices[3]);
}

// 64 codes of sixteen tokens as sixteen vectors of a key tile, in the order of key_channel.
// rows: [16], of each token the unit of 64 codes that begins at `offset`.
template <int Bits, class Rows>
KVX_INLINE void spread_keys(Rows rows, int offset, uint8_t* tile) {
  if constexpr (std::is_pointer_v<Rows>) __asm__("" : "+r"(rows));  // as load_keys
  __m512i r[4];
  for (int i = 0; i < 4; ++i) r[i] = load_chunks(rows + i, 4, offset + 16, offset);
  const __m512i a = _mm512_unpacklo_epi32(r[0], r[1]);
  const __m512i b = _mm512_unpacklo_epi32(r[2], r[3]);
  const __m512i c = _mm512_unpackhi_epi32(r[0], r[1]);
  const __m512i d = _mm512_unpackhi_epi32(r[2], r[3]);
  const __m512i words[4] = {_mm512_unpacklo_epi64(a, b), _mm512_unpackhi_epi64(a, b),
                            _mm512_unpacklo_epi64(c, d), _mm512_unpackhi_epi64(c, d)};
  const auto store = [tile](int word, const __m512i* codes) {
    for (int j = 0; j < 4; ++j) _mm512_storeu_si512(tile + (4 * word + j) * 64, codes[j]);
  };
  __m512i codes[4];
  if constexpr (Bits == 2) {
    for (int w = 0; w < 4; ++w) {
      spread_twos(words[w], codes);
      store(w, codes);
    }
  } else {
    // The eight bytes of high bits, behind the low ones, are the upper half of what is loaded.
    for (int i = 0; i < 4; ++i) r[i] = load_chunks(rows + i, 4, offset + 24, offset + 8);
    const __m512i e = _mm512_unpackhi_epi32(r[0], r[1]);
    const __m512i f = _mm512_unpackhi_epi32(r[2], r[3]);
    const HighBits high[2] = {HighBits(_mm512_unpacklo_epi64(e, f)),
                              HighBits(_mm512_unpackhi_epi64(e, f))};
    __m512i matrices[2][4];
    for (int i = 0; i < 8; ++i) {
      matrices[i / 4][i % 4] = _mm512_set1_epi64(matrix_of_code(i % 4, i / 4));
    }
    for (int w = 0; w < 4; ++w) {
      spread_threes(words[w], high[w % 2], matrices[w / 2], codes);
      store(w, codes);
    }
  }
}

// Of four tokens' chunks, one a lane, to their bytes side by side: of byte `first` + i % length of
// the chunks the word i.
constexpr Table<uint8_t, 64> interleave_bytes(int length) {
  Table<uint8_t, 64> index = {};
  for (int i = 0; i < 64; ++i) index.at[i] = static_cast<uint8_t>(i % 4 * 16 + i / 4 % length);
  return index;
}
// The high bits of a unit's numbers 32 to 63 are those between.
constexpr Table<int64_t, 8> matrices_of_value_code(int code) {
  Table<int64_t, 8> matrices = {};
  for (int i = 0; i < 8; ++i) matrices.at[i] = matrix_of_code(code, i / 4);
  return matrices;
}

// 64 codes of four tokens as a place of four parts of a value tile, in ValueOrder.
template <int Bits, class Rows>
KVX_INLINE void spread_values(Rows rows, int offset, int8_t* place) {
  static constexpr Table<uint8_t, 64> kLow = interleave_bytes(16);
  const __m512i low = _mm512_permutexvar_epi8(_mm512_load_si512(kLow.at),
                                              load_chunks(rows, 1, offset + 16, offset));
  __m512i codes[4];
  if constexpr (Bits == 2) {
    spread_twos(low, codes);
  } else {
    static constexpr Table<uint8_t, 64> kHigh = interleave_bytes(8);
    static constexpr Table<int64_t, 8> kMatrices[4] = {
        matrices_of_value_code(0), matrices_of_value_code(1), matrices_of_value_code(2),
        matrices_of_value_code(3)};
    const __m512i high = _mm512_permutexvar_epi8(_mm512_load_si512(kHigh.at),
                                                 load_chunks(rows, 1, offset + 24, offset + 16));
    __m512i matrices[4];
    for (int j = 0; j < 4; ++j) matrices[j] = _mm512_load_si512(kMatrices[j].at);
    spread_threes(low, HighBits(high), matrices, codes);
  }
  for (int j = 0; j < 4; ++j) _mm512_storeu_si512(place + j * kPartBytes, codes[j]);
}

}  // namespace KVX_CPU_LEVEL
}  // namespace kvx::ops::cpu
