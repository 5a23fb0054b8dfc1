// What the kernels of dual-scale tiles need of Advanced SIMD: codes of 2 and 3 bits as bytes,
// and the orders of channels. The x86 levels have the same functions.
#pragma once

#include "ops/attend/cpu/dual_codes.hpp"
#include "ops/attend/cpu/isa/neon/code_vectors.hpp"

namespace kvx::ops::cpu {
inline namespace KVX_CPU_LEVEL {

// Four bytes with a sign.
KVX_INLINE int16x4_t widen_to_words(const uint8_t* bytes) {
  uint32_t four;
  memcpy(&four, bytes, sizeof four);
  return vget_low_s16(vmovl_s8(vreinterpret_s8_u32(vdup_n_u32(four))));
}
KVX_INLINE Ints widen_bytes(const uint8_t* bytes) {
  return __builtin_bit_cast(Ints, vmovl_s16(widen_to_words(bytes)));
}
// E4M3 numbers that are not NaN. An F16's exponent has a bias larger by 8.
KVX_INLINE Widest common_e4m3(const uint8_t* bytes) {
  const uint16x4_t words = vreinterpret_u16_s16(vshl_n_s16(widen_to_words(bytes), 7));
  const uint16x4_t halves = vand_u16(words, vdup_n_u16(0xBF80));
  return __builtin_bit_cast(Widest, vcvt_f32_f16(vreinterpret_f16_u16(halves))) * 256.0f;
}

// Whether one of n bytes, a multiple of 16, is `least` or more under a mask.
KVX_INLINE bool reaches(const uint8_t* bytes, int n, uint8_t mask, uint8_t least) {
  uint8x16_t largest = vdupq_n_u8(0);
  for (int i = 0; i < n; i += 16) {
    largest = vmaxq_u8(largest, vandq_u8(vld1q_u8(bytes + i), vdupq_n_u8(mask)));
  }
  return vmaxvq_u8(largest) >= least;
}

// ---- Orders of the 64 channels of a unit

template <int Bits>
struct KeyOrder {
  KVX_INLINE static void sort(const uint8_t* unit, uint8_t* sorted) {
    static constexpr Table<uint8_t, 16> kOrder = [] {
      Table<uint8_t, 16> order = {};
      for (int i = 0; i < 16; ++i) order.at[i] = static_cast<uint8_t>(key_channel<Bits>(i));
      return order;
    }();
    const uint8x16_t order = vld1q_u8(kOrder.at);
    for (int i = 0; i < kUnitNumbers; i += kKeyChannels) {
      vst1q_u8(sorted + i, vqtbl1q_u8(vld1q_u8(unit + i), order));
    }
  }
};
static_assert(kKeyChannels == 16);

// A value tile has the channels in their own order.
template <int Bits>
struct ValueOrder {
  KVX_INLINE static void sort(const uint8_t* unit, uint8_t* sorted) {
    memcpy(sorted, unit, kUnitNumbers);
  }
  KVX_INLINE static void undo(Widest*) {}
};

// ---- Queries

KVX_INLINE int16x8_t pack_numbers(const Ints& a, const Ints& b) {
  return vcombine_s16(vmovn_s32(__builtin_bit_cast(int32x4_t, a)),
                      vmovn_s32(__builtin_bit_cast(int32x4_t, b)));
}

// The bytes of four vectors of numbers, in the order that key_channel tells.
KVX_INLINE void store_query_bytes(const Ints* numbers, int8_t* bytes) {
  const int16x8_t a = pack_numbers(numbers[0], numbers[1]);
  const int16x8_t b = pack_numbers(numbers[2], numbers[3]);
  vst1q_s8(bytes, vcombine_s8(vmovn_s16(a), vmovn_s16(b)));
}
// The same of numbers of 16 bits as two digits.
KVX_INLINE void store_query_digits(const Ints* numbers, int8_t* high, int8_t* low) {
  const int16x8_t a = pack_numbers(numbers[0], numbers[1]);
  const int16x8_t b = pack_numbers(numbers[2], numbers[3]);
  vst1q_s8(high, vcombine_s8(vrshrn_n_s16(a, 8), vrshrn_n_s16(b, 8)));
  vst1q_s8(low, vcombine_s8(vmovn_s16(a), vmovn_s16(b)));
}

// ---- Codes

// Bytes of four codes each, one of them: code j of every byte. high: of 3 bits, with code j's high
// bit at bit 2 j.
template <int Bits>
KVX_INLINE uint8x16_t spread_codes(uint8x16_t low, uint8x16_t high, int j) {
  const int8x16_t down = vdupq_n_s8(static_cast<int8_t>(-2 * j));
  const uint8x16_t two = vandq_u8(vshlq_u8(low, down), vdupq_n_u8(3));
  if constexpr (Bits == 2) {
    return two;
  } else {
    const uint8x16_t above = vandq_u8(vshlq_u8(high, down), vdupq_n_u8(1));
    return vsliq_n_u8(two, above, 2);
  }
}

// 64 codes of four tokens as sixteen vectors of a key tile, in the order of key_channel.
// rows: [4], of each token the unit of 64 codes that begins at `offset`.
template <int Bits, class Rows>
KVX_INLINE void spread_keys(Rows rows, int offset, uint8_t* tile) {
  uint8x16_t chunks[4];
  uint8x16_t words[4];
  uint8x16_t high[4] = {};
  for (int t = 0; t < 4; ++t) chunks[t] = vld1q_u8(rows[t] + offset);
  transpose_words(chunks, words);
  if constexpr (Bits == 3) {
    for (int t = 0; t < 4; ++t) chunks[t] = load_chunk(rows[t], offset + 24, offset + 16);
    transpose_words(chunks, high);
    high[2] = vshrq_n_u8(high[0], 1);
    high[3] = vshrq_n_u8(high[1], 1);
  }
  for (int w = 0; w < 4; ++w) {
    for (int j = 0; j < 4; ++j, tile += 16) {
      vst1q_u8(tile, spread_codes<Bits>(words[w], high[w], j));
    }
  }
}

// 64 codes of four tokens as a place of sixteen parts of a value tile: byte j of the tokens holds
// the numbers 4 j to 4 j + 3.
template <int Bits, class Rows>
KVX_INLINE void spread_values(Rows rows, int offset, int8_t* place) {
  uint8x16_t low[4];
  uint8x16_t high[4] = {};
  interleave_chunks(rows, offset + 16, offset, low);
  if constexpr (Bits == 3) {
    interleave_chunks(rows, offset + 24, offset + 16, high);
    high[2] = vshrq_n_u8(high[0], 1);
    high[3] = vshrq_n_u8(high[1], 1);
  }
  alignas(16) static constexpr int8_t kShifts[16] = {0,  0,  0,  0,  -2, -2, -2, -2,
                                                     -4, -4, -4, -4, -6, -6, -6, -6};
  const int8x16_t shifts = vld1q_s8(kShifts);
  for (int byte = 0; byte < 16; ++byte, place += kPartBytes) {
    const auto four = [byte](const uint8x16_t* fours) {  // the tokens' bytes, four times
      uint32_t tokens;
      memcpy(&tokens, reinterpret_cast<const uint8_t*>(fours) + 4 * byte, sizeof tokens);
      return vreinterpretq_u8_u32(vdupq_n_u32(tokens));
    };
    uint8x16_t codes = vandq_u8(vshlq_u8(four(low), shifts), vdupq_n_u8(3));
    if constexpr (Bits == 3) {
      codes = vsliq_n_u8(codes, vandq_u8(vshlq_u8(four(high), shifts), vdupq_n_u8(1)), 2);
    }
    store_four(codes, place);
  }
}

}  // namespace KVX_CPU_LEVEL
}  // namespace kvx::ops::cpu
