// What integer and E2M1 codes have in common: the number that a code of 1 counts, and which number
// of a row a nibble is.
#pragma once

#include "format/codec.hpp"
#include "format/packing.hpp"
#include "ops/cpu/level.hpp"

namespace kvx::ops::cpu {
inline namespace KVX_CPU_LEVEL {

// A register's worth of constants. The compilers fill a table at compile time only if it is told
// so: static constexpr, from a constexpr function.
template <class T, int N>
struct Table {
  alignas(64) T at[N];
};

// E2M1 codes are whole multiples of a half.
template <class Codec>
constexpr float code_unit() {
  return Codec::decode(1) < 1.0f ? Codec::decode(1) : 1.0f;
}

template <class Codec>
constexpr bool is_unsigned_code() {
  return Codec::decode((1 << Codec::kBits) - 1) > 0;
}

// Which number of a row a nibble is: eight numbers fill four bytes.
template <format::Packing P>
constexpr int low_nibble_number(int byte) {
  if constexpr (P == format::Packing::kTurboMind) {
    return byte / 4 * 8 + format::turbomind_first(byte % 4);
  } else {
    static_assert(P == format::Packing::kNibbles, "nibbles of this packing have no order");
    return 2 * byte;
  }
}
template <format::Packing P>
constexpr int high_nibble_number(int byte) {
  return low_nibble_number<P>(byte) + (P == format::Packing::kTurboMind ? 2 : 1);
}

}  // namespace KVX_CPU_LEVEL
}  // namespace kvx::ops::cpu
