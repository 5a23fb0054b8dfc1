// The vectors of integer products over codes: what the levels share, and the level's own part.
#pragma once

#include "ops/attend/cpu/code_bytes.hpp"
#if defined(__AVX512VNNI__)
#include "ops/attend/cpu/code_vectors_512.hpp"
#else
#include "ops/attend/cpu/code_vectors_256.hpp"
#endif

namespace kvx::ops::cpu {
inline namespace KVX_CPU_LEVEL {

KVX_INLINE Ints load_bytes(const void* bytes) {
  Ints lanes;
  memcpy(&lanes, bytes, sizeof lanes);
  return lanes;
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

}  // namespace KVX_CPU_LEVEL
}  // namespace kvx::ops::cpu
