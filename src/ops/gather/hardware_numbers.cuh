// Codes to numbers by the device's own conversions, where they give what format/ defines.
// tests/gpu/hardware_codes_test.cu compares them over every code, and over every code and scale or
// sum and zero of the affine formats.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "format/affine.hpp"
#include "format/interleaved_order.hpp"
#include "ops/cuda/fp8.cuh"

namespace kvx::ops::cuda {

// HardwareNumbers<Codec>::decode turns a word of packed codes, the first in the lowest bits, into
// 32 / kBits numbers, each what Codec::decode gives.
template <class Codec>
struct HardwareNumbers;

__device__ inline void split_halves(uint32_t halves, float& low, float& high) {
  const float2 both = __half22float2(reinterpret_cast<const __half2&>(halves));
  low = both.x;
  high = both.y;
}

template <>
struct HardwareNumbers<format::F32Codec> {
  __device__ static void decode(uint32_t word, float* x) { x[0] = __uint_as_float(word); }
};
template <>
struct HardwareNumbers<format::F16Codec> {
  __device__ static void decode(uint32_t word, float* x) { split_halves(word, x[0], x[1]); }
};
template <>
struct HardwareNumbers<format::BF16Codec> {
  __device__ static void decode(uint32_t word, float* x) {
    x[0] = __uint_as_float(word << 16);
    x[1] = __uint_as_float(word & 0xFFFF0000u);
  }
};
template <>
struct HardwareNumbers<format::E4M3Codec> {
  __device__ static void decode(uint32_t word, float* x) {
    split_halves(e4m3x2_to_f16x2(word), x[0], x[1]);
    split_halves(e4m3x2_to_f16x2(word >> 16), x[2], x[3]);
  }
};
// E5M2 is the upper half of F16.
template <>
struct HardwareNumbers<format::E5M2Codec> {
  __device__ static void decode(uint32_t word, float* x) {
    split_halves(__byte_perm(word, 0, 0x1404), x[0], x[1]);
    split_halves(__byte_perm(word, 0, 0x3424), x[2], x[3]);
  }
};
// E2M1 at E4M3's bits is the number times 2^-6.
template <>
struct HardwareNumbers<format::E2M1Codec> {
  __device__ static void decode_interleaved(uint32_t word, float* x) {
    split(format::f16x2_from_interleaved<0>(word), kTwoTo14, x[0], x[4]);
    split(format::f16x2_from_interleaved<1>(word), kTwoTo14, x[1], x[5]);
    split(format::f16x2_from_interleaved<2>(word), kTwoTo14, x[2], x[6]);
    split(format::f16x2_from_interleaved<3>(word), kTwoTo14, x[3], x[7]);
  }
  __device__ static void decode(uint32_t word, float* x) {
    const uint32_t even = (word << 2 & 0x1C1C1C1Cu) | (word << 4 & 0x80808080u);
    const uint32_t odd = (word >> 2 & 0x1C1C1C1Cu) | (word & 0x80808080u);
    split(e4m3x2_to_f16x2(even), kTwoTo6, x[0], x[2]);
    split(e4m3x2_to_f16x2(odd), kTwoTo6, x[1], x[3]);
    split(e4m3x2_to_f16x2(even >> 16), kTwoTo6, x[4], x[6]);
    split(e4m3x2_to_f16x2(odd >> 16), kTwoTo6, x[5], x[7]);
  }

 private:
  static constexpr uint16_t kTwoTo6 = 0x5400;
  static constexpr uint16_t kTwoTo14 = 0x7400;
  __device__ static void split(uint32_t halves, uint16_t by, float& low, float& high) {
    const __half2 both =
        __hmul2_rn(reinterpret_cast<const __half2&>(halves), __half2half2(__ushort_as_half(by)));
    split_halves(reinterpret_cast<const uint32_t&>(both), low, high);
  }
};

// 0x4B000000 | u is 2^23 + u; the sign bit is turned, which adds half the range.
template <>
struct HardwareNumbers<format::Int8Codec> {
  __device__ static void decode(uint32_t word, float* x) {
    const uint32_t raised = word ^ 0x80808080u;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      x[i] = __uint_as_float(__byte_perm(raised, 0x4B000000u, 0x7440 + i)) - (0x1p23f + 128.0f);
    }
  }
};
// A nibble that stays in its place of the low five is 2^23 + 16^i * u, and what is subtracted
// and divided by is exact.
template <>
struct HardwareNumbers<format::Int4Codec> {
  __device__ static void decode(uint32_t word, float* x) {
    const uint32_t raised = word ^ 0x88888888u;
    from_bottom<5>(raised, x);
    from_bottom<3>(raised >> 20, x + 5);
  }

 private:
  template <int Count>
  __device__ static void from_bottom(uint32_t raised, float* x) {
    constexpr float kPlaces[] = {1.0f, 0x1p-4f, 0x1p-8f, 0x1p-12f, 0x1p-16f};
#pragma unroll
    for (int i = 0; i < Count; ++i) {
      const uint32_t number = (raised & 0xFu << (4 * i)) | 0x4B000000u;
      x[i] = __fmaf_rn(__uint_as_float(number), kPlaces[i], -(0x1p23f * kPlaces[i] + 8.0f));
    }
  }
};

// The affine formats' codes as pairs of neighbours in F16: 0x6400 | u is 1024 + u.
template <class Codec>
__device__ inline void affine_codes(uint32_t word, __half2* pairs) {
  const __half2 minus = __half2half2(__ushort_as_half(0xE400));
  if constexpr (Codec::kBits == 8) {
    const uint32_t halves[2] = {__byte_perm(word, 0x64646464u, 0x4140),
                                __byte_perm(word, 0x64646464u, 0x4342)};
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      pairs[i] = __hadd2_rn(reinterpret_cast<const __half2&>(halves[i]), minus);
    }
  } else {
    static_assert(Codec::kBits == 4, "affine chunks have no branch for this width");
    // TurboMind's order: a word's low half holds the even numbers, its high half the odd ones.
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t halves = (word >> (4 * i) & 0x000F000Fu) | 0x64006400u;
      pairs[i] = __hadd2_rn(reinterpret_cast<const __half2&>(halves), minus);
    }
  }
}

// format::dequantize_affine for a pair: both operations rounded to the parameters' type.
__device__ inline float2 affine_pair_f16(__half2 codes, __half2 scale, __half2 zero) {
  return __half22float2(__hadd2_rn(__hmul2_rn(codes, scale), zero));
}
__device__ inline float round_bf16(float x) {
  return __bfloat162float(__float2bfloat16_rn(x));
}
__device__ inline float affine_number_bf16(float code, float scale, float zero) {
  return round_bf16(__fadd_rn(round_bf16(__fmul_rn(code, scale)), zero));
}

// params: [scale: 2 bytes][zero: 2 bytes].
template <class Codec>
__device__ inline void decode_affine_word(format::ScaleType type, uint32_t params, uint32_t word,
                                          float* x) {
  __half2 pairs[16 / Codec::kBits];
  affine_codes<Codec>(word, pairs);
  const __half2 both = reinterpret_cast<const __half2&>(params);
#pragma unroll
  for (int i = 0; i < 16 / Codec::kBits; ++i) {
    if (type == format::ScaleType::kF16) {
      const float2 numbers = affine_pair_f16(pairs[i], __low2half2(both), __high2half2(both));
      x[2 * i] = numbers.x;
      x[2 * i + 1] = numbers.y;
    } else {
      const float scale = __uint_as_float(params << 16);
      const float zero = __uint_as_float(params & 0xFFFF0000u);
      x[2 * i] = affine_number_bf16(__low2float(pairs[i]), scale, zero);
      x[2 * i + 1] = affine_number_bf16(__high2float(pairs[i]), scale, zero);
    }
  }
}

}  // namespace kvx::ops::cuda
