// Sign-magnitude interleaved order: another order for the bits of E2M1 codes, which a tensor core's
// kernel decodes with fewer instructions. A pool of kvx's own on a GPU may have it, and a caller's
// pool that declares it; canonical rows and files have nibbles (docs/numbers.md, section 7).
//
// Four codes c0 to c3, which as nibbles lie in bits 0 to 15 one after the other, share a half word
// of 16 bits: signs first, then magnitudes (exponent and mantissa).
//
//   bit   15  14  13  12  11..9  8..6  5..3  2..0
//   sign  c3  c1  c0  c2     c3    c2    c1    c0  magnitude
//
// All functions take a word, whose two halves are independent.
#pragma once

#include <cstdint>

#include "core/host_device.hpp"

namespace kvx::format {

KVX_INLINE constexpr uint32_t interleaved_from_nibbles(uint32_t w) {
  return (w & 0x80078007u) | ((w >> 3) & 0x0E000E00u) | ((w >> 2) & 0x01C001C0u) |
         ((w >> 1) & 0x00380038u) | ((w << 1) & 0x10001000u) | ((w << 7) & 0x40004000u) |
         ((w << 10) & 0x20002000u);
}

// Its inverse.
KVX_INLINE constexpr uint32_t nibbles_from_interleaved(uint32_t w) {
  return (w & 0x80078007u) | ((w & 0x0E000E00u) << 3) | ((w & 0x01C001C0u) << 2) |
         ((w & 0x00380038u) << 1) | ((w >> 1) & 0x08000800u) | ((w >> 7) & 0x00800080u) |
         ((w >> 10) & 0x00080008u);
}

// From bytes with a sign at bit 7 and a magnitude at bits 3 to 1, which is how E5M2 stores E2M1's
// numbers times 2^-14. One word has c0 and c2 in each half, the other c1 and c3. Other bits may be
// anything.
KVX_INLINE constexpr uint32_t interleaved_from_e5m2(uint32_t c0_c2, uint32_t c1_c3) {
  return (c1_c3 & 0x8E008E00u) | ((c0_c2 >> 3) & 0x11C011C0u) | ((c1_c3 << 2) & 0x00380038u) |
         ((c1_c3 << 7) & 0x40004000u) | ((c0_c2 >> 1) & 0x00070007u) | ((c0_c2 << 6) & 0x20002000u);
}

// Code I of each half word as f16, times 2^-14. A shift, or a multiplication by two powers of two
// (one for the sign, one for the magnitude), brings its bits into place; the mask clears all
// others.
template <int I>
KVX_INLINE constexpr uint32_t f16x2_from_interleaved(uint32_t w) {
  constexpr uint32_t kPlace = 0x8E008E00u;
  if constexpr (I == 3) return w & kPlace;
  if constexpr (I == 2) return (w << 3) & kPlace;
  if constexpr (I == 1) return ((w & 0x40384038u) * ((1u << 6) + (1u << 1))) & kPlace;
  return ((w & 0x20072007u) * ((1u << 9) + (1u << 2))) & kPlace;
}

}  // namespace kvx::format
