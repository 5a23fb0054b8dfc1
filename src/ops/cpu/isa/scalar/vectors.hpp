// The vectors of the scalar level: four floats, which every processor has or the compiler makes of
// single ones. It encodes rows without vectors.
#pragma once

#include "ops/cpu/vector_types.hpp"

namespace kvx::ops::cpu {
inline namespace KVX_CPU_LEVEL {

using Widest = Lanes4;

// x * y + z. Requires: the product is exact.
KVX_INLINE Widest add_exact_product(const Widest& x, const Widest& y, const Widest& z) {
  return x * y + z;
}

}  // namespace KVX_CPU_LEVEL
}  // namespace kvx::ops::cpu
