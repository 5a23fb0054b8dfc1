// The one place that names the levels' tile kernels.
#include "ops/attend/cpu/tile_kernels.hpp"

namespace kvx::ops::cpu {

// Each is defined by its isa/<name>/level_<name>.cpp.
namespace level_scalar {
const TileKernels& tile_table();
}
#if defined(__x86_64__)
namespace level_avx2 {
const TileKernels& tile_table();
}
namespace level_avxvnni {
const TileKernels& tile_table();
}
namespace level_avx512 {
const TileKernels& tile_table();
}
#endif

const TileKernels& tile_kernels(device::CpuLevel level) {
#if defined(__x86_64__)
  if (level == device::CpuLevel::kAvx512) return level_avx512::tile_table();
  if (level == device::CpuLevel::kAvxVnni) return level_avxvnni::tile_table();
  if (level == device::CpuLevel::kAvx2) return level_avx2::tile_table();
#endif
  (void)level;
  return level_scalar::tile_table();
}

}  // namespace kvx::ops::cpu
