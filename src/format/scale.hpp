// Scales: how a step is stored, loaded and made from a group's amax (docs/numbers.md, section 2).
#pragma once

#include <cstring>

#include "format/codec.hpp"
#include "format/facts.hpp"

namespace kvx::format {

// A scale as its type stores it.
struct StoredScale {
  uint32_t bits;
};

KVX_INLINE float decode_scale(ScaleType type, StoredScale scale) {
  switch (type) {
    case ScaleType::kNone:
      return 1.0f;
    case ScaleType::kF32:
      return std::bit_cast<float>(scale.bits);
    case ScaleType::kF16:
      return f16_to_f32(static_cast<uint16_t>(scale.bits));
    case ScaleType::kBF16:
      return bf16_to_f32(static_cast<uint16_t>(scale.bits));
    case ScaleType::kE8M0:
      return E8M0::decode(scale.bits);
    case ScaleType::kE4M3:
      return E4M3::decode(scale.bits);
  }
  return 1.0f;
}

KVX_INLINE StoredScale nan_scale(ScaleType type) {
  switch (type) {
    case ScaleType::kNone:
    case ScaleType::kF32:
      return {0x7FC00000u};
    case ScaleType::kF16:
      return {0x7E00u};
    case ScaleType::kBF16:
      return {0x7FC0u};
    case ScaleType::kE8M0:
      return {E8M0::kNanCode};
    case ScaleType::kE4M3:
      return {E4M3::kNanCode};
  }
  return {0};
}

// Scales lie at any address: single bytes are common and rows of odd sizes follow each other
// without padding.
KVX_INLINE StoredScale load_scale(ScaleType type, const uint8_t* source) {
  if (type == ScaleType::kF32) {
    uint32_t bits;
    memcpy(&bits, source, sizeof bits);
    return {bits};
  }
  if (type == ScaleType::kF16 || type == ScaleType::kBF16) {
    uint16_t bits;
    memcpy(&bits, source, sizeof bits);
    return {bits};
  }
  return {type == ScaleType::kNone ? 0u : *source};
}

KVX_INLINE void store_scale(ScaleType type, StoredScale scale, uint8_t* target) {
  if (type == ScaleType::kF32) {
    memcpy(target, &scale.bits, 4);
  } else if (type == ScaleType::kF16 || type == ScaleType::kBF16) {
    const uint16_t bits = static_cast<uint16_t>(scale.bits);
    memcpy(target, &bits, 2);
  } else if (type != ScaleType::kNone) {
    *target = static_cast<uint8_t>(scale.bits);
  }
}

// Rounds a positive scale to its stored type: at least the type's smallest (a group that is not
// zero never gets a zero scale), at most its largest finite value.
KVX_INLINE StoredScale round_scale(ScaleType type, float exact) {
  constexpr float kSmallestNormal = 0x1p-126f;
  switch (type) {
    case ScaleType::kNone:
      return {0};
    case ScaleType::kF32:
      return {std::bit_cast<uint32_t>(clamp(exact, kSmallestNormal, kFloatMax))};
    case ScaleType::kF16:
      return {f32_to_f16(clamp(exact, 0x1p-24f, 65504.0f))};
    case ScaleType::kBF16:
      return {f32_to_bf16(clamp(exact, kSmallestNormal, 0x1.FEp127f))};
    case ScaleType::kE4M3:
      return {E4M3::encode(clamp(exact, 0x1p-9f, E4M3::kMax))};
    case ScaleType::kE8M0:
      break;  // made by e8m0_scale, never by rounding
  }
  return {0};
}

// Ceil: the smallest e with amax <= 6 * 2^e = 1.5 * 2^(e + 2). Floor: floor(log2(amax)) - 2, as OCP
// MX defines it for E2M1. Both from exponent and mantissa bits, exact for every input. Requires:
// amax is positive and finite.
KVX_INLINE StoredScale e8m0_scale(ScaleRule rule, float amax) {
  const uint32_t bits = std::bit_cast<uint32_t>(amax);
  const bool is_above_three_halves = (bits & 0x7FFFFFu) > 0x400000u;
  const int biased = static_cast<int>(bits >> 23) - 2 +
                     (rule == ScaleRule::kE8M0Ceil && is_above_three_halves ? 1 : 0);
  return {static_cast<uint32_t>(biased < 0 ? 0 : biased > 254 ? 254 : biased)};
}

// What makes a group's scale from its largest magnitude.
struct ScaleMaker {
  ScaleType type;
  ScaleRule rule;
  float tensor_scale;  // 1 where the format has none
  bool has_tensor_scale;

  // Requires: target_amax is positive and finite.
  KVX_INLINE StoredScale make(float qmax, float target_amax) const {
    if (rule != ScaleRule::kAmax) return e8m0_scale(rule, target_amax);
    const float divisor = has_tensor_scale ? qmax * tensor_scale : qmax;
    return round_scale(type, target_amax / divisor);
  }

  // The value of code 1.
  KVX_INLINE float step(StoredScale scale) const {
    const float decoded = decode_scale(type, scale);
    return has_tensor_scale ? decoded * tensor_scale : decoded;
  }
};

// The inverse scale, inv of docs/numbers.md, section 3. A step of 0 (a tiny tensor scale times a
// tiny scale) gives FLT_MAX.
KVX_INLINE float reciprocal(float step) {
  const float inverse = 1.0f / step;
  return inverse > kFloatMax ? kFloatMax : inverse;
}

}  // namespace kvx::format
