// ggml's q4_0 blocks, rows of llama.cpp's caches: int4 in groups of 32 under f16 scales, with the
// codes in an order of their own and a rule of its own for the scale (docs/numbers.md, section 10).
// block: [scale: f16][codes: 16 bytes; byte j has code j in its low half, code j + 16 in its high]
#pragma once

#include "format/group.hpp"

namespace kvx::format::q4_0 {

inline constexpr int kGroup = 32;
inline constexpr int kCodeBytes = kGroup / 2;
inline constexpr int kZero = 8;  // the code of 0: a number is (code - kZero) * scale

// The number of the largest magnitude, the first of several. Requires: all of x, [kGroup], are
// finite.
KVX_INLINE float largest_number(const float* x) {
  float largest = 0;
  float magnitude = 0;
  for (int i = 0; i < kGroup; ++i) {
    const float of_x = x[i] < 0 ? -x[i] : x[i];
    if (of_x <= magnitude) continue;
    magnitude = of_x;
    largest = x[i];
  }
  return largest;
}

// The product lies in [-8, 8], but for a rounding, unless the scale is at its limit.
KVX_INLINE uint8_t code_of(float product) {
  return static_cast<uint8_t>(clamp(product + (kZero + 0.5f), 0.0f, 15.0f));
}

// Returns how many of x, [kGroup], lie further beyond the largest code than half a step: none,
// unless the scale is f16's largest. A group with a NaN or an infinity gets the scale NaN.
// codes: [kCodeBytes]; scale: 2 bytes.
KVX_INLINE int encode(const float* x, uint8_t* codes, uint8_t* scale) {
  constexpr float kLargestScale = 65504.0f;
  if (group_magnitude(x, kGroup).has_nonfinite) {
    store_scale(ScaleType::kF16, nan_scale(ScaleType::kF16), scale);
    memset(codes, kZero * 0x11, kCodeBytes);
    return 0;
  }
  // The largest number gets code 0, and the scale its sign turned around.
  const float exact = largest_number(x) / -8;
  const float step = clamp(exact, -kLargestScale, kLargestScale);
  const float inverse = step == 0 ? 0.0f : clamp(1.0f / step, -kFloatMax, kFloatMax);
  store_scale(ScaleType::kF16, {f32_to_f16(step)}, scale);
  for (int j = 0; j < kCodeBytes; ++j) {
    codes[j] =
        static_cast<uint8_t>(code_of(x[j] * inverse) | code_of(x[j + kCodeBytes] * inverse) << 4);
  }
  if (step == exact) return 0;
  int saturated = 0;
  for (int i = 0; i < kGroup; ++i) {
    const float product = x[i] * inverse;
    saturated += product < -8.5f || product > 7.5f;
  }
  return saturated;
}

KVX_INLINE void decode(const uint8_t* codes, const uint8_t* scale, float* x) {
  const float step = decode_scale(ScaleType::kF16, load_scale(ScaleType::kF16, scale));
  for (int j = 0; j < kCodeBytes; ++j) {
    x[j] = static_cast<float>((codes[j] & 15) - kZero) * step;
    x[j + kCodeBytes] = static_cast<float>((codes[j] >> 4) - kZero) * step;
  }
}

}  // namespace kvx::format::q4_0
