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
namespace level_avx512amx {
const MatrixKernels& matrix_table();
}

// AMX takes prompts; all else is AVX-512's.
static const TileKernels& avx512amx_tile_table() {
  static const TileKernels kTable = [] {
    TileKernels table = level_avx512::tile_table();
    table.matrix = &level_avx512amx::matrix_table();
    return table;
  }();
  return kTable;
}
#elif defined(__aarch64__)
namespace level_neon {
const TileKernels& tile_table();
}
namespace level_dotprod {
const TileKernels& tile_table();
}
#endif

const TileKernels& tile_kernels(device::CpuLevel level) {
  using device::CpuLevel;
  switch (level) {
    case CpuLevel::kScalar:
      break;
#if defined(__x86_64__)
    case CpuLevel::kAvx2:
      return level_avx2::tile_table();
    case CpuLevel::kAvxVnni:
      return level_avxvnni::tile_table();
    case CpuLevel::kAvx512:
      return level_avx512::tile_table();
    case CpuLevel::kAvx512Amx:
      return avx512amx_tile_table();
#else  // No machine of this family supports them.
    case CpuLevel::kAvx2:
    case CpuLevel::kAvxVnni:
    case CpuLevel::kAvx512:
    case CpuLevel::kAvx512Amx:
      break;
#endif
#if defined(__aarch64__)
    case CpuLevel::kNeon:
      return level_neon::tile_table();
    case CpuLevel::kDotProd:
      return level_dotprod::tile_table();
#else
    case CpuLevel::kNeon:
    case CpuLevel::kDotProd:
      break;
#endif
  }
  return level_scalar::tile_table();
}

}  // namespace kvx::ops::cpu
