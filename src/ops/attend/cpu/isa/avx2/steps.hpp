// The steps of a tile with AVX2, which has no shorter way than the definition.
#pragma once

#include "ops/attend/cpu/step_loops.hpp"

namespace kvx::ops::cpu {
inline namespace KVX_CPU_LEVEL {

KVX_INLINE void decode_f16_steps(const uint32_t* bits, int n, float factor, float* steps) {
  decode_steps_one_by_one<format::ScaleType::kF16>(bits, n, factor, steps);
}

// load_steps for rows that the level has an order of its own for: none.
KVX_INLINE bool load_sorted_steps(const PackedTile&, format::ScaleType, int, float, float*) {
  return false;
}

}  // namespace KVX_CPU_LEVEL
}  // namespace kvx::ops::cpu
