// Steps of stored scales one by one, by the definition.
#pragma once

#include "format/scale.hpp"
#include "ops/attend/cpu/packed_kernels.hpp"
#include "ops/cpu/level.hpp"

namespace kvx::ops::cpu {
inline namespace KVX_CPU_LEVEL {

// steps[i] = the step that bits[i] store, times factor. n: a multiple of kTokenStep.
template <format::ScaleType T>
KVX_INLINE void decode_steps_one_by_one(const uint32_t* bits, int n, float factor, float* steps) {
  for (int i = 0; i < n; i += kTokenStep) {
    for (int lane = 0; lane < kTokenStep; ++lane) {
      steps[i + lane] = format::decode_scale(T, {bits[i + lane]}) * factor;
    }
  }
}

}  // namespace KVX_CPU_LEVEL
}  // namespace kvx::ops::cpu
