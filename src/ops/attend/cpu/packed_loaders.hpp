// Loaders: numbers of a stored row of floats as binary32 in registers, without their step. A number
// is what is loaded times kUnit and its step.
#pragma once

#include <cstring>

#include "ops/attend/cpu/code_order.hpp"
#include "ops/attend/cpu/packed_kernels.hpp"
#include "ops/cpu/lanes.hpp"

namespace kvx::ops::cpu {
inline namespace KVX_CPU_LEVEL {

// ---- kLanes<Widest> numbers at once.

template <class Target, class Source>
KVX_INLINE Target load_as(const void* source) {
  Source narrow;
  memcpy(&narrow, source, sizeof narrow);
  return __builtin_convertvector(narrow, Target);
}

template <class Codec>
struct FloatLoader;

template <>
struct FloatLoader<format::BF16Codec> {
  static constexpr float kUnit = 1.0f;
  static constexpr bool kHidesNan = false;
  KVX_INLINE static Widest load(const uint8_t* row, int number) {
    using Bits = LanesOf<Widest>::Bits;
    return __builtin_bit_cast(Widest, load_as<Bits, ShortLanes>(row + 2 * number) << 16);
  }
};
template <>
struct FloatLoader<format::F16Codec> {
  static constexpr float kUnit = 1.0f;
  static constexpr bool kHidesNan = false;
  KVX_INLINE static Widest load(const uint8_t* row, int number) {
    ShortLanes halves;
    memcpy(&halves, row + 2 * number, sizeof halves);
    return widen_f16(halves);
  }
};
// E5M2 is the upper byte of an F16.
template <>
struct FloatLoader<format::E5M2Codec> {
  static constexpr float kUnit = 1.0f;
  static constexpr bool kHidesNan = false;
  KVX_INLINE static Widest load(const uint8_t* row, int number) {
    return widen_f16(load_as<ShortLanes, ByteLanes>(row + number) << 8);
  }
};
// E4M3's exponent and mantissa in an F16's, whose bias is larger by 8. NaN becomes 480.
template <>
struct FloatLoader<format::E4M3Codec> {
  static constexpr float kUnit = 256.0f;
  static constexpr bool kHidesNan = true;
  KVX_INLINE static Widest load(const uint8_t* row, int number) {
    const ShortLanes codes = load_as<ShortLanes, ByteLanes>(row + number);
    return widen_f16(((codes & 0x80) << 8) | ((codes & 0x7F) << 7));
  }
};

// Whether a row of the tile has a code that says NaN.
template <class Loader>
KVX_INLINE bool has_hidden_nan(const PackedTile& tile) {
  if constexpr (!Loader::kHidesNan) return false;
  using Found = decltype(std::declval<ByteLanes>() == std::declval<ByteLanes>());
  Found found = {};
  for (int t = 0; t < tile.num_tokens; ++t) {
    for (int d = 0; d < tile.head_dim; d += static_cast<int>(sizeof(ByteLanes))) {
      ByteLanes codes;
      memcpy(&codes, tile.codes[t] + d, sizeof codes);
      found |= (codes & 0x7F) == 0x7F;
    }
  }
  constexpr Found kNone = {};
  return memcmp(&found, &kNone, sizeof found) != 0;
}

template <class Codec>
struct FloatPart : FloatLoader<Codec> {
  static constexpr int kNumbers = kPartNumbers;
  KVX_INLINE static void load_part(const uint8_t* row, int number, Widest* part) {
    for (int v = 0; v < kPartVectors; ++v) {
      part[v] = FloatLoader<Codec>::load(row, number + v * kLanes<Widest>);
    }
  }
};

}  // namespace KVX_CPU_LEVEL
}  // namespace kvx::ops::cpu
