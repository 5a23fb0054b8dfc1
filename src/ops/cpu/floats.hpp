// Contiguous floats of any type to f32 and back (docs/numbers.md, section 1).
#pragma once

#include <cstring>

#include "core/dtype.hpp"
#include "core/float16.hpp"
#include "ops/cpu/level.hpp"

namespace kvx::ops::cpu {
inline namespace KVX_CPU_LEVEL {

// 16-bit floats pass through a small array because callers' rows lie at any address.
inline constexpr int kFloatChunk = 256;

inline void load_floats(DType from, const void* source, int n, float* target) {
  const auto* bytes = static_cast<const uint8_t*>(source);
  if (from == DType::kF32) {
    memcpy(target, bytes, n * sizeof(float));
    return;
  }
  uint16_t chunk[kFloatChunk];
  for (int first = 0; first < n; first += kFloatChunk) {
    const int count = n - first < kFloatChunk ? n - first : kFloatChunk;
    memcpy(chunk, bytes + first * sizeof(uint16_t), count * sizeof(uint16_t));
    if (from == DType::kF16) {
      for (int i = 0; i < count; ++i) target[first + i] = f16_to_f32(chunk[i]);
    } else {
      for (int i = 0; i < count; ++i) target[first + i] = bf16_to_f32(chunk[i]);
    }
  }
}

inline void store_floats(DType to, const float* source, int n, void* target) {
  auto* bytes = static_cast<uint8_t*>(target);
  if (to == DType::kF32) {
    memcpy(bytes, source, n * sizeof(float));
    return;
  }
  uint16_t chunk[kFloatChunk];
  for (int first = 0; first < n; first += kFloatChunk) {
    const int count = n - first < kFloatChunk ? n - first : kFloatChunk;
    if (to == DType::kF16) {
      for (int i = 0; i < count; ++i) chunk[i] = f32_to_f16(source[first + i]);
    } else {
      for (int i = 0; i < count; ++i) chunk[i] = f32_to_bf16(source[first + i]);
    }
    memcpy(bytes + first * sizeof(uint16_t), chunk, count * sizeof(uint16_t));
  }
}

}  // namespace KVX_CPU_LEVEL
}  // namespace kvx::ops::cpu
