// Codes of dual-scale formats as bytes of the tiles of code_keys.hpp and code_values.hpp, and the
// orders in which the channels come to meet them.
#pragma once

#include "ops/attend/cpu/code_bytes.hpp"

namespace kvx::ops::cpu {
inline namespace KVX_CPU_LEVEL {

inline constexpr int kUnitNumbers = 64;  // that are taken apart together

// Bytes that are the codes themselves, of 2 and 3 bits.
template <int Bits>
struct DualBytes {
  using Code = uint8_t;
  static constexpr int kBits = 8;
  static constexpr float kQmax = static_cast<float>(1 << (Bits - 1));
  static constexpr float decode(Code code) { return code < 128 ? static_cast<float>(code) : 0.0f; }
};
static_assert(CodeBytes<DualBytes<2>>::kValueBias == 0 && CodeBytes<DualBytes<2>>::kUnit == 1.0f);

// The channel that four vectors of numbers of a query have at `place`. Packing them to bytes puts
// lanes 4 l to 4 l + 3 of vector k beside each other as word 4 l + k, and that word meets a word of
// a key tile: of four bytes of a row, the same code of each. Such bytes hold 16 channels of 2 and 3
// bits (of 3, with others), 8 of 4.
template <int Bits>
constexpr int key_channel(int place) {
  const int k = place / kIntLanes;
  const int l = place % kIntLanes / 4;
  const int i = place % 4;
  return Bits == 4 ? 16 * l + k / 2 * 8 + 2 * i + k % 2 : 16 * l + 4 * i + k;
}
inline constexpr int kKeyChannels = 4 * kIntLanes;  // whose order this is

// Rows of codes side by side, where a pool's blocks have them: their addresses are one and what the
// instructions have in them.
template <int Bytes>
struct DenseRows {
  const uint8_t* first;
  KVX_INLINE const uint8_t* operator[](int i) const { return first + i * Bytes; }
  KVX_INLINE DenseRows operator+(int i) const { return {first + i * Bytes}; }
};

}  // namespace KVX_CPU_LEVEL
}  // namespace kvx::ops::cpu
