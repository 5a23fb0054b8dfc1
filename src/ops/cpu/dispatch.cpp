// The one place that names the levels' kernel tables.
#include "ops/cpu/kernel_table.hpp"

namespace kvx::ops::cpu {

// Each is defined by its isa/<name>/level_<name>.cpp.
namespace level_scalar {
const KernelTable& table();
}
#if defined(__x86_64__)
namespace level_avx2 {
const KernelTable& table();
}
namespace level_avx512 {
const KernelTable& table();
}
#endif

#if defined(__aarch64__)
namespace level_neon {
const KernelTable& table();
}
#endif

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
    case CpuLevel::kScalar:
      break;
#if defined(__x86_64__)
    case CpuLevel::kAvx2:
      return level_avx2::table();
    case CpuLevel::kAvxVnni: {
      static const KernelTable kTable = with_products(level_avx2::table(), level);
      return kTable;
    }
    case CpuLevel::kAvx512:
      return level_avx512::table();
    case CpuLevel::kAvx512Amx: {
      static const KernelTable kTable = with_products(level_avx512::table(), level);
      return kTable;
    }
#else  // No machine of this family supports them.
    case CpuLevel::kAvx2:
    case CpuLevel::kAvxVnni:
    case CpuLevel::kAvx512:
    case CpuLevel::kAvx512Amx:
      break;
#endif
#if defined(__aarch64__)
    case CpuLevel::kNeon:
      return level_neon::table();
    case CpuLevel::kDotProd: {
      static const KernelTable kTable = with_products(level_neon::table(), level);
      return kTable;
    }
#else
    case CpuLevel::kNeon:
    case CpuLevel::kDotProd:
      break;
#endif
  }
  return level_scalar::table();
}

}  // namespace kvx::ops::cpu
