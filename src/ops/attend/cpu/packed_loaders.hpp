// Loaders: parts of a stored row of floats as binary32 in registers, without their step. A number
// is what is loaded times kUnit and its step.
#pragma once

#include <cstring>

#include "ops/attend/cpu/code_order.hpp"
#include "ops/attend/cpu/packed_kernels.hpp"
#include "ops/attend/cpu/vectors.hpp"
#include "ops/cpu/lanes.hpp"

namespace kvx::ops::cpu {
inline namespace KVX_CPU_LEVEL {

// Sixteen numbers. kHidesNan: a NaN comes out as a number.
template <class Codec>
struct FloatPart;

template <>
struct FloatPart<format::BF16Codec> {
  static constexpr int kNumbers = kPartNumbers;
  static constexpr float kUnit = 1.0f;
  static constexpr bool kHidesNan = false;
  KVX_INLINE static void load_part(const uint8_t* row, int number, Widest* part) {
    widen_bf16_part(row + 2 * number, part);
  }
};
template <>
struct FloatPart<format::F16Codec> {
  static constexpr int kNumbers = kPartNumbers;
  static constexpr float kUnit = 1.0f;
  static constexpr bool kHidesNan = false;
  KVX_INLINE static void load_part(const uint8_t* row, int number, Widest* part) {
    widen_f16_part(row + 2 * number, part);
  }
};
// E5M2 is the upper byte of an F16.
template <>
struct FloatPart<format::E5M2Codec> {
  static constexpr int kNumbers = kPartNumbers;
  static constexpr float kUnit = 1.0f;
  static constexpr bool kHidesNan = false;
  KVX_INLINE static void load_part(const uint8_t* row, int number, Widest* part) {
    widen_e5m2_part(row + number, part);
  }
};
// E4M3's exponent and mantissa are put into an F16's, whose bias is larger by 8. NaN becomes 480.
template <>
struct FloatPart<format::E4M3Codec> {
  static constexpr int kNumbers = kPartNumbers;
  static constexpr float kUnit = 256.0f;
  static constexpr bool kHidesNan = true;
  KVX_INLINE static void load_part(const uint8_t* row, int number, Widest* part) {
    widen_e4m3_part(row + number, part);
  }
};

typedef uint8_t SixteenCodes __attribute__((vector_size(16)));
typedef uint8_t ManyCodes __attribute__((vector_size(sizeof(Widest))));

// Whether a row of the tile has an E4M3 code that means NaN.
template <class Codes>
KVX_INLINE bool has_e4m3_nan(const PackedTile& tile) {
  constexpr int kBytes = static_cast<int>(sizeof(Codes));
  Codes largest = {};  // of the codes without their sign, doubled
  for (int t = 0; t < tile.num_tokens; ++t) {
    for (int d = 0; d < tile.head_dim; d += kBytes) {
      Codes codes;
      memcpy(&codes, tile.codes[t] + d, sizeof codes);
      codes += codes;
      largest = codes > largest ? codes : largest;
    }
  }
  constexpr uint8_t kNan = 0xFE;
  for (int i = 0; i < kBytes; ++i) {
    if (largest[i] == kNan) return true;
  }
  return false;
}

// Whether the tile has a NaN that the loader hides. Requires: head_dim is a multiple of 16.
template <class Loader>
KVX_INLINE bool has_hidden_nan(const PackedTile& tile) {
  if constexpr (!Loader::kHidesNan) {
    return false;
  } else {
    constexpr int kMany = static_cast<int>(sizeof(ManyCodes));
    return tile.head_dim % kMany == 0 ? has_e4m3_nan<ManyCodes>(tile)
                                      : has_e4m3_nan<SixteenCodes>(tile);
  }
}

}  // namespace KVX_CPU_LEVEL
}  // namespace kvx::ops::cpu
