// SmallFloat is every small float (E2M1, E4M3, E5M2) from one definition; E8M0 is the power-of-two
// scale type. The rules are those of docs/numbers.md, section 1.
#pragma once

#include <bit>
#include <cstdint>
#include <limits>

#include "core/host_device.hpp"

namespace kvx::format {

inline constexpr float kFloatMax = std::numeric_limits<float>::max();
inline constexpr float kFloatNan = std::numeric_limits<float>::quiet_NaN();

// What the all-ones exponent means.
enum class TopExponent {
  kNumbers,    // E2M1: every code is a number
  kNanAtOnes,  // E4M3FN: only all-ones mantissa is NaN, the rest are numbers
  kIeee,       // E5M2: infinity and NaNs
};

template <int ExponentBits, int MantissaBits, int Bias, TopExponent Top>
struct SmallFloat {
  static constexpr int kBits = 1 + ExponentBits + MantissaBits;
  static constexpr uint32_t kSignBit = 1u << (kBits - 1);
  static constexpr uint32_t kMagnitudeMask = kSignBit - 1;
  static constexpr uint32_t kInfinityCode = ((1u << ExponentBits) - 1) << MantissaBits;
  static constexpr uint32_t kMaxCode = Top == TopExponent::kNumbers     ? kMagnitudeMask
                                       : Top == TopExponent::kNanAtOnes ? kMagnitudeMask - 1
                                                                        : kInfinityCode - 1;
  static constexpr uint32_t kNanCode = kMagnitudeMask;  // meaningless for kNumbers

  KVX_INLINE static constexpr float power_of_two(int exponent) {
    return std::bit_cast<float>(static_cast<uint32_t>(exponent + 127) << 23);
  }

  // The value of a code. Both cases are computed and one is chosen, so that loops vectorise.
  KVX_INLINE static constexpr float decode(uint32_t code) {
    const uint32_t magnitude = code & kMagnitudeMask;
    const float subnormal =
        static_cast<float>(static_cast<int32_t>(magnitude)) * power_of_two(1 - Bias - MantissaBits);
    const uint32_t normal = (magnitude + (static_cast<uint32_t>(127 - Bias) << MantissaBits))
                            << (23 - MantissaBits);
    uint32_t bits = magnitude < (1u << MantissaBits) ? std::bit_cast<uint32_t>(subnormal) : normal;
    if constexpr (Top == TopExponent::kNanAtOnes) {
      bits = magnitude == kNanCode ? 0x7FC00000u : bits;
    }
    if constexpr (Top == TopExponent::kIeee) {
      bits = magnitude == kInfinityCode ? 0x7F800000u : bits;
      bits = magnitude > kInfinityCode ? 0x7FC00000u : bits;
    }
    return std::bit_cast<float>(bits | ((code & kSignBit) << (32 - kBits)));
  }

  // Round to nearest even, saturate, keep the sign of zero.
  // Requires: value is not NaN (quantisation looks for non-finite inputs before it multiplies).
  KVX_INLINE static constexpr uint32_t encode(float value) {
    const uint32_t bits = std::bit_cast<uint32_t>(value);
    const uint32_t magnitude = bits & 0x7FFFFFFFu;
    constexpr uint32_t kSmallestNormal = static_cast<uint32_t>(1 - Bias + 127) << 23;
    // Subnormals are whole multiples of 2^(1 - Bias - MantissaBits). Adding a power of two whose
    // last bit has just that weight rounds to one, ties to even.
    constexpr float kMagic = power_of_two(1 - Bias - MantissaBits + 23);
    const uint32_t clamped = magnitude < kSmallestNormal ? magnitude : 0u;
    const uint32_t subnormal = std::bit_cast<uint32_t>(std::bit_cast<float>(clamped) + kMagic) -
                               std::bit_cast<uint32_t>(kMagic);
    constexpr int kDropped = 23 - MantissaBits;
    const uint32_t rounded =
        (magnitude + ((1u << (kDropped - 1)) - 1) + ((magnitude >> kDropped) & 1u)) >> kDropped;
    const uint32_t normal = rounded - (static_cast<uint32_t>(127 - Bias) << MantissaBits);
    const uint32_t code = magnitude < kSmallestNormal ? subnormal : normal;
    const uint32_t saturated = code < kMaxCode ? code : kMaxCode;
    return saturated | ((bits >> (32 - kBits)) & kSignBit);
  }

  static constexpr float kMax = decode(kMaxCode);
};

using E2M1 = SmallFloat<2, 1, 1, TopExponent::kNumbers>;
using E4M3 = SmallFloat<4, 3, 7, TopExponent::kNanAtOnes>;
using E5M2 = SmallFloat<5, 2, 15, TopExponent::kIeee>;

// E8M0: a power of two, 2^(byte - 127); 0xFF is NaN. Only ever a scale.
struct E8M0 {
  static constexpr uint32_t kNanCode = 0xFF;

  KVX_INLINE static constexpr float decode(uint32_t code) {
    const uint32_t normal = code == 0 ? 0x00400000u : code << 23;  // 2^-127 is a binary32 subnormal
    return std::bit_cast<float>(code == kNanCode ? 0x7FC00000u : normal);
  }
};

static_assert(E2M1::kMax == 6.0f && E4M3::kMax == 448.0f && E5M2::kMax == 57344.0f);
static_assert(E2M1::encode(0.25f) == 0 && E2M1::encode(0.75f) == 2 && E2M1::encode(5.0f) == 6);
static_assert(E2M1::encode(-1.75f) == 0xC && E2M1::encode(100.0f) == 7);
static_assert(E4M3::encode(464.0f) == 0x7E && E4M3::encode(-0.0f) == 0x80);
static_assert(E4M3::decode(1) == 0x1p-9f && E5M2::decode(1) == 0x1p-16f);
static_assert(E8M0::decode(0) == 0x1p-127f && E8M0::decode(127) == 1.0f);

}  // namespace kvx::format
