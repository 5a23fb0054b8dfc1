// BlockKernels: packed kernels that load a whole register of 16-bit or 8-bit floats at once, with
// the byte permutations of AVX-512 VBMI.
#pragma once

#include <immintrin.h>

#include <bit>

#include "ops/attend/cpu/packed_floats.hpp"

namespace kvx::ops::cpu {
inline namespace KVX_CPU_LEVEL {

// Word 2 i is number i, word 2 i + 1 number 16 + i.
constexpr Table<uint8_t, 64> order_of_bf16_bytes() {
  Table<uint8_t, 64> order = {};
  for (int byte = 0; byte < 64; ++byte) {
    const int number = byte / 4 + (byte / 2 % 2) * 16;
    order.at[byte] = static_cast<uint8_t>(2 * number + byte % 2);
  }
  return order;
}

// Thirty-two BF16 numbers at once: one shuffle sorts them so that a shift and a mask widen them,
// where widening the halves of a register takes four.
struct Bf16Block {
  static constexpr float kUnit = 1.0f;
  static constexpr bool kHidesNan = false;
  static constexpr int kNumbers = 32;

  KVX_INLINE static void load_part(const uint8_t* row, int number, Widest* part) {
    static constexpr Table<uint8_t, 64> kOrder = order_of_bf16_bytes();
    const __m512i words =
        _mm512_permutexvar_epi8(_mm512_load_si512(kOrder.at), _mm512_loadu_si512(row + 2 * number));
    const __m512i odd = _mm512_set1_epi32(static_cast<int>(0xFFFF0000u));
    part[0] = __builtin_bit_cast(Widest, _mm512_slli_epi32(words, 16));
    part[1] = __builtin_bit_cast(Widest, _mm512_and_si512(words, odd));
  }
};

// Sixty-four fp8 numbers at once, by looking up the two bytes of their BF16, in which every one of
// them is exact.
template <class Codec>
struct Fp8Block {
  static constexpr float kUnit = 1.0f;
  static constexpr bool kHidesNan = false;
  static constexpr int kNumbers = 64;

  KVX_INLINE static void load_part(const uint8_t* row, int number, Widest* part) {
    static constexpr Table<uint8_t, 64> kOrder = order_of_codes();
    static constexpr Table<uint8_t, 128> kHigh = bf16_bytes(24);
    static constexpr Table<uint8_t, 128> kLow = bf16_bytes(16);
    const __m512i codes =
        _mm512_permutexvar_epi8(_mm512_load_si512(kOrder.at), _mm512_loadu_si512(row + number));
    const __m512i magnitude_high = look_up(kHigh, codes);
    const __m512i low_bytes = look_up(kLow, codes);
    const __m512i sign = _mm512_set1_epi8(static_cast<char>(0x80));
    constexpr int kOrAnd = 0xF8;  // a | (b & c)
    const __m512i high_bytes = _mm512_ternarylogic_epi32(magnitude_high, codes, sign, kOrAnd);
    const __m512i words[2] = {_mm512_unpacklo_epi8(low_bytes, high_bytes),
                              _mm512_unpackhi_epi8(low_bytes, high_bytes)};
    const __m512i odd = _mm512_set1_epi32(static_cast<int>(0xFFFF0000u));
    for (int i = 0; i < 2; ++i) {
      part[2 * i] = __builtin_bit_cast(Widest, _mm512_slli_epi32(words[i], 16));
      part[2 * i + 1] = __builtin_bit_cast(Widest, _mm512_and_si512(words[i], odd));
    }
  }

 private:
  // Codes stand so that interleaving their low and high bytes leaves vector v's number 4 * lane + i
  // in word i of the lane: vectors 0 and 1 in the halves of the first words, 2 and 3 of the second.
  static constexpr Table<uint8_t, 64> order_of_codes() {
    Table<uint8_t, 64> order = {};
    for (int at = 0; at < 64; ++at) {
      const int v = at % 16 / 8 * 2 + at % 2;
      order.at[at] = static_cast<uint8_t>(16 * v + at / 16 * 4 + at % 8 / 2);
    }
    return order;
  }
  // One byte of every magnitude.
  static constexpr Table<uint8_t, 128> bf16_bytes(int shift) {
    Table<uint8_t, 128> bytes = {};
    for (int code = 0; code < 128; ++code) {
      const uint32_t bits = std::bit_cast<uint32_t>(Codec::decode(static_cast<uint8_t>(code)));
      bytes.at[code] = static_cast<uint8_t>(bits >> shift);
    }
    return bytes;
  }
  // By the low seven bits of each code.
  KVX_INLINE static __m512i look_up(const Table<uint8_t, 128>& table, __m512i codes) {
    return _mm512_permutex2var_epi8(_mm512_load_si512(table.at), codes,
                                    _mm512_load_si512(table.at + 64));
  }
};

struct BlockKernels {
  // Null: the format has none, or rows are no whole blocks.
  static const PackedKernels* find(const format::FormatSpec& spec, int head_dim) {
    if (head_dim % Bf16Block::kNumbers == 0 && spec.facts->id == format::FormatId::kBF16) {
      static constexpr const PackedKernels* kBF16 = &kFloatKernels<Bf16Block>;
      return kBF16;
    }
    if (head_dim % 64 == 0) {
      static constexpr const PackedKernels* kE4M3 = &kFloatKernels<Fp8Block<format::E4M3Codec>>;
      static constexpr const PackedKernels* kE5M2 = &kFloatKernels<Fp8Block<format::E5M2Codec>>;
      if (spec.facts->id == format::FormatId::kFp8E4M3) return kE4M3;
      if (spec.facts->id == format::FormatId::kFp8E5M2) return kE5M2;
    }
    return nullptr;
  }
};

}  // namespace KVX_CPU_LEVEL
}  // namespace kvx::ops::cpu
