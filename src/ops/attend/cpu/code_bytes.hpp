// Integer codes in integer dot products: queries and probabilities become fixed-point numbers of 16
// bits, codes stay codes, and dot products are integer. E2M1 codes count halves, so they are
// integers too. Where bytes can be multiplied (AVX-512, AVX-VNNI, and nibbles at AVX2) a
// fixed-point number is two 8-bit digits; AVX2 multiplies words with codes of eight bits.
//
// Error: a query and a weight carry 16 bits of the largest, so a result is off by some 1e-5 of its
// size. It is the same for digits and words: their integer sums are equal.
#pragma once

#include "ops/attend/cpu/code_order.hpp"
#include "ops/attend/cpu/row_chunks.hpp"
#include "ops/cpu/lanes.hpp"

namespace kvx::ops::cpu {
inline namespace KVX_CPU_LEVEL {

// The two sides of a product of bytes: scores have keys and queries, outputs weights and values.
enum class Operands { kKeysAndQueries, kWeightsAndValues };

// A key byte is unsigned, a value byte signed: vpdpbusd multiplies one of each. Where products do
// not mix signs (Arm's sdot and udot) a key byte is signed, as a query's digit is, and a value byte
// unsigned, as a weight's digit is: it is larger by kValueShift, for which sums are corrected.
// number = (byte - bias) * kUnit * step (+ zero). Unsigned codes count from their middle, so that a
// query's rounding meets small numbers; their zero moves with it.
template <class Codec>
struct CodeBytes {
  static_assert(Codec::kBits == 4 || Codec::kBits == 8, "codes of this width have no bytes");
  static constexpr bool kIsNibble = Codec::kBits == 4;
  static constexpr bool kIsUnsigned = is_unsigned_code<Codec>();
  static constexpr float kUnit = code_unit<Codec>();
  static constexpr float kLowest = kIsUnsigned ? -static_cast<float>(1 << (Codec::kBits - 1))
                                   : Codec::decode(1 << (Codec::kBits - 1)) < 0.0f
                                       ? Codec::decode(1 << (Codec::kBits - 1))
                                       : -Codec::kQmax;
  static constexpr int kMiddle = static_cast<int>(-kLowest / kUnit);
  static constexpr int kKeyShift = !kProductsMixSigns && kMiddle == 128 ? 128 : 0;
  static constexpr int kKeyBias = kMiddle - kKeyShift;
  static constexpr int kValueBias = kIsUnsigned ? static_cast<int>(kLowest / kUnit) : 0;
  static constexpr int kValueShift = kProductsMixSigns ? 0 : kMiddle;

  // What to exclusive-or a stored byte with.
  static constexpr int kKeyFlip = (kIsUnsigned ? 0 : 0x80) ^ kKeyShift;
  static constexpr int kValueFlip = (kIsUnsigned ? 0x80 : 0) ^ (kProductsMixSigns ? 0 : 0x80);

  // The bytes of the sixteen nibbles plus an offset, in each lane of 16 bytes.
  static constexpr int kKeyOffset = kIsUnsigned ? 0 : kMiddle;
  static constexpr Table<int8_t, 16> nibble_bytes(int offset) {
    Table<int8_t, 16> bytes = {};
    for (int code = 0; code < 16; ++code) {
      bytes.at[code] = static_cast<int8_t>(
          static_cast<int>(Codec::decode(static_cast<uint8_t>(code)) / kUnit) + offset);
    }
    return bytes;
  }

  static constexpr int kNibbleFlip = kIsUnsigned ? 0 : 8;
};

// Whether a key's byte is the nibble but for one bit (integers), so that it needs no look-up.
template <class Codec>
constexpr bool is_flipped_nibble() {
  using Code = CodeBytes<Codec>;
  for (int code = 0; code < 16; ++code) {
    if (Code::nibble_bytes(Code::kKeyOffset).at[code] != (code ^ Code::kNibbleFlip)) return false;
  }
  return Code::kIsNibble;
}

// How products take a fixed-point number of 16 bits: as its two digits, as the high one alone (of
// queries, in `fast`), or as a word.
enum class Fixed { kTwoDigits, kHighDigit, kWord };

// 32-bit lanes of integers: sums, or four bytes each.
using Ints = decltype(Widest{} < Widest{});
inline constexpr int kIntLanes = kLanes<Widest>;

// Of a probability's fixed-point number and a step's; their product has as many bits as the
// first.
inline constexpr float kMostWord = 65535;
inline constexpr float kMostStepWord = 32767;

// The value tile: [head_dim / kIntLanes parts][16 places of four tokens][kIntLanes numbers x 4
// tokens], bytes. Place j holds tokens 4 * four_at(j) on, the order in which packing digits to
// bytes stores them: lane by lane of 16 bytes, of each lane four numbers of each of four vectors.
inline constexpr int kPlaces = kMaxTileTokens / 4;
inline constexpr int kPlaceBytes = 4 * kIntLanes;
inline constexpr int kPartBytes = kPlaces * kPlaceBytes;

constexpr int four_at(int place) {
  const int in_vectors = place % kIntLanes;
  return place - in_vectors + in_vectors % 4 * (kIntLanes / 4) + in_vectors / 4;
}

}  // namespace KVX_CPU_LEVEL
}  // namespace kvx::ops::cpu
