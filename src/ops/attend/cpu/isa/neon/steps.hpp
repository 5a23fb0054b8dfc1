// The steps of a tile with Advanced SIMD.
#pragma once

#include <arm_neon.h>

#include "ops/attend/cpu/step_loops.hpp"

namespace kvx::ops::cpu {
inline namespace KVX_CPU_LEVEL {

KVX_INLINE void decode_f16_steps(const uint32_t* bits, int n, float factor, float* steps) {
  for (int i = 0; i < n; i += 4) {
    const float16x4_t halves = vreinterpret_f16_u16(vmovn_u32(vld1q_u32(bits + i)));
    vst1q_f32(steps + i, vmulq_n_f32(vcvt_f32_f16(halves), factor));
  }
}

// load_steps for rows that the level has an order of its own for: none.
KVX_INLINE bool load_sorted_steps(const PackedTile&, format::ScaleType, int, float, float*) {
  return false;
}

}  // namespace KVX_CPU_LEVEL
}  // namespace kvx::ops::cpu
