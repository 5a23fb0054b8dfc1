// What append needs of vectors: the codecs of format/ for lanes of numbers, and how sixteen codes
// become bytes. Every function gives the numbers of the scalar definition, bit for bit, in fewer
// instructions; tests hold it to that.
#pragma once

#include <immintrin.h>

#include <type_traits>

#include "format/affine.hpp"
#include "format/packing.hpp"
#include "ops/cpu/lanes.hpp"

namespace kvx::ops::cpu {
inline namespace KVX_CPU_LEVEL {

using LaneBits = LanesOf<Widest>::Bits;
using LaneInts = decltype(Widest{} < Widest{});

KVX_INLINE LaneBits bits_of(const Widest& x) {
  return __builtin_bit_cast(LaneBits, x);
}
KVX_INLINE Widest floats_of(const LaneBits& bits) {
  return __builtin_bit_cast(Widest, bits);
}
KVX_INLINE LaneBits magnitude_bits(const Widest& x) {
  return bits_of(x) & 0x7FFFFFFFu;
}

// One instruction, where the compilers make two of a comparison. With a NaN: the bound.
#if defined(__AVX512F__)
KVX_INLINE Widest at_least(const Widest& x, float bound) {
  return static_cast<Widest>(_mm512_max_ps(static_cast<__m512>(x), _mm512_set1_ps(bound)));
}
KVX_INLINE Widest at_most(const Widest& x, float bound) {
  return static_cast<Widest>(_mm512_min_ps(static_cast<__m512>(x), _mm512_set1_ps(bound)));
}
#else
KVX_INLINE Widest at_least(const Widest& x, float bound) {
  return static_cast<Widest>(_mm256_max_ps(static_cast<__m256>(x), _mm256_set1_ps(bound)));
}
KVX_INLINE Widest at_most(const Widest& x, float bound) {
  return static_cast<Widest>(_mm256_min_ps(static_cast<__m256>(x), _mm256_set1_ps(bound)));
}
#endif

// x, its magnitude no larger than the bound, which is positive. Requires: x is no NaN.
KVX_INLINE Widest within(const Widest& x, float bound) {
#if defined(__AVX512F__)
  constexpr int kSmallerMagnitudeSignOfFirst = 0x2;
  return static_cast<Widest>(
      _mm512_range_ps(static_cast<__m512>(x), _mm512_set1_ps(bound), kSmallerMagnitudeSignOfFirst));
#else
  return at_most(at_least(x, -bound), bound);
#endif
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
#if defined(__AVX512F__)
using QuadBytes = __m512i;
#else
using QuadBytes = __m256i;
#endif

// Rounds to integers, ties to even. Requires: a lane can hold them.
KVX_INLINE LaneBits integers_of(const Widest& x) {
#if defined(__AVX512F__)
  return __builtin_bit_cast(LaneBits, _mm512_cvtps_epi32(static_cast<__m512>(x)));
#else
  return __builtin_bit_cast(LaneBits, _mm256_cvtps_epi32(static_cast<__m256>(x)));
#endif
}

// The lanes of kQuadVectors vectors as bytes, in order, cut to what a byte can say.
template <bool IsSigned>
KVX_INLINE QuadBytes bytes_of_lanes(const LaneBits* lanes) {
  const auto vector = [lanes](int i) { return __builtin_bit_cast(QuadBytes, lanes[i]); };
#if defined(__AVX512F__)
  const __m512i low = _mm512_packs_epi32(vector(0), vector(1));
  const __m512i high = _mm512_packs_epi32(vector(2), vector(3));
  const __m512i bytes = IsSigned ? _mm512_packs_epi16(low, high) : _mm512_packus_epi16(low, high);
  const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  return _mm512_permutexvar_epi32(order, bytes);
#else
  const __m256i low = _mm256_packs_epi32(vector(0), vector(1));
  const __m256i high = _mm256_packs_epi32(vector(2), vector(3));
  const __m256i bytes = IsSigned ? _mm256_packs_epi16(low, high) : _mm256_packus_epi16(low, high);
  return _mm256_permutevar8x32_epi32(bytes, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
#endif
}

KVX_INLINE QuadBytes bytes_within(const QuadBytes& bytes, int bound) {
  const auto most = static_cast<char>(bound);
  const auto least = static_cast<char>(-bound);
#if defined(__AVX512F__)
  return _mm512_max_epi8(_mm512_min_epi8(bytes, _mm512_set1_epi8(most)), _mm512_set1_epi8(least));
#else
  return _mm256_max_epi8(_mm256_min_epi8(bytes, _mm256_set1_epi8(most)), _mm256_set1_epi8(least));
#endif
}

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
#if defined(__AVX512F__)
    const __m256i halves = _mm512_cvtps_ph(static_cast<__m512>(x), _MM_FROUND_TO_NEAREST_INT);
    return static_cast<Widest>(_mm512_cvtph_ps(halves));
#else
    const __m128i halves = _mm256_cvtps_ph(static_cast<__m256>(x), _MM_FROUND_TO_NEAREST_INT);
    return static_cast<Widest>(_mm256_cvtph_ps(halves));
#endif
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

// The bits of F16 numbers.
KVX_INLINE LaneBits f16_bits(const Widest& x) {
#if defined(__AVX512F__)
  const __m256i halves = _mm512_cvtps_ph(static_cast<__m512>(x), _MM_FROUND_TO_NEAREST_INT);
  return __builtin_bit_cast(LaneBits, _mm512_cvtepu16_epi32(halves));
#else
  const __m128i halves = _mm256_cvtps_ph(static_cast<__m256>(x), _MM_FROUND_TO_NEAREST_INT);
  return __builtin_bit_cast(LaneBits, _mm256_cvtepu16_epi32(halves));
#endif
}

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

// ---- 16-bit floats: the codecs' encode of a vector's numbers, as bits in the low half of each
// lane.

template <class Codec>
struct LanesOfHalves;
template <>
struct LanesOfHalves<format::F16Codec> {
  static constexpr uint32_t kNan = 0x7E00;
  KVX_INLINE static LaneBits bits(const Widest& x) { return f16_bits(x); }
};
template <>
struct LanesOfHalves<format::BF16Codec> {
  static constexpr uint32_t kNan = 0x7FC0;
  KVX_INLINE static LaneBits bits(const Widest& x) {
    const LaneBits all = bits_of(x);
    return (all + 0x7FFFu + ((all >> 16) & 1u)) >> 16;
  }
};

template <class Codec>
KVX_INLINE void store_halves(const Widest& x, uint8_t* target) {
  using Halves = LanesOfHalves<Codec>;
#if defined(__AVX512F__)
  if constexpr (std::is_same_v<Codec, format::F16Codec>) {  // without widening what is narrow
    const auto numbers = static_cast<__m512>(x);
    const __mmask16 is_nan = _mm512_cmp_ps_mask(numbers, numbers, _CMP_UNORD_Q);
    const __m256i halves = _mm512_cvtps_ph(numbers, _MM_FROUND_TO_NEAREST_INT);
    const __m256i nan = _mm256_set1_epi16(static_cast<short>(Halves::kNan));
    return _mm256_storeu_si256(reinterpret_cast<__m256i*>(target),
                               _mm256_mask_mov_epi16(halves, is_nan, nan));
  }
#endif
  const LaneBits bits = x == x ? Halves::bits(x) : LaneBits{} + Halves::kNan;
#if defined(__AVX512F__)
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(target),
                      _mm512_cvtepi32_epi16(__builtin_bit_cast(__m512i, bits)));
#else
  const auto lanes = __builtin_bit_cast(__m256i, bits);
  _mm_storeu_si128(
      reinterpret_cast<__m128i*>(target),
      _mm_packus_epi32(_mm256_castsi256_si128(lanes), _mm256_extracti128_si256(lanes, 1)));
#endif
}

// ---- Bytes

// The low bytes of sixteen lanes.
KVX_INLINE __m128i low_bytes(const LaneBits* part) {
#if defined(__AVX512F__)
  return _mm512_cvtepi32_epi8(__builtin_bit_cast(__m512i, part[0]));
#else
  const __m256i low = __builtin_bit_cast(__m256i, part[0] & 0xFFu);
  const __m256i high = __builtin_bit_cast(__m256i, part[1] & 0xFFu);
  // [low 0-3][high 0-3][low 4-7][high 4-7], 16 bits each
  const __m256i words = _mm256_permute4x64_epi64(_mm256_packus_epi32(low, high), 0xD8);
  return _mm_packus_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
#endif
}

// TurboMind's pairs of sixteen codes, so that neighbours share a byte.
KVX_INLINE __m128i turbomind_order() {
  alignas(16) int8_t order[16];
  for (int byte = 0; byte < 8; ++byte) {
    const int first = byte / 4 * 8 + format::turbomind_first(byte % 4);
    order[2 * byte] = static_cast<int8_t>(first);
    order[2 * byte + 1] = static_cast<int8_t>(first + 2);
  }
  return _mm_load_si128(reinterpret_cast<const __m128i*>(order));
}

// Sixteen codes, one a byte, to where the row has numbers [number, number + 16).
template <format::Packing P>
KVX_INLINE void store_codes(__m128i codes, int number, uint8_t* row) {
  if constexpr (P == format::Packing::kBytes) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(row + number), codes);
    return;
  }
  if constexpr (P == format::Packing::kTurboMind) {
    codes = _mm_shuffle_epi8(codes, turbomind_order());
  }
  const __m128i pairs = _mm_and_si128(codes, _mm_set1_epi8(15));
  const __m128i nibbles = _mm_maddubs_epi16(pairs, _mm_set1_epi16(0x1001));  // low + 16 * high
  _mm_storel_epi64(reinterpret_cast<__m128i*>(row + number / 2),
                   _mm_packus_epi16(nibbles, nibbles));
}

// The same for kQuadNumbers codes; nibbles may have anything above them.
template <format::Packing P>
KVX_INLINE void store_quad(QuadBytes codes, int number, uint8_t* row) {
  constexpr bool kIsTurboMind = P == format::Packing::kTurboMind;
#if defined(__AVX512F__)
  if constexpr (P == format::Packing::kBytes) return _mm512_storeu_si512(row + number, codes);
  if (kIsTurboMind) {
    codes = _mm512_shuffle_epi8(codes, _mm512_broadcast_i32x4(turbomind_order()));
  }
  const __m512i pairs = _mm512_and_si512(codes, _mm512_set1_epi8(15));
  const __m512i nibbles = _mm512_maddubs_epi16(pairs, _mm512_set1_epi16(0x1001));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(row + number / 2), _mm512_cvtepi16_epi8(nibbles));
#else
  if constexpr (P == format::Packing::kBytes) {
    return _mm256_storeu_si256(reinterpret_cast<__m256i*>(row + number), codes);
  }
  if (kIsTurboMind) {
    codes = _mm256_shuffle_epi8(codes, _mm256_broadcastsi128_si256(turbomind_order()));
  }
  const __m256i pairs = _mm256_and_si256(codes, _mm256_set1_epi8(15));
  const __m256i nibbles = _mm256_maddubs_epi16(pairs, _mm256_set1_epi16(0x1001));
  const __m256i bytes = _mm256_permute4x64_epi64(_mm256_packus_epi16(nibbles, nibbles), 0x08);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(row + number / 2), _mm256_castsi256_si128(bytes));
#endif
}

}  // namespace KVX_CPU_LEVEL
}  // namespace kvx::ops::cpu
