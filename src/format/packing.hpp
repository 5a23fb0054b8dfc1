// Packing: how the codes of a row lie in its bytes (docs/numbers.md, section 7).
#pragma once

#include <cstring>

#include "core/host_device.hpp"
#include "format/facts.hpp"

namespace kvx::format {

// TurboMind keeps eight 4-bit codes e0..e7 as e0|e2<<4, e4|e6<<4, e1|e3<<4, e5|e7<<4: byte b holds
// the codes turbomind_first(b) (0, 4, 1, 5) and, in its high half, turbomind_first(b) + 2.
KVX_INLINE constexpr int turbomind_first(int b) {
  return b % 2 * 4 + b / 2;
}

// Writes codes [first, first + n) of a row, one a byte, into the row's packed bytes.
// Requires: first and n are even for four-bit codes, multiples of eight for kTurboMind.
template <Packing P, class Code>
KVX_INLINE void pack(const Code* codes, int first, int n, uint8_t* row) {
  if constexpr (P == Packing::kBytes) {
    memcpy(row + first * static_cast<int>(sizeof(Code)), codes, n * sizeof(Code));
  } else if constexpr (P == Packing::kTurboMind) {
    uint8_t* out = row + first / 2;
    for (int i = 0; i < n; i += 8) {
      for (int b = 0; b < 4; ++b) {
        const int e = i + turbomind_first(b);
        out[i / 2 + b] = static_cast<uint8_t>(codes[e] | (codes[e + 2] << 4));
      }
    }
  } else {  // words of eight are the same nibbles, read four bytes at a time
    uint8_t* out = row + first / 2;
    for (int i = 0; i < n / 2; ++i) {
      out[i] = static_cast<uint8_t>(codes[2 * i] | (codes[2 * i + 1] << 4));
    }
  }
}

// The inverse of pack.
template <Packing P, class Code>
KVX_INLINE void unpack(const uint8_t* row, int first, int n, Code* codes) {
  if constexpr (P == Packing::kBytes) {
    memcpy(codes, row + first * static_cast<int>(sizeof(Code)), n * sizeof(Code));
  } else if constexpr (P == Packing::kTurboMind) {
    const uint8_t* in = row + first / 2;
    for (int i = 0; i < n; i += 8) {
      for (int b = 0; b < 4; ++b) {
        const int e = i + turbomind_first(b);
        codes[e] = in[i / 2 + b] & 0xF;
        codes[e + 2] = in[i / 2 + b] >> 4;
      }
    }
  } else {
    const uint8_t* in = row + first / 2;
    for (int i = 0; i < n / 2; ++i) {
      codes[2 * i] = in[i] & 0xF;
      codes[2 * i + 1] = in[i] >> 4;
    }
  }
}

}  // namespace kvx::format
