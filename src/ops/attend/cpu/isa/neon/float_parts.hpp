// Parts of sixteen floats of 16 and 8 bits with Advanced SIMD. The other levels have the same
// functions.
#pragma once

#include <arm_neon.h>

#include "ops/cpu/lanes.hpp"

namespace kvx::ops::cpu {
inline namespace KVX_CPU_LEVEL {

KVX_INLINE void widen_halves(uint16x8_t halves, Widest* two) {
  const float16x8_t numbers = vreinterpretq_f16_u16(halves);
  two[0] = __builtin_bit_cast(Widest, vcvt_f32_f16(vget_low_f16(numbers)));
  two[1] = __builtin_bit_cast(Widest, vcvt_high_f32_f16(numbers));
}

KVX_INLINE uint16x8_t load_eight_halves(const uint8_t* numbers) {
  return vreinterpretq_u16_u8(vld1q_u8(numbers));
}

KVX_INLINE void widen_bf16_part(const uint8_t* numbers, Widest* part) {
  const uint16x8_t zeros = vdupq_n_u16(0);
  for (int v = 0; v < 4; v += 2) {
    const uint16x8_t shorts = load_eight_halves(numbers + 8 * v);
    part[v] = __builtin_bit_cast(Widest, vzip1q_u16(zeros, shorts));
    part[v + 1] = __builtin_bit_cast(Widest, vzip2q_u16(zeros, shorts));
  }
}

KVX_INLINE void widen_f16_part(const uint8_t* numbers, Widest* part) {
  widen_halves(load_eight_halves(numbers), part);
  widen_halves(load_eight_halves(numbers + 16), part + 2);
}

// Sixteen bytes as the upper bytes of words.
KVX_INLINE uint16x8x2_t to_upper_bytes(const uint8_t* bytes) {
  const uint8x16_t codes = vld1q_u8(bytes);
  const uint8x16_t zeros = vdupq_n_u8(0);
  return {{vreinterpretq_u16_u8(vzip1q_u8(zeros, codes)),
           vreinterpretq_u16_u8(vzip2q_u8(zeros, codes))}};
}

KVX_INLINE void widen_e5m2_part(const uint8_t* numbers, Widest* part) {
  const uint16x8x2_t halves = to_upper_bytes(numbers);
  for (int i = 0; i < 2; ++i) widen_halves(halves.val[i], part + 2 * i);
}

KVX_INLINE void widen_e4m3_part(const uint8_t* numbers, Widest* part) {
  const uint16x8x2_t codes = to_upper_bytes(numbers);
  for (int i = 0; i < 2; ++i) {
    const int16x8_t shifted = vshrq_n_s16(vreinterpretq_s16_u16(codes.val[i]), 1);
    widen_halves(vbicq_u16(vreinterpretq_u16_s16(shifted), vdupq_n_u16(0x4000)), part + 2 * i);
  }
}

}  // namespace KVX_CPU_LEVEL
}  // namespace kvx::ops::cpu
