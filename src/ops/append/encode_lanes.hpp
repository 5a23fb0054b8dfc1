// What append needs of vectors: the codecs of format/ for lanes of numbers, and how sixteen codes
// become bytes. Every function gives the numbers of the scalar definition, bit for bit, in fewer
// instructions; tests hold it to that.
#pragma once

#include <type_traits>

#include "format/affine.hpp"
#include "format/packing.hpp"
#include "ops/cpu/lanes.hpp"

namespace kvx::ops::cpu {
inline namespace KVX_CPU_LEVEL {

KVX_INLINE LaneBits bits_of(const Widest& x) {
  return __builtin_bit_cast(LaneBits, x);
}
KVX_INLINE Widest floats_of(const LaneBits& bits) {
  return __builtin_bit_cast(Widest, bits);
}
KVX_INLINE LaneBits magnitude_bits(const Widest& x) {
  return bits_of(x) & 0x7FFFFFFFu;
}

template <class Bits>
KVX_INLINE Bits larger_of(const Bits& a, const Bits& b) {
  return a > b ? a : b;
}
template <class Bits>
KVX_INLINE Bits smaller_of(const Bits& a, const Bits& b) {
  return a < b ? a : b;
}

// Vectors whose bytes fill one: codes of bytes are written so many at a time.
inline constexpr int kQuadVectors = 4;
inline constexpr int kQuadNumbers = kQuadVectors * kLanes<Widest>;

// ---- Codecs: codes(products), in the low kBits of each lane with anything above them, and
// rounded(products), the numbers that the codes say (zeros of either sign are +0). Four vectors at
// once: bytes(whole_codes(products) of each).

template <class Codec>
struct LanesCodec;

// Adding 1.5 * 2^23 rounds to an integer, ties to even, and leaves it in the low bits.
inline constexpr float kIntegerMagic = 12582912.0f;

template <int kBits>
struct LanesCodec<format::SignedCodec<kBits>> {
  static constexpr float kQmax = format::SignedCodec<kBits>::kQmax;
  KVX_INLINE static Widest shifted(const Widest& products) {
    return at_most(at_least(products, -kQmax), kQmax) + kIntegerMagic;
  }
  KVX_INLINE static LaneBits codes(const Widest& products) { return bits_of(shifted(products)); }
  KVX_INLINE static LaneBits whole_codes(const Widest& products) { return integers_of(products); }
  KVX_INLINE static QuadBytes bytes(const LaneBits* codes) {
    return bytes_within(bytes_of_lanes<true>(codes), static_cast<int>(kQmax));
  }
  // Requires: no NaN.
  KVX_INLINE static Widest rounded(const Widest& products) {
    return (within(products, kQmax) + kIntegerMagic) - kIntegerMagic;
  }
};

// A NaN becomes the lower bound, which is its code 0.
template <int kBits>
struct LanesCodec<format::UnsignedCodec<kBits>> {
  KVX_INLINE static Widest clamped(const Widest& products) {
    return at_most(at_least(products, 0.0f), format::UnsignedCodec<kBits>::kQmax);
  }
  KVX_INLINE static LaneBits codes(const Widest& products) {
    return bits_of(clamped(products) + kIntegerMagic);
  }
  KVX_INLINE static LaneBits whole_codes(const Widest& products) {
    return integers_of(clamped(products));
  }
  KVX_INLINE static QuadBytes bytes(const LaneBits* codes) { return bytes_of_lanes<false>(codes); }
};

// A number of exponent e is rounded to whole multiples of its unit, 2^(e - mantissa bits), by
// adding 2^23 units; below the smallest normal number the unit stays that of the subnormal ones.
template <class Float, int kExponentBits>
struct LanesSmallFloat {
  static constexpr int kBits = Float::kBits;
  static constexpr int kMantissaBits = kBits - 1 - kExponentBits;
  static constexpr uint32_t kMaxBits = std::bit_cast<uint32_t>(Float::kMax);
  static constexpr uint32_t kSmallestNormal =
      std::bit_cast<uint32_t>(Float::decode(1u << kMantissaBits));

  struct Parts {
    LaneBits exponent;  // at least the smallest normal number's
    Widest magnitude;   // at most kMax
    Widest magic;       // 2^23 units
  };
  KVX_INLINE static Parts parts(const Widest& products) {
    const LaneBits magnitude = magnitude_bits(products);
    const LaneBits capped = magnitude < kMaxBits ? magnitude : LaneBits{} + kMaxBits;
    const LaneBits exponent = larger_of(capped & 0x7F800000u, LaneBits{} + kSmallestNormal);
    return {exponent, floats_of(capped),
            floats_of(exponent + (static_cast<uint32_t>(23 - kMantissaBits) << 23))};
  }

  KVX_INLINE static LaneBits codes(const Widest& products) {
    const Parts p = parts(products);
    const LaneBits units = bits_of(p.magnitude + p.magic) - bits_of(p.magic);
    const LaneBits code = units + ((p.exponent - kSmallestNormal) >> (23 - kMantissaBits));
    return code | ((bits_of(products) >> (32 - kBits)) & Float::kSignBit);
  }
  KVX_INLINE static LaneBits whole_codes(const Widest& products) { return codes(products); }
  KVX_INLINE static QuadBytes bytes(const LaneBits* codes) { return bytes_of_lanes<false>(codes); }
  // Adding 1.5 * 2^23 units rounds numbers of both signs. Requires: no NaN.
  KVX_INLINE static Widest rounded(const Widest& products) {
    const Widest capped = within(products, Float::kMax);
    const LaneBits exponent =
        larger_of(bits_of(capped) & 0x7F800000u, LaneBits{} + kSmallestNormal);
    constexpr uint32_t kUp = (static_cast<uint32_t>(23 - kMantissaBits) << 23) | 0x400000u;
    const Widest magic = floats_of(exponent + kUp);
    return (capped + magic) - magic;
  }
};
template <>
struct LanesCodec<format::E2M1Codec> : LanesSmallFloat<format::E2M1, 2> {};
template <>
struct LanesCodec<format::E4M3Codec> : LanesSmallFloat<format::E4M3, 4> {};
template <>
struct LanesCodec<format::E5M2Codec> : LanesSmallFloat<format::E5M2, 5> {};

// ParamFloat<T>::round. A NaN stays one.
template <format::ScaleType T>
KVX_INLINE Widest round_to_param(const Widest& x) {
  if constexpr (T == format::ScaleType::kF16) {
    return round_to_f16(x);
  } else {
    const LaneBits bits = bits_of(x);
    const LaneBits rounded = (bits + 0x7FFFu + ((bits >> 16) & 1u)) & 0xFFFF0000u;
    return floats_of((bits & 0x7FFFFFFFu) > 0x7F800000u ? bits : rounded);
  }
}

// ---- Scales: their stored bits and what these say.

struct ScaleLanes {
  LaneBits bits;
  Widest values;
};

// ParamFloat<T>::bits of numbers that are in T.
template <format::ScaleType T>
KVX_INLINE LaneBits param_bits(const Widest& x) {
  if constexpr (T == format::ScaleType::kF16) return f16_bits(x);
  return bits_of(x) >> 16;
}

// format::round_scale. Requires: no NaN.
template <format::ScaleType T>
KVX_INLINE ScaleLanes round_scale_lanes(const Widest& exact) {
  using format::ScaleType;
  const auto clamp = [&](float lowest, float highest) {
    return at_most(at_least(exact, lowest), highest);
  };
  if constexpr (T == ScaleType::kF16) {
    const Widest rounded = round_to_param<T>(clamp(0x1p-24f, 65504.0f));
    return {f16_bits(rounded), rounded};
  } else if constexpr (T == ScaleType::kBF16) {
    const Widest rounded = round_to_param<T>(clamp(0x1p-126f, 0x1.FEp127f));
    return {bits_of(rounded) >> 16, rounded};
  } else if constexpr (T == ScaleType::kE4M3) {
    using E4M3 = LanesCodec<format::E4M3Codec>;
    const Widest clamped = clamp(0x1p-9f, format::E4M3::kMax);
    return {E4M3::codes(clamped) & 0xFFu, E4M3::rounded(clamped)};
  } else {
    static_assert(T == ScaleType::kF32);
    const Widest clamped = clamp(0x1p-126f, format::kFloatMax);
    return {bits_of(clamped), clamped};
  }
}

// format::e8m0_scale; a scale of 0 says 2^-127.
KVX_INLINE ScaleLanes e8m0_lanes(format::ScaleRule rule, const Widest& amax) {
  const LaneBits bits = bits_of(amax);
  const uint32_t up = rule == format::ScaleRule::kE8M0Ceil ? 1 : 0;
  const LaneBits above = (bits & 0x7FFFFFu) > 0x400000u ? LaneBits{} + up : LaneBits{};
  const LaneBits biased = (bits >> 23) + above;  // by two more
  const LaneBits scale = biased > 2u ? biased - 2u : LaneBits{};
  return {scale, floats_of(scale > 0u ? scale << 23 : LaneBits{} + 0x400000u)};
}

// format::ordered_bits.
KVX_INLINE LaneInts ordered_lanes(const Widest& x) {
  const LaneInts bits = __builtin_bit_cast(LaneInts, x);
  return bits ^ ((bits >> 31) & 0x7FFFFFFF);
}

// ---- 16-bit floats: the codecs' encode of a vector's numbers.

template <class Codec>
KVX_INLINE void store_halves(const Widest& x, uint8_t* target) {
  if constexpr (std::is_same_v<Codec, format::F16Codec>) {
    store_f16(x, 0x7E00, target);
  } else {
    static_assert(std::is_same_v<Codec, format::BF16Codec>);
    const LaneBits all = bits_of(x);
    const LaneBits rounded = (all + 0x7FFFu + ((all >> 16) & 1u)) >> 16;
    store_low_halves(x == x ? rounded : LaneBits{} + 0x7FC0u, target);
  }
}

}  // namespace KVX_CPU_LEVEL
}  // namespace kvx::ops::cpu
