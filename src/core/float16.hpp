// Conversions between binary32 and the two 16-bit floats, as bit patterns (docs/numbers.md, section
// 1).
#pragma once

#include <bit>
#include <cstdint>

#include "core/host_device.hpp"

namespace kvx {

KVX_INLINE constexpr float bf16_to_f32(uint16_t bits) {
  return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16);
}

// Round to nearest even, overflow to infinity; every NaN becomes 0x7FC0.
KVX_INLINE constexpr uint16_t f32_to_bf16(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const uint32_t rounded = (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16;
  const bool is_nan = (bits & 0x7FFFFFFFu) > 0x7F800000u;
  return static_cast<uint16_t>(is_nan ? 0x7FC0u : rounded);
}

KVX_INLINE constexpr float f16_to_f32(uint16_t half) {
  const uint32_t sign = (half & 0x8000u) << 16;
  const uint32_t magnitude = half & 0x7FFFu;
  // Both branches are computed so that a loop over rows vectorises. Subnormals (exponent 0) are
  // whole multiples of 2^-24.
  const float subnormal = static_cast<float>(static_cast<int32_t>(magnitude)) * 0x1p-24f;
  const uint32_t exponent_offset = magnitude >= 0x7C00u ? (255u - 31u) << 23 : (127u - 15u) << 23;
  const uint32_t normal = (magnitude << 13) + exponent_offset;
  const uint32_t bits = magnitude < 0x0400u ? std::bit_cast<uint32_t>(subnormal) : normal;
  return std::bit_cast<float>(bits | sign);
}

// Round to nearest even, overflow to infinity; every NaN becomes 0x7E00.
KVX_INLINE constexpr uint16_t f32_to_f16(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const uint32_t sign = (bits >> 16) & 0x8000u;
  const uint32_t magnitude = bits & 0x7FFFFFFFu;
  // Below 2^-14 the result is a whole multiple of 2^-24: adding 0.5 (ulp 2^-24) rounds to one, ties
  // to even.
  const uint32_t clamped = magnitude < 0x38800000u ? magnitude : 0u;
  const uint32_t subnormal =
      std::bit_cast<uint32_t>(std::bit_cast<float>(clamped) + 0.5f) - std::bit_cast<uint32_t>(0.5f);
  const uint32_t normal =
      (magnitude + 0x0FFFu + ((magnitude >> 13) & 1u) - ((127u - 15u) << 23)) >> 13;
  uint32_t half = magnitude < 0x38800000u ? subnormal : normal;
  half = magnitude >= 0x477FF000u ? 0x7C00u : half;  // 65520 and above round to infinity
  return static_cast<uint16_t>(magnitude > 0x7F800000u ? 0x7E00u : half | sign);
}

static_assert(f32_to_f16(1.0f) == 0x3C00 && f16_to_f32(0x3C00) == 1.0f);
static_assert(f32_to_f16(65504.0f) == 0x7BFF && f32_to_f16(65520.0f) == 0x7C00);
static_assert(f32_to_f16(0x1p-24f) == 1 && f32_to_f16(0x1p-25f) == 0 && f16_to_f32(1) == 0x1p-24f);
static_assert(f32_to_bf16(1.0f) == 0x3F80 && bf16_to_f32(0x3F80) == 1.0f);

}  // namespace kvx
