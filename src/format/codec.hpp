// Codecs: what one code of an element type means. A codec encodes one product x * inv and decodes
// one code.
//
//   Code              the unsigned type that holds one code
//   kBits             bits of a code in a packed row
//   kQmax             largest finite magnitude; scale rules divide by it
//   kCountsNonfinite  true when the element has no NaN: with a given scale such inputs are
//                     counted
//   encode(product)   docs/numbers.md, sections 1 and 3; any code for a NaN, which is replaced
//   decode(code)      the number that a code means
//   rounded(product)  decode(encode(product)), without passing through Code: a loop with 8-bit and
//                     32-bit numbers does not vectorise over a short group
//   encode_nonfinite  the code of a NaN or infinite input under a given scale
//
// A format without a scale needs Code, kBits, encode and decode; an affine one kQmax beside them.
#pragma once

#include <cmath>

#include "core/float16.hpp"
#include "format/small_float.hpp"

namespace kvx::format {

// The bits of a float format that needs no scale.
struct F32Codec {
  using Code = uint32_t;
  static constexpr int kBits = 32;
  KVX_INLINE static constexpr Code encode(float value) {
    return value == value ? std::bit_cast<uint32_t>(value) : 0x7FC00000u;
  }
  KVX_INLINE static constexpr float decode(Code code) { return std::bit_cast<float>(code); }
};
struct F16Codec {
  using Code = uint16_t;
  static constexpr int kBits = 16;
  KVX_INLINE static constexpr Code encode(float value) { return f32_to_f16(value); }
  KVX_INLINE static constexpr float decode(Code code) { return f16_to_f32(code); }
};
struct BF16Codec {
  using Code = uint16_t;
  static constexpr int kBits = 16;
  KVX_INLINE static constexpr Code encode(float value) { return f32_to_bf16(value); }
  KVX_INLINE static constexpr float decode(Code code) { return bf16_to_f32(code); }
};

template <class Float>
struct SmallFloatCodec {
  using Code = uint8_t;
  static constexpr int kBits = Float::kBits;
  static constexpr float kQmax = Float::kMax;
  KVX_INLINE static constexpr Code encode(float product) {
    return static_cast<Code>(Float::encode(product));
  }
  KVX_INLINE static constexpr float decode(Code code) { return Float::decode(code); }
  KVX_INLINE static constexpr float rounded(float product) {
    return Float::decode(Float::encode(product));
  }
};

struct E2M1Codec : SmallFloatCodec<E2M1> {
  static constexpr bool kCountsNonfinite = true;
  KVX_INLINE static constexpr Code encode_nonfinite(float) { return 0; }
};
struct E4M3Codec : SmallFloatCodec<E4M3> {
  static constexpr bool kCountsNonfinite = false;
  KVX_INLINE static constexpr Code encode_nonfinite(float) { return E4M3::kNanCode; }
};
struct E5M2Codec : SmallFloatCodec<E5M2> {
  static constexpr bool kCountsNonfinite = false;
  KVX_INLINE static constexpr Code encode_nonfinite(float value) {
    if (value != value) return E5M2::kNanCode;
    return static_cast<Code>(E5M2::kInfinityCode | (value < 0 ? E5M2::kSignBit : 0));
  }
};

// Round to nearest even without libm and without looking at the rounding mode's cost: adding 1.5 *
// 2^23 leaves the rounded integer in the low bits. Requires: |value| <= 2^22.
KVX_INLINE constexpr int32_t round_to_int(float value) {
  constexpr float kMagic = 12582912.0f;
  return static_cast<int32_t>(std::bit_cast<uint32_t>(value + kMagic) -
                              std::bit_cast<uint32_t>(kMagic));
}

KVX_INLINE constexpr float clamp(float value, float low, float high) {
  const float raised = value < low ? low : value;
  return raised > high ? high : raised;
}

// Two's complement in [-Max, Max]. The one code below -Max is never written; it decodes as what
// two's complement means.
template <int Bits>
struct SignedCodec {
  using Code = uint8_t;
  static constexpr int kBits = Bits;
  static constexpr float kQmax = static_cast<float>((1 << (Bits - 1)) - 1);
  static constexpr bool kCountsNonfinite = true;
  static constexpr uint32_t kMask = (1u << Bits) - 1;

  KVX_INLINE static constexpr Code encode(float product) {
    return static_cast<Code>(static_cast<uint32_t>(round_to_int(clamp(product, -kQmax, kQmax))) &
                             kMask);
  }
  KVX_INLINE static constexpr float decode(Code code) {
    constexpr int kShift = 32 - Bits;
    return static_cast<float>(static_cast<int32_t>(static_cast<uint32_t>(code) << kShift) >>
                              kShift);
  }
  KVX_INLINE static constexpr float rounded(float product) {
    return static_cast<float>(round_to_int(clamp(product, -kQmax, kQmax)));
  }
  KVX_INLINE static constexpr Code encode_nonfinite(float) { return 0; }
};
using Int8Codec = SignedCodec<8>;
using Int4Codec = SignedCodec<4>;

// Unsigned codes of the affine and the dual-scale formats. A NaN product (0 * infinity, from a
// scale of zero) is code 0.
template <int Bits>
struct UnsignedCodec {
  using Code = uint8_t;
  static constexpr int kBits = Bits;
  static constexpr float kQmax = static_cast<float>((1 << Bits) - 1);
  KVX_INLINE static constexpr Code encode(float product) {
    const float number = product == product ? product : 0.0f;
    return static_cast<Code>(round_to_int(clamp(number, 0.0f, kQmax)));
  }
  KVX_INLINE static constexpr float decode(Code code) {
    return static_cast<float>(static_cast<int32_t>(code));
  }
};
using UInt8Codec = UnsignedCodec<8>;
using UInt4Codec = UnsignedCodec<4>;
using UInt3Codec = UnsignedCodec<3>;
using UInt2Codec = UnsignedCodec<2>;

static_assert(Int8Codec::encode(0.5f) == 0 && Int8Codec::encode(1.5f) == 2);
static_assert(Int4Codec::encode(-9.0f) == 9 && Int4Codec::decode(8) == -8.0f);
static_assert(UInt4Codec::encode(15.5f) == 15 && UInt8Codec::encode(-1.0f) == 0);

}  // namespace kvx::format
