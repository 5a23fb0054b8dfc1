// Dual-scale blocks: what the bytes of a block of K or V of one head mean, and the pieces of
// arithmetic that quantise one (docs/numbers.md, section 9). Loops over these pieces are the CPU's
// (ops/append/dual_scale/encode_dual.hpp) and CUDA's; both add in the order that the section gives.
//
//   number[t][c] = scale[t] * (step[c] * (code[t][c] + offset[c]))
//
// A block keeps, a head: its rows of codes, scale[t] as E4M3 a row, and the channels' part:
//
//   [steps: E4M3 x head_dim][zeros: int8 x head_dim]
//
// A step is not negative, so its sign bit is free: the signs of the first eight are the bits of an
// E8M0 factor, the lowest first, that all steps of the head are multiplied by.
#pragma once

#include <cmath>

#include "format/codec.hpp"
#include "format/scale.hpp"

namespace kvx::format {

// A token with a NaN, an infinity or a magnitude of this or more is stored as NaNs: with less no
// sum can overflow.
inline constexpr float kDualLimit = 0x1p100f;

// What the width of a code decides.
template <int Bits>
struct DualGrid {
  static_assert(Bits >= 2 && Bits <= 4);
  static constexpr float kTopCode = static_cast<float>((1 << Bits) - 1);
  // The part of a channel's range that the codes cover: few codes are better spent on its middle.
  static constexpr float kCovered = Bits == 2 ? 0.85f : Bits == 3 ? 0.97f : 1.0f;
  static constexpr float kStepOfRange = kCovered / kTopCode;
  // A zero counts in these parts of a step, so that its reach is four ranges at every width.
  static constexpr float kZeroUnit = Bits == 2 ? 0.125f : Bits == 3 ? 0.25f : 0.5f;
  // The step, as a part of a channel's middle, from which on a zero can reach the middle.
  static constexpr float kStepOfMiddle = 1.0f / (127.0f * kZeroUnit);

  // Exact: a multiple of 1/8.
  KVX_INLINE static constexpr float offset(int8_t zero) {
    return static_cast<float>(zero) * kZeroUnit - kTopCode * 0.5f;
  }
};

// One channel of a block.
struct DualChannel {
  float step;
  float offset;
};

// The E8M0 bits that the signs of a head's first eight steps hold.
KVX_INLINE uint32_t dual_factor_bits(const uint8_t* steps) {
  uint32_t bits = 0;
  for (int i = 0; i < 8; ++i) bits |= static_cast<uint32_t>(steps[i] >> 7) << i;
  return bits;
}
KVX_INLINE float dual_factor(const uint8_t* steps) {
  return E8M0::decode(dual_factor_bits(steps));
}

// step, zero: of one channel, as stored. factor: dual_factor of the head.
template <int Bits>
KVX_INLINE DualChannel dual_channel(uint8_t step, uint8_t zero, float factor) {
  return {E4M3::decode(step & 0x7Fu) * factor, DualGrid<Bits>::offset(static_cast<int8_t>(zero))};
}

KVX_INLINE float dual_number(float scale, const DualChannel& channel, float code) {
  return scale * (channel.step * (code + channel.offset));
}

// ---- quantising

// IEEE's square root on every machine.
KVX_INLINE float square_root(float x) {
#if defined(__CUDA_ARCH__)
  return __fsqrt_rn(x);
#else
  return __builtin_sqrtf(x);
#endif
}

// The exponent of a positive number's leading bit; of a subnormal one -126.
KVX_INLINE int exponent_of(float x) {
  const int biased = static_cast<int>(std::bit_cast<uint32_t>(x) >> 23 & 0xFFu);
  return (biased < 1 ? 1 : biased) - 127;
}

// Requires: -126 <= exponent <= 127.
KVX_INLINE float power_of_two(int exponent) {
  return std::bit_cast<float>(static_cast<uint32_t>(exponent + 127) << 23);
}

// A spread from n numbers' sums: that of squares about the mean, and that of squares. The least is
// a part of the size, least_part of its square, so that numbers that hardly differ do not count as
// small ones.
KVX_INLINE float dual_spread(float squares_about_mean, float squares, int n, float least_part) {
  const float variance = squares_about_mean / static_cast<float>(n > 1 ? n - 1 : 1);
  const float least = squares / static_cast<float>(n) * least_part;
  const float largest = variance > least ? variance : least;
  return square_root(largest > 0x1p-40f ? largest : 0x1p-40f);
}
inline constexpr float kLeastOfChannel = 0x1p-8f;
inline constexpr float kLeastOfToken = 0x1p-6f;

// Token scales have this root mean square over a block before they are rounded: E4M3 then has its
// full precision from a thousandth of it to 28 times it.
inline constexpr float kDualScaleRms = 16.0f;

KVX_INLINE uint8_t dual_scale_bits(float scale) {
  return static_cast<uint8_t>(E4M3::encode(scale));
}

// How a channel's numbers become codes, in the block's own unit (DualUnit).
struct DualRounding {
  DualChannel channel;
  float inverse_step;  // 0 where the step is
};

// Numbers are quantised as multiples of a power of two, that of the block's largest magnitude.
struct DualUnit {
  int exponent;  // of the unit

  KVX_INLINE static DualUnit of(float amax) { return {exponent_of(amax)}; }
  KVX_INLINE float inverse() const { return power_of_two(-exponent); }

  // The factor's bits for steps of which the largest is this, in the unit: it becomes 128 to 256.
  KVX_INLINE uint32_t factor_bits(float largest_step) const {
    const int bits = exponent_of(largest_step) - 7 + exponent + 127;
    return static_cast<uint32_t>(bits < 0 ? 0 : bits);
  }
  // The factor in the unit, and its inverse. Requires: bits of factor_bits().
  KVX_INLINE float factor(uint32_t bits) const {
    return power_of_two(static_cast<int>(bits) - 127 - exponent);
  }
  KVX_INLINE float inverse_factor(uint32_t bits) const {
    return power_of_two(exponent + 127 - static_cast<int>(bits));
  }
};

// The step that a channel wants, low and high its smallest and largest number after the token
// scales.
template <int Bits>
KVX_INLINE float dual_wanted_step(float low, float high) {
  using Grid = DualGrid<Bits>;
  const float of_range = (high - low) * Grid::kStepOfRange;
  const float middle = (high + low) * 0.5f;
  const float of_middle = (middle < 0 ? -middle : middle) * Grid::kStepOfMiddle;
  return of_range > of_middle ? of_range : of_middle;
}

// step_bits: without the factor's bit. factor: in the unit.
template <int Bits>
KVX_INLINE uint8_t dual_zero(float low, float high, uint32_t step_bits, float factor) {
  const float step = E4M3::decode(step_bits) * factor;
  if (!(step > 0)) return 0;
  const float middle = (high + low) * 0.5f;
  const float zero = middle / (step * DualGrid<Bits>::kZeroUnit);
  return static_cast<uint8_t>(round_to_int(clamp(zero, -127.0f, 127.0f)));
}

KVX_INLINE DualRounding dual_rounding(const DualChannel& channel) {
  return {channel, channel.step > 0 ? reciprocal(channel.step) : 0.0f};
}

// number: in the unit; inverse_scale: of its token.
template <int Bits>
KVX_INLINE uint8_t dual_code(const DualRounding& rounding, float inverse_scale, float number) {
  const float place = number * inverse_scale * rounding.inverse_step - rounding.channel.offset;
  return UnsignedCodec<Bits>::encode(place);
}

// A token's scale once its codes are fixed: along the token, what is read is as long as what was
// written. squares: of the numbers; products: with what is read under the first scale.
KVX_INLINE uint8_t refitted_scale_bits(float scale, float squares, float products) {
  const float ratio = products > 0 ? squares / products : 1.6f;
  return dual_scale_bits(scale * clamp(ratio, 0.7f, 1.6f));
}

}  // namespace kvx::format
