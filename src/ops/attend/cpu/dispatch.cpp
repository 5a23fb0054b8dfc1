// The one place that names the levels' tile kernels.
#include "ops/attend/cpu/tile_kernels.hpp"

namespace kvx::ops::cpu {

// Each is defined by its isa/<name>/level_<name>.cpp. KVX_HAS_LEVEL_<NAME>: the build compiles it
// (cmake/cpu_levels.cmake).
namespace level_scalar {
const TileKernels& tile_table();
}
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
namespace level_neon {
const TileKernels& tile_table();
}
namespace level_dotprod {
const TileKernels& tile_table();
}

const TileKernels& tile_kernels(device::CpuLevel level) {
  using device::CpuLevel;
  switch (level) {
#ifdef KVX_HAS_LEVEL_AVX2
    case CpuLevel::kAvx2:
      return level_avx2::tile_table();
#endif
#ifdef KVX_HAS_LEVEL_AVXVNNI
    case CpuLevel::kAvxVnni:
      return level_avxvnni::tile_table();
#endif
#ifdef KVX_HAS_LEVEL_AVX512
    case CpuLevel::kAvx512:
      return level_avx512::tile_table();
#endif
#ifdef KVX_HAS_LEVEL_AVX512AMX
    case CpuLevel::kAvx512Amx: {  // AMX takes prompts; all else is AVX-512's.
      static const TileKernels kTable = [] {
        TileKernels table = level_avx512::tile_table();
        table.matrix = &level_avx512amx::matrix_table();
        return table;
      }();
      return kTable;
    }
#endif
#ifdef KVX_HAS_LEVEL_NEON
    case CpuLevel::kNeon:
      return level_neon::tile_table();
#endif
#ifdef KVX_HAS_LEVEL_DOTPROD
    case CpuLevel::kDotProd:
      return level_dotprod::tile_table();
#endif
    default:  // device::supports() finds no other level than those that are compiled.
      return level_scalar::tile_table();
  }
}

}  // namespace kvx::ops::cpu
