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

#if defined(__x86_64__)
// Rows are encoded and decoded without dot products, which are all that AVX-VNNI adds to AVX2.
static const KernelTable& avxvnni_table() {
  static const KernelTable kTable = [] {
    KernelTable table = level_avx2::table();
    table.level = device::CpuLevel::kAvxVnni;
    return table;
  }();
  return kTable;
}
#endif

const KernelTable& kernel_table(device::CpuLevel level) {
  using device::CpuLevel;
  switch (level) {
    case CpuLevel::kScalar:
      break;
#if defined(__x86_64__)
    case CpuLevel::kAvx2:
      return level_avx2::table();
    case CpuLevel::kAvxVnni:
      return avxvnni_table();
    case CpuLevel::kAvx512:
      return level_avx512::table();
#else  // No machine of this family supports them.
    case CpuLevel::kAvx2:
    case CpuLevel::kAvxVnni:
    case CpuLevel::kAvx512:
      break;
#endif
  }
  return level_scalar::table();
}

}  // namespace kvx::ops::cpu
