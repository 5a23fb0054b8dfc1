// Chunks of sixteen bytes of a row, and the order in which a key tile has their numbers.
#pragma once

#include <immintrin.h>

#include "ops/attend/cpu/code_bytes.hpp"

namespace kvx::ops::cpu {
inline namespace KVX_CPU_LEVEL {

// Sixteen bytes of a row, or the eight that are left. Requires: row_bytes is a multiple of 8.
KVX_INLINE __m128i load_chunk(const uint8_t* row, int row_bytes, int offset) {
  const auto* chunk = reinterpret_cast<const __m128i*>(row + offset);
  return offset + 16 <= row_bytes ? _mm_loadu_si128(chunk) : _mm_loadl_epi64(chunk);
}

// Which number of the row stands at a place of the key tile.
template <class Codec, format::Packing P>
constexpr int number_at(int place) {
  if (!CodeBytes<Codec>::kIsNibble) return place;
  const int byte = place / 8 * 4 + place % 4;
  return place % 8 < 4 ? low_nibble_number<P>(byte) : high_nibble_number<P>(byte);
}

template <class Codec, format::Packing P>
constexpr Table<int8_t, 16> order_of_places() {
  Table<int8_t, 16> order = {};
  for (int place = 0; place < 16; ++place) {
    order.at[place] = static_cast<int8_t>(number_at<Codec, P>(place));
  }
  return order;
}

// The vectors of a key tile that one chunk of sixteen tokens makes: four numbers each.
template <class Codec>
inline constexpr int kKeysAChunk = CodeBytes<Codec>::kIsNibble ? 8 : 4;

}  // namespace KVX_CPU_LEVEL
}  // namespace kvx::ops::cpu
