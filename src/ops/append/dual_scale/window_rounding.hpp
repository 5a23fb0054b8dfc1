// The rounding of a number on its way through a full-precision window.
#pragma once

#include "core/dtype.hpp"
#include "core/float16.hpp"

namespace kvx::ops {

KVX_INLINE float rounded_to(DType window, float number) {
  if (window == DType::kF16) return f16_to_f32(f32_to_f16(number));
  return window == DType::kBF16 ? bf16_to_f32(f32_to_bf16(number)) : number;
}

}  // namespace kvx::ops
