// fp8 and E2M1 by the device's conversions, and without them where an architecture has none: E4M3
// and E5M2 are converted from compute capability 8.9 on, E2M1 by the families 10 and 12.
#pragma once

#include <cuda_fp16.h>

#include "format/codec.hpp"

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 890
#define KVX_HAS_FP8_CONVERSIONS 0
#else
#define KVX_HAS_FP8_CONVERSIONS 1
#endif

#if defined(__CUDA_ARCH_FAMILY_SPECIFIC__) && __CUDA_ARCH__ >= 1000
#define KVX_HAS_E2M1_CONVERSION 1
#else
#define KVX_HAS_E2M1_CONVERSION 0
#endif

namespace kvx::ops::cuda {

// Two codes, low first. NaNs become NaNs, and what is too large the largest number.
__device__ inline uint32_t pair_of_e4m3(float low, float high) {
#if KVX_HAS_FP8_CONVERSIONS
  uint16_t codes;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(codes) : "f"(high), "f"(low));
  return codes;
#else
  return format::E4M3Codec::encode(low) | uint32_t{format::E4M3Codec::encode(high)} << 8;
#endif
}
__device__ inline uint32_t pair_of_e5m2(float low, float high) {
#if KVX_HAS_FP8_CONVERSIONS
  uint16_t codes;
  asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(codes) : "f"(high), "f"(low));
  return codes;
#else
  return format::E5M2Codec::encode(low) | uint32_t{format::E5M2Codec::encode(high)} << 8;
#endif
}

// E4M3 in the upper byte of each half, as f16. Moved down by a bit, exponent and mantissa say the
// number times 2^-8, subnormal ones too.
__device__ inline uint32_t e4m3_of_upper_bytes(uint32_t codes) {
  const uint32_t bits = (codes & 0x80008000u) | (codes & 0x7F007F00u) >> 1;
  const __half2 number = __hmul2_rn(reinterpret_cast<const __half2&>(bits),
                                    __half2half2(__ushort_as_half(0x5C00)));  // 2^8
  // 0x7F, which would be 480, is a NaN.
  const __half2 beyond = __half2half2(__ushort_as_half(0x5F80));
  const uint32_t nans = __heq2_mask(__habs2(number), beyond) & 0x7FFF7FFFu;
  return reinterpret_cast<const uint32_t&>(number) | nans;
}

// Two codes, low first, as two numbers of f16.
__device__ inline uint32_t e4m3x2_to_f16x2(uint32_t codes) {
#if KVX_HAS_FP8_CONVERSIONS
  uint32_t halves;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(static_cast<uint16_t>(codes)));
  return halves;
#else
  return e4m3_of_upper_bytes(__byte_perm(codes, 0, 0x1404));
#endif
}

#if KVX_HAS_E2M1_CONVERSION
// A byte's two codes, low nibble first; four bytes, the first lowest.
__device__ inline void e2m1x8_to_f16x2(uint32_t codes, uint32_t (&pairs)[4]) {
  asm("{.reg .b8 a, b, c, d;"
      " mov.b32 {a, b, c, d}, %4;"
      " cvt.rn.f16x2.e2m1x2 %0, a;"
      " cvt.rn.f16x2.e2m1x2 %1, b;"
      " cvt.rn.f16x2.e2m1x2 %2, c;"
      " cvt.rn.f16x2.e2m1x2 %3, d;}"
      : "=r"(pairs[0]), "=r"(pairs[1]), "=r"(pairs[2]), "=r"(pairs[3])
      : "r"(codes));
}
#endif

}  // namespace kvx::ops::cuda
