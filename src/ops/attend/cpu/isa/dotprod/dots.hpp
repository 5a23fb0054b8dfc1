// Dot products of bytes with FEAT_DotProd.
#pragma once

#include <arm_neon.h>

#include "ops/attend/cpu/code_bytes.hpp"

namespace kvx::ops::cpu {
inline namespace KVX_CPU_LEVEL {

// sum += the products of four vectors' bytes, of keys or values, with four times four bytes, of
// queries or weights, which every lane takes. vectors: [4]. fours: [16] bytes.
template <Operands O>
KVX_INLINE Ints add_four_dots(Ints sum, const Ints* vectors, const void* fours) {
  if constexpr (O == Operands::kKeysAndQueries) {
    const auto bytes = [vectors](int i) { return __builtin_bit_cast(int8x16_t, vectors[i]); };
    const int8x16_t words = vld1q_s8(static_cast<const int8_t*>(fours));
    auto result = __builtin_bit_cast(int32x4_t, sum);
    result = vdotq_laneq_s32(result, bytes(0), words, 0);
    result = vdotq_laneq_s32(result, bytes(1), words, 1);
    result = vdotq_laneq_s32(result, bytes(2), words, 2);
    result = vdotq_laneq_s32(result, bytes(3), words, 3);
    return __builtin_bit_cast(Ints, result);
  } else {
    const auto bytes = [vectors](int i) { return __builtin_bit_cast(uint8x16_t, vectors[i]); };
    const uint8x16_t words = vld1q_u8(static_cast<const uint8_t*>(fours));
    auto result = __builtin_bit_cast(uint32x4_t, sum);
    result = vdotq_laneq_u32(result, bytes(0), words, 0);
    result = vdotq_laneq_u32(result, bytes(1), words, 1);
    result = vdotq_laneq_u32(result, bytes(2), words, 2);
    result = vdotq_laneq_u32(result, bytes(3), words, 3);
    return __builtin_bit_cast(Ints, result);
  }
}

}  // namespace KVX_CPU_LEVEL
}  // namespace kvx::ops::cpu
