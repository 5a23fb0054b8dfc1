// Dot products of bytes with Armv8.0's Advanced SIMD: products of words, then sums of pairs.
#pragma once

#include <arm_neon.h>

#include "ops/attend/cpu/code_bytes.hpp"

namespace kvx::ops::cpu {
inline namespace KVX_CPU_LEVEL {

// sum += the products of four vectors' bytes, of keys or values, with four times four bytes, of
// queries or weights, which every lane takes. vectors: [4]. fours: [16] bytes. Pairs' sums gather
// in the low and the high half's lanes, and are added to their neighbours at the end.
template <Operands O>
KVX_INLINE Ints add_four_dots(Ints sum, const Ints* vectors, const void* fours) {
  const auto word = [fours](int i) {
    int32_t four;
    memcpy(&four, static_cast<const uint8_t*>(fours) + 4 * i, sizeof four);
    return vdupq_n_s32(four);
  };
  if constexpr (O == Operands::kKeysAndQueries) {
    int32x4_t low = vdupq_n_s32(0);
    int32x4_t high = low;
    for (int i = 0; i < 4; ++i) {
      const auto x = __builtin_bit_cast(int8x16_t, vectors[i]);
      const int8x16_t y = vreinterpretq_s8_s32(word(i));
      low = vpadalq_s16(low, vmull_s8(vget_low_s8(x), vget_low_s8(y)));
      high = vpadalq_s16(high, vmull_high_s8(x, y));
    }
    return sum + __builtin_bit_cast(Ints, vpaddq_s32(low, high));
  } else {
    uint32x4_t low = vdupq_n_u32(0);
    uint32x4_t high = low;
    for (int i = 0; i < 4; ++i) {
      const auto x = __builtin_bit_cast(uint8x16_t, vectors[i]);
      const uint8x16_t y = vreinterpretq_u8_s32(word(i));
      low = vpadalq_u16(low, vmull_u8(vget_low_u8(x), vget_low_u8(y)));
      high = vpadalq_u16(high, vmull_high_u8(x, y));
    }
    return sum + __builtin_bit_cast(Ints, vpaddq_u32(low, high));
  }
}

}  // namespace KVX_CPU_LEVEL
}  // namespace kvx::ops::cpu
