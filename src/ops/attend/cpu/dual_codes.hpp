// Codes of dual-scale formats as bytes of the tiles of code_keys.hpp and code_values.hpp.
#pragma once

#include "ops/attend/cpu/code_bytes.hpp"

namespace kvx::ops::cpu {
inline namespace KVX_CPU_LEVEL {

// Bytes that are the codes themselves. Keys count from the codes' middle, so that a query's
// rounding meets small numbers.
template <int Bits>
struct DualBytes {
  using Code = uint8_t;
  static constexpr int kBits = 8;
  static constexpr float kQmax = static_cast<float>(1 << (Bits - 1));
  static constexpr float decode(Code code) { return code < 128 ? static_cast<float>(code) : 0.0f; }
};
static_assert(CodeBytes<DualBytes<2>>::kKeyBias == 2 && CodeBytes<DualBytes<3>>::kKeyBias == 4);
static_assert(CodeBytes<DualBytes<2>>::kValueBias == 0 && CodeBytes<DualBytes<2>>::kUnit == 1.0f);

// A key tile has of each four bytes of a row code 0 of every byte, then code 1, ...: a query's
// numbers come into that order, sixteen by sixteen.
KVX_INLINE void order_dual_query(const float* sixteen, float* target) {
  Lanes16 x;
  memcpy(&x, sixteen, sizeof x);
  x = __builtin_shufflevector(x, x, 0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  memcpy(target, &x, sizeof x);
}

}  // namespace KVX_CPU_LEVEL
}  // namespace kvx::ops::cpu
