// The tile kernels for the build's own target. No packed kernels: tiles are decoded first.
#define KVX_CPU_LEVEL level_scalar
#define KVX_LEVEL_ROW_BLOCK 4
#define KVX_LEVEL_FIND_PACKED find_no_packed
#include "ops/attend/cpu/tile_kernels.hpp"
#include "ops/cpu/level.hpp"

namespace kvx::ops::cpu {
inline namespace KVX_CPU_LEVEL {

static const PackedKernels* find_no_packed(const format::FormatSpec&, int, Precision) {
  return nullptr;
}

}  // namespace KVX_CPU_LEVEL
}  // namespace kvx::ops::cpu

#include "ops/attend/cpu/level.inc"
