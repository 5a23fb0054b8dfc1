// The vectors of Armv8.0's Advanced SIMD: four floats.
#pragma once

#include "ops/cpu/isa/neon/part_bytes.hpp"
#include "ops/cpu/vector_types.hpp"

namespace kvx::ops::cpu {
inline namespace KVX_CPU_LEVEL {

using Widest = Lanes4;
using LaneBits = LanesOf<Widest>::Bits;
using LaneInts = decltype(Widest{} < Widest{});

KVX_INLINE float32x4_t to_neon(const Widest& x) {
  return __builtin_bit_cast(float32x4_t, x);
}
KVX_INLINE uint32x4_t to_neon(const LaneBits& x) {
  return __builtin_bit_cast(uint32x4_t, x);
}

// x * y + z. The product is exact, so fusing it changes nothing.
KVX_INLINE Widest add_exact_product(const Widest& x, const Widest& y, const Widest& z) {
  return __builtin_bit_cast(Widest, vfmaq_f32(to_neon(z), to_neon(x), to_neon(y)));
}

// With a NaN: the bound. (fmax and fmin return a NaN.)
KVX_INLINE Widest at_least(const Widest& x, float bound) {
  return x > bound ? x : Widest{} + bound;
}
KVX_INLINE Widest at_most(const Widest& x, float bound) {
  return x < bound ? x : Widest{} + bound;
}

// x, its magnitude no larger than the bound, which is positive. Requires: x is no NaN.
KVX_INLINE Widest within(const Widest& x, float bound) {
  const float32x4_t least = vmaxq_f32(to_neon(x), vdupq_n_f32(-bound));
  return __builtin_bit_cast(Widest, vminq_f32(least, vdupq_n_f32(bound)));
}

// Rounds to integers, ties to even. Requires: a lane can hold them.
KVX_INLINE LaneBits integers_of(const Widest& x) {
  return __builtin_bit_cast(LaneBits, vcvtnq_s32_f32(to_neon(x)));
}

// ---- F16

KVX_INLINE float16x4_t narrow_to_f16(const Widest& x) {
  return vcvt_f16_f32(to_neon(x));
}

KVX_INLINE Widest round_to_f16(const Widest& x) {
  return __builtin_bit_cast(Widest, vcvt_f32_f16(narrow_to_f16(x)));
}

// The numbers' F16 bits, in the low half of each lane.
KVX_INLINE LaneBits f16_bits(const Widest& x) {
  return __builtin_bit_cast(LaneBits, vmovl_u16(vreinterpret_u16_f16(narrow_to_f16(x))));
}

// Stores the low half of each lane.
KVX_INLINE void store_low_halves(const LaneBits& bits, uint8_t* target) {
  vst1_u8(target, vreinterpret_u8_u16(vmovn_u32(to_neon(bits))));
}

// Stores F16 numbers; every NaN as nan_bits.
KVX_INLINE void store_f16(const Widest& x, uint32_t nan_bits, uint8_t* target) {
  store_low_halves(x == x ? f16_bits(x) : LaneBits{} + nan_bits, target);
}

// ---- Codes as bytes

// The low bytes of sixteen lanes. part: [4].
KVX_INLINE PartBytes low_bytes(const LaneBits* part) {
  const auto words = [part](int i) {
    return vcombine_u16(vmovn_u32(to_neon(part[i])), vmovn_u32(to_neon(part[i + 1])));
  };
  return vcombine_u8(vmovn_u16(words(0)), vmovn_u16(words(2)));
}

// Codes of four vectors, one a byte.
using QuadBytes = uint8x16_t;

// The lanes of four vectors as bytes, in order, each cut to what a byte can hold.
template <bool IsSigned>
KVX_INLINE QuadBytes bytes_of_lanes(const LaneBits* lanes) {
  const auto words = [lanes](int i) {
    const auto low = __builtin_bit_cast(int32x4_t, lanes[i]);
    const auto high = __builtin_bit_cast(int32x4_t, lanes[i + 1]);
    return vcombine_s16(vqmovn_s32(low), vqmovn_s32(high));
  };
  if constexpr (IsSigned) {
    return vreinterpretq_u8_s8(vcombine_s8(vqmovn_s16(words(0)), vqmovn_s16(words(2))));
  } else {
    return vcombine_u8(vqmovun_s16(words(0)), vqmovun_s16(words(2)));
  }
}

KVX_INLINE QuadBytes bytes_within(const QuadBytes& bytes, int bound) {
  const auto most = static_cast<int8_t>(bound);
  const auto least = static_cast<int8_t>(-bound);
  const int8x16_t cut = vminq_s8(vreinterpretq_s8_u8(bytes), vdupq_n_s8(most));
  return vreinterpretq_u8_s8(vmaxq_s8(cut, vdupq_n_s8(least)));
}

// As store_codes: four vectors of floats are a part.
template <format::Packing P>
KVX_INLINE void store_quad(QuadBytes codes, int number, uint8_t* row) {
  store_codes<P>(codes, number, row);
}

}  // namespace KVX_CPU_LEVEL
}  // namespace kvx::ops::cpu
