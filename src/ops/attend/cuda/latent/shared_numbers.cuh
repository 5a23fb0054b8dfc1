// Single numbers in shared memory, one instruction each. volatile: shared memory changes under
// these, and the compiler cannot see by whom.
#pragma once

#include "ops/attend/cuda/common/mma.cuh"

namespace kvx::ops::cuda {

__device__ inline float load_shared_float(uint32_t address) {
  return __uint_as_float(load_shared_4(address));
}
__device__ inline void store_shared_float(uint32_t address, float x) {
  asm volatile("st.shared.f32 [%0], %1;" ::"r"(address), "f"(x) : "memory");
}
__device__ inline void store_shared_floats(uint32_t address, float x, float y) {
  asm volatile("st.shared.v2.f32 [%0], {%1,%2};" ::"r"(address), "f"(x), "f"(y) : "memory");
}
// The lower 16 bits.
__device__ inline void store_shared_2(uint32_t address, uint32_t x) {
  asm volatile("st.shared.u16 [%0], %1;" ::"r"(address), "h"(static_cast<uint16_t>(x)) : "memory");
}
__device__ inline bool load_shared_bool(uint32_t address) {
  uint32_t r;
  asm volatile("ld.shared.u8 %0, [%1];" : "=r"(r) : "r"(address) : "memory");
  return r != 0;
}
__device__ inline void store_shared_bool(uint32_t address, bool x) {
  asm volatile("st.shared.u8 [%0], %1;" ::"r"(address), "r"(x ? 1 : 0) : "memory");
}

}  // namespace kvx::ops::cuda
