// packed_byte: one byte of format::pack, for a warp whose lanes write a row's bytes side by side.
#pragma once

#include "format/packing.hpp"

namespace kvx::ops {

// Byte i of a row's packed codes. codes: the row's, one a byte.
template <format::Packing P>
KVX_INLINE uint8_t packed_byte(const uint8_t* codes, int i) {
  using format::Packing;
  static_assert(P == Packing::kNibbles || P == Packing::kQuarters || P == Packing::kThreeBits);
  uint32_t byte = 0;
  if constexpr (P == Packing::kNibbles) {
    byte = codes[2 * i] | static_cast<uint32_t>(codes[2 * i + 1]) << 4;
  } else if constexpr (P == Packing::kQuarters) {
    for (int j = 0; j < 4; ++j) byte |= (codes[4 * i + j] & 3u) << (2 * j);
  } else {
    const uint8_t* of_64 = codes + i / format::kThreeBitsBytes * 64;
    const int at = i % format::kThreeBitsBytes;
    if (at < format::kHighBitsAt) return packed_byte<Packing::kQuarters>(of_64, at);
    for (int j = 0; j < 8; ++j) {
      const int bit = (at - format::kHighBitsAt) * 8 + j;  // format::high_bit_at of its code
      byte |= (of_64[bit / 2 + bit % 2 * 32] >> 2 & 1u) << j;
    }
  }
  return static_cast<uint8_t>(byte);
}

}  // namespace kvx::ops
