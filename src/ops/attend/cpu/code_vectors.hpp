// The vectors of integer products over codes: what the levels share. vectors.hpp has each level's
// own part.
#pragma once

#include "ops/attend/cpu/code_bytes.hpp"
#include "ops/attend/cpu/packed_steps.hpp"
#include "ops/attend/cpu/vectors.hpp"

namespace kvx::ops::cpu {
inline namespace KVX_CPU_LEVEL {

KVX_INLINE Ints load_bytes(const void* bytes) {
  Ints lanes;
  memcpy(&lanes, bytes, sizeof lanes);
  return lanes;
}

KVX_INLINE void store_bytes(Ints lanes, void* bytes) {
  memcpy(bytes, &lanes, sizeof lanes);
}

// Four bytes, to every lane.
KVX_INLINE Ints splat_word(const void* four) {
  int32_t word;
  memcpy(&word, four, sizeof word);
  return Ints{} + word;
}

KVX_INLINE Widest to_floats(Ints x) {
  return __builtin_convertvector(x, Widest);
}

// The fixed-point numbers of the digits' integer sums.
KVX_INLINE Ints join_digits(Ints high, Ints low) {
  return (high << 8) + low;
}

// kIntLanes tokens. rows: [kIntLanes].
template <class Codec>
KVX_INLINE void unpack_keys(const uint8_t* const* rows, int row_bytes, uint8_t* tile,
                            Prefetcher& prefetcher) {
  constexpr int kHalf = kKeysAChunk<Codec> / 2;
  constexpr int kBytes = static_cast<int>(sizeof(Ints));
  for (int offset = 0; offset < row_bytes; offset += 16) {
    prefetcher.step();
    Ints keys[2 * kHalf];
    load_keys<Codec>(rows, row_bytes, offset, keys);
    for (int i = 0; i < kHalf; ++i) store_bytes(keys[i], tile + i * kBytes);
    tile += kHalf * kBytes;
    if (offset + 16 > row_bytes) break;
    for (int i = kHalf; i < 2 * kHalf; ++i) store_bytes(keys[i], tile + (i - kHalf) * kBytes);
    tile += kHalf * kBytes;
  }
}

// How often unpack_keys lets the prefetcher step.
constexpr int unpack_key_steps(int row_bytes) {
  return (row_bytes + 15) / 16;
}

}  // namespace KVX_CPU_LEVEL
}  // namespace kvx::ops::cpu
