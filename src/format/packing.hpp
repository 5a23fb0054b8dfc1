// Packing: how the codes of a row lie in its bytes (docs/numbers.md, section 7). A new packing is a
// case in each of the functions below; without one of them it does not compile.
#pragma once

#include <cstring>

#include "core/host_device.hpp"
#include "format/facts.hpp"

namespace kvx::format {

// False, but only once P is known: what the last branch of a choice among packings asserts.
template <Packing P>
inline constexpr bool kHasNoBranch = false;

// How many codes of a packing are written and read together: the fewest that fill whole bytes and
// keep their order. Groups and heads are whole multiples of it.
constexpr int codes_packed_together(Packing packing) {
  switch (packing) {
    case Packing::kBytes:
      return 1;
    case Packing::kNibbles:
      return 2;
    case Packing::kQuarters:
      return 4;
    case Packing::kThreeBits:
      return 64;
    case Packing::kWords:
    case Packing::kTurboMind:
      return 8;
  }
  return 0;
}

// Whether codes of so many bits can be packed this way.
constexpr bool can_pack(Packing packing, int bits) {
  switch (packing) {
    case Packing::kBytes:
      return bits == 8 || bits == 16 || bits == 32;
    case Packing::kQuarters:
      return bits == 2;
    case Packing::kThreeBits:
      return bits == 3;
    case Packing::kNibbles:
    case Packing::kWords:
    case Packing::kTurboMind:
      return bits == 4;
  }
  return false;
}

// TurboMind keeps eight 4-bit codes e0..e7 as e0|e2<<4, e4|e6<<4, e1|e3<<4, e5|e7<<4: byte b holds
// the codes turbomind_first(b) (0, 4, 1, 5) and, in its high half, turbomind_first(b) + 2.
KVX_INLINE constexpr int turbomind_first(int b) {
  return b % 2 * 4 + b / 2;
}

// Where the high bit of code i of 64 lies among the 64 high bits: the even bits belong to the first
// 32 codes, the odd ones to the others, so that each lies above its code's low bits once both words
// are shifted alike.
KVX_INLINE constexpr int high_bit_at(int i) {
  return i % 32 * 2 + i / 32;
}

// n codes of 2 bits, a multiple of four.
template <class Code>
KVX_INLINE void pack_quarters(const Code* codes, int n, uint8_t* out) {
  for (int i = 0; i < n / 4; ++i) {
    const Code* four = codes + 4 * i;
    out[i] = static_cast<uint8_t>((four[0] & 3) | ((four[1] & 3) << 2) | ((four[2] & 3) << 4) |
                                  ((four[3] & 3) << 6));
  }
}
template <class Code>
KVX_INLINE void unpack_quarters(const uint8_t* in, int n, Code* codes) {
  for (int i = 0; i < n; ++i) codes[i] = static_cast<Code>((in[i / 4] >> (i % 4 * 2)) & 3);
}

// Bytes of 64 codes of 3 bits, and where their high bits begin.
inline constexpr int kThreeBitsBytes = 24;
inline constexpr int kHighBitsAt = 16;

// Writes codes [first, first + n) of a row, one a byte, into the row's packed bytes.
// Requires: first and n are multiples of codes_packed_together(P), but that n may end with the row.
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
  } else if constexpr (P == Packing::kNibbles || P == Packing::kWords) {
    // Words of eight are the same nibbles, read four bytes at a time.
    uint8_t* out = row + first / 2;
    for (int i = 0; i < n / 2; ++i) {
      out[i] = static_cast<uint8_t>(codes[2 * i] | (codes[2 * i + 1] << 4));
    }
  } else if constexpr (P == Packing::kQuarters) {
    pack_quarters(codes, n, row + first / 4);
  } else if constexpr (P == Packing::kThreeBits) {
    uint8_t* out = row + first / 64 * kThreeBitsBytes;
    for (int i = 0; i < n; i += 64, codes += 64, out += kThreeBitsBytes) {
      pack_quarters(codes, 64, out);
      memset(out + kHighBitsAt, 0, kThreeBitsBytes - kHighBitsAt);
      for (int j = 0; j < 64; ++j) {
        const int bit = high_bit_at(j);
        out[kHighBitsAt + bit / 8] |= static_cast<uint8_t>((codes[j] >> 2 & 1) << (bit % 8));
      }
    }
  } else {
    static_assert(kHasNoBranch<P>, "pack has no branch for this packing");
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
  } else if constexpr (P == Packing::kNibbles || P == Packing::kWords) {
    const uint8_t* in = row + first / 2;
    for (int i = 0; i < n / 2; ++i) {
      codes[2 * i] = in[i] & 0xF;
      codes[2 * i + 1] = in[i] >> 4;
    }
  } else if constexpr (P == Packing::kQuarters) {
    unpack_quarters(row + first / 4, n, codes);
  } else if constexpr (P == Packing::kThreeBits) {
    const uint8_t* in = row + first / 64 * kThreeBitsBytes;
    for (int i = 0; i < n; i += 64, codes += 64, in += kThreeBitsBytes) {
      unpack_quarters(in, 64, codes);
      for (int j = 0; j < 64; ++j) {
        const int bit = high_bit_at(j);
        const int high = in[kHighBitsAt + bit / 8] >> (bit % 8) & 1;
        codes[j] = static_cast<Code>(codes[j] | (high << 2));
      }
    }
  } else {
    static_assert(kHasNoBranch<P>, "unpack has no branch for this packing");
  }
}

}  // namespace kvx::format
