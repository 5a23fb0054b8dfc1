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

const KernelTable& kernel_table(device::CpuLevel level) {
#if defined(__x86_64__)
  if (level == device::CpuLevel::kAvx512) return level_avx512::table();
  if (level == device::CpuLevel::kAvxVnni) {
    // Rows are encoded and decoded without dot products, which are all that it adds to AVX2.
    static const KernelTable kTable = [] {
      KernelTable table = level_avx2::table();
      table.level = device::CpuLevel::kAvxVnni;
      return table;
    }();
    return kTable;
  }
  if (level == device::CpuLevel::kAvx2) return level_avx2::table();
#endif
  (void)level;
  return level_scalar::table();
}

}  // namespace kvx::ops::cpu
