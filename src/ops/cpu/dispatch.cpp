// The one place that names the levels' kernel tables.
#include "ops/cpu/kernel_table.hpp"

namespace kvx::ops::cpu {

// Each is defined by its isa/<name>/level_<name>.cpp. KVX_HAS_LEVEL_<NAME>: the build compiles it
// (cmake/cpu_levels.cmake).
namespace level_scalar {
const KernelTable& table();
}
namespace level_avx2 {
const KernelTable& table();
}
namespace level_avx512 {
const KernelTable& table();
}
namespace level_neon {
const KernelTable& table();
}

// Rows are encoded and decoded without products, which are all that AVX-VNNI adds to AVX2, AMX to
// AVX-512 and FEAT_DotProd to NEON.
[[maybe_unused]] static KernelTable with_products(const KernelTable& plain,
                                                  device::CpuLevel level) {
  KernelTable table = plain;
  table.level = level;
  return table;
}

const KernelTable& kernel_table(device::CpuLevel level) {
  using device::CpuLevel;
  switch (level) {
#ifdef KVX_HAS_LEVEL_AVX2
    case CpuLevel::kAvx2:
      return level_avx2::table();
#endif
#ifdef KVX_HAS_LEVEL_AVXVNNI
    case CpuLevel::kAvxVnni: {
      static const KernelTable kTable = with_products(level_avx2::table(), level);
      return kTable;
    }
#endif
#ifdef KVX_HAS_LEVEL_AVX512
    case CpuLevel::kAvx512:
      return level_avx512::table();
#endif
#ifdef KVX_HAS_LEVEL_AVX512AMX
    case CpuLevel::kAvx512Amx: {
      static const KernelTable kTable = with_products(level_avx512::table(), level);
      return kTable;
    }
#endif
#ifdef KVX_HAS_LEVEL_NEON
    case CpuLevel::kNeon:
      return level_neon::table();
#endif
#ifdef KVX_HAS_LEVEL_DOTPROD
    case CpuLevel::kDotProd: {
      static const KernelTable kTable = with_products(level_neon::table(), level);
      return kTable;
    }
#endif
    default:  // device::supports() finds no other level than those that are compiled.
      return level_scalar::table();
  }
}

}  // namespace kvx::ops::cpu
