// A caller's float on the device, in any of its types (docs/numbers.md, section 1).
#pragma once

#include "core/dtype.hpp"
#include "core/float16.hpp"

namespace kvx::ops::cuda {

__device__ inline float load_float(DType type, const uint8_t* row, int i) {
  if (type == DType::kF32) return reinterpret_cast<const float*>(row)[i];
  const uint16_t bits = reinterpret_cast<const uint16_t*>(row)[i];
  return type == DType::kF16 ? f16_to_f32(bits) : bf16_to_f32(bits);
}

__device__ inline void store_float(DType type, float x, uint8_t* row, int i) {
  if (type == DType::kF32) {
    reinterpret_cast<float*>(row)[i] = x;
  } else {
    reinterpret_cast<uint16_t*>(row)[i] = type == DType::kF16 ? f32_to_f16(x) : f32_to_bf16(x);
  }
}

}  // namespace kvx::ops::cuda
