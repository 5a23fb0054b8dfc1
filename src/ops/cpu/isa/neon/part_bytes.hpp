// Sixteen codes as bytes of one register, and how they become a row's packed bytes.
#pragma once

#include <arm_neon.h>

#include "format/packing.hpp"
#include "ops/cpu/level.hpp"

namespace kvx::ops::cpu {
inline namespace KVX_CPU_LEVEL {

// Whether a product of bytes takes an unsigned one and a signed one; here both have a sign or none.
inline constexpr bool kProductsMixSigns = false;

using PartBytes = uint8x16_t;

KVX_INLINE PartBytes zero_codes() {
  return vdupq_n_u8(0);
}

// Packs sixteen codes, bits above the nibbles anything: the first of a pair in the low half of a
// byte.
KVX_INLINE void store_nibble_pairs(uint8x16_t first, uint8x16_t second, uint8_t* target) {
  vst1_u8(target, vget_low_u8(vsliq_n_u8(vandq_u8(first, vdupq_n_u8(15)), second, 4)));
}

// Stores sixteen codes, one a byte, as numbers [number, number + 16) of a row.
template <format::Packing P>
KVX_INLINE void store_codes(PartBytes codes, int number, uint8_t* row) {
  using format::Packing;
  if constexpr (P == Packing::kBytes) {
    vst1q_u8(row + number, codes);
  } else if constexpr (P == Packing::kTurboMind) {
    // Bytes hold e0|e2<<4, e4|e6<<4, e1|e3<<4, e5|e7<<4: of words of 16 bits, [e0 e1][e2 e3][e4 e5]
    // [e6 e7], the even ones are firsts and the odd ones seconds.
    const auto words = vreinterpretq_u16_u8(codes);
    const auto sort = [](uint16x8_t pairs) {  // [e0 e1][e4 e5] to [e0 e4 e1 e5]
      const uint8x16_t bytes = vreinterpretq_u8_u16(pairs);
      const auto evens = vreinterpretq_u16_u8(vuzp1q_u8(bytes, bytes));
      const auto odds = vreinterpretq_u16_u8(vuzp2q_u8(bytes, bytes));
      return vreinterpretq_u8_u16(vzip1q_u16(evens, odds));
    };
    store_nibble_pairs(sort(vuzp1q_u16(words, words)), sort(vuzp2q_u16(words, words)),
                       row + number / 2);
  } else if constexpr (P == Packing::kNibbles || P == Packing::kWords) {
    store_nibble_pairs(vuzp1q_u8(codes, codes), vuzp2q_u8(codes, codes), row + number / 2);
  } else {
    static_assert(format::kHasNoBranch<P>, "store_codes has no branch for this packing");
  }
}

}  // namespace KVX_CPU_LEVEL
}  // namespace kvx::ops::cpu
