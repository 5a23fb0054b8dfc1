// The order in which a key tile has the numbers of a chunk, which is sixteen bytes of a row.
#pragma once

#include "ops/attend/cpu/code_bytes.hpp"

namespace kvx::ops::cpu {
inline namespace KVX_CPU_LEVEL {

// Which number of the row stands at a place of the key tile.
template <class Codec, format::Packing P>
constexpr int number_at(int place) {
  if constexpr (CodeBytes<Codec>::kIsNibble) {
    const int byte = place / 8 * 4 + place % 4;
    return place % 8 < 4 ? low_nibble_number<P>(byte) : high_nibble_number<P>(byte);
  } else {
    return place;
  }
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
