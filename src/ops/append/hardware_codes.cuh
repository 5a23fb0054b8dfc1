// The device's own conversions, where they give what format/ defines. tests/gpu/
// hardware_codes_test.cu compares them over every binary32 product, every scale and every code.
#pragma once

#include <cuda_fp16.h>

#include <bit>
#include <type_traits>

#include "format/interleaved_order.hpp"
#include "format/scale.hpp"
#include "ops/cuda/fp8.cuh"

namespace kvx::ops::cuda {

// HardwareCodes<Codec>::word packs 32 / kBits products, the first in the lowest bits, each times
// kUnit. It is the definition's encode for magnitudes below kMost; beyond that integers and E2M1
// would have to saturate, which is rare under a computed scale.
template <class Codec>
struct HardwareCodes;

// First bytes of a and b, then of c and d.
__device__ inline uint32_t low_bytes(uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  return __byte_perm(__byte_perm(a, b, 0x0040), __byte_perm(c, d, 0x0040), 0x5410);
}

// Adding 1.5 * 2^23 leaves the rounded integer in the low bits (format::round_to_int).
inline constexpr float kIntegerMagic = 12582912.0f;
inline constexpr uint32_t kIntegerMagicBits = 0x4B400000u;
__device__ inline uint32_t integer_bits(float product) {
  return __float_as_uint(__fadd_rn(product, kIntegerMagic));
}

template <>
struct HardwareCodes<format::Int8Codec> {
  static constexpr float kMost = 127.5f;
  static constexpr float kUnit = 1.0f;
  __device__ static uint32_t word(const float* p) {
    return low_bytes(integer_bits(p[0]), integer_bits(p[1]), integer_bits(p[2]),
                     integer_bits(p[3]));
  }
};

// A sum of shifted integers: eight is added to each, so that none borrows from the next, and taken
// off again by the exclusive or.
template <>
struct HardwareCodes<format::Int4Codec> {
  static constexpr float kMost = 7.5f;
  static constexpr float kUnit = 1.0f;
  static constexpr uint32_t kEights = 0x88888888u;
  static constexpr uint32_t kMagics = kIntegerMagicBits * 0x11111111u;
  __device__ static uint32_t word(const float* p) {
    uint32_t sum = kEights - kMagics;
#pragma unroll
    for (int i = 0; i < 8; ++i) sum += integer_bits(p[i]) << (4 * i);
    return sum ^ kEights;
  }
};

// The 16- and 32-bit floats hold every number; a NaN's bits differ.
template <>
struct HardwareCodes<format::F32Codec> {
  static constexpr float kMost = std::numeric_limits<float>::infinity();
  static constexpr float kUnit = 1.0f;
  __device__ static uint32_t word(const float* p) { return __float_as_uint(p[0]); }
};
template <>
struct HardwareCodes<format::F16Codec> {
  static constexpr float kMost = std::numeric_limits<float>::infinity();
  static constexpr float kUnit = 1.0f;
  __device__ static uint32_t word(const float* p) {
    const __half2 pair = __floats2half2_rn(p[0], p[1]);
    return *reinterpret_cast<const uint32_t*>(&pair);
  }
};
template <>
struct HardwareCodes<format::BF16Codec> {
  static constexpr float kMost = std::numeric_limits<float>::infinity();
  static constexpr float kUnit = 1.0f;
  __device__ static uint32_t word(const float* p) {
    uint32_t pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(p[1]), "f"(p[0]));
    return pair;
  }
};

template <>
struct HardwareCodes<format::E4M3Codec> {
  static constexpr float kMost = std::numeric_limits<float>::infinity();
  static constexpr float kUnit = 1.0f;
  __device__ static uint32_t word(const float* p) {
    return pair_of_e4m3(p[0], p[1]) | pair_of_e4m3(p[2], p[3]) << 16;
  }
};
template <>
struct HardwareCodes<format::E5M2Codec> {
  static constexpr float kMost = std::numeric_limits<float>::infinity();
  static constexpr float kUnit = 1.0f;
  __device__ static uint32_t word(const float* p) {
    return pair_of_e5m2(p[0], p[1]) | pair_of_e5m2(p[2], p[3]) << 16;
  }
};

// E2M1 has no conversion here. Its grid has the spacing E / 2 where E is the power of two at or
// below max(|p|, 1), so one addition of E * 2^22 rounds to it. Times 2^-14 the numbers of E2M1 are
// E5M2's smallest, and an E5M2 byte there is the E2M1 code at bits 3 to 1 and the sign at bit 7.
template <>
struct HardwareCodes<format::E2M1Codec> {
  static constexpr float kMost = 7.0f;
  static constexpr float kUnit = 0x1p-14f;

  __device__ static float rounded(float p) {
    const float larger = larger_with_sign(p, 0x1p-14f);
    const float power = __uint_as_float(__float_as_uint(larger) & 0xFF800000u);
    const float sum = __fmaf_rn(power, 0x1p22f, p);
    // A quarter of E stays, so that a zero keeps its sign; it reaches bit 0 of the byte alone.
    return __fmaf_rn(power, -(0x1p22f - 0.25f), sum);
  }

  // The larger magnitude with p's sign. Requires: least > 0.
  __device__ static float larger_with_sign(float p, float least) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 860
    float larger;
    asm("max.xorsign.abs.f32 %0, %1, %2;" : "=f"(larger) : "f"(p), "f"(least));
    return larger;
#else
    return copysignf(fmaxf(fabsf(p), least), p);
#endif
  }

  __device__ static uint32_t word(const float* p, bool is_interleaved = false) {
    const uint32_t even = pair_of_e5m2(rounded(p[0]), rounded(p[2])) |
                          pair_of_e5m2(rounded(p[4]), rounded(p[6])) << 16;
    const uint32_t odd = pair_of_e5m2(rounded(p[1]), rounded(p[3])) |
                         pair_of_e5m2(rounded(p[5]), rounded(p[7])) << 16;
    if (is_interleaved) return format::interleaved_from_e5m2(even, odd);
    return (even >> 4 & 0x08080808u) | (even >> 1 & 0x07070707u) | (odd & 0x80808080u) |
           (odd << 3 & 0x70707070u);
  }
};

// Codec::rounded, and the sign of a zero that the code has.
template <class Codec>
__device__ __forceinline__ float hardware_rounded(float product) {
  const float capped = fminf(fmaxf(product, -Codec::kQmax), Codec::kQmax);
  if constexpr (std::is_same_v<Codec, format::Int8Codec> ||
                std::is_same_v<Codec, format::Int4Codec>) {
    return __fsub_rn(__fadd_rn(capped, kIntegerMagic), kIntegerMagic);
  } else {
    // Adding 1.5 * 2^23 times the spacing of the numbers around it.
    constexpr int kMantissaBits = std::is_same_v<Codec, format::E2M1Codec>   ? 1
                                  : std::is_same_v<Codec, format::E4M3Codec> ? 3
                                                                             : 2;
    constexpr uint32_t kSmallestNormal =
        std::bit_cast<uint32_t>(Codec::decode(1u << kMantissaBits));
    constexpr uint32_t kUp = (static_cast<uint32_t>(23 - kMantissaBits) << 23) | 0x400000u;
    const uint32_t exponent = max(__float_as_uint(capped) & 0x7F800000u, kSmallestNormal);
    const float magic = __uint_as_float(exponent + kUp);
    return copysignf(__fsub_rn(__fadd_rn(capped, magic), magic), product);
  }
}

// format::round_scale.
__device__ inline format::StoredScale hardware_round_scale(format::ScaleType type, float exact) {
  if (type == format::ScaleType::kF16) {
    return {__half_as_ushort(__float2half_rn(format::clamp(exact, 0x1p-24f, 65504.0f)))};
  }
  if (type == format::ScaleType::kE4M3) {
    return {pair_of_e4m3(format::clamp(exact, 0x1p-9f, format::E4M3::kMax), 0.0f)};
  }
  return format::round_scale(type, exact);
}

// format::decode_scale, for scales that are numbers.
__device__ inline float hardware_decode_scale(format::ScaleType type, format::StoredScale scale) {
  if (type == format::ScaleType::kF16) {
    return __half2float(__ushort_as_half(static_cast<uint16_t>(scale.bits)));
  }
  if (type == format::ScaleType::kE4M3) {
    const uint32_t halves = e4m3x2_to_f16x2(scale.bits);
    return __half2float(__ushort_as_half(static_cast<uint16_t>(halves)));
  }
  return format::decode_scale(type, scale);
}

// ScaleMaker's make and step.
__device__ inline format::StoredScale hardware_make(const format::ScaleMaker& maker, float qmax,
                                                    float amax) {
  if (maker.rule != format::ScaleRule::kAmax) return format::e8m0_scale(maker.rule, amax);
  const float divisor = maker.has_tensor_scale ? qmax * maker.tensor_scale : qmax;
  return hardware_round_scale(maker.type, amax / divisor);
}
__device__ inline float hardware_step(const format::ScaleMaker& maker, format::StoredScale scale) {
  const float decoded = hardware_decode_scale(maker.type, scale);
  return maker.has_tensor_scale ? decoded * maker.tensor_scale : decoded;
}

}  // namespace kvx::ops::cuda
