// The one place that names the levels' kernel tables.
#include "ops/cpu/kernel_table.hpp"

namespace kvx::ops::cpu {

// Each is defined by its level_<name>.cpp.
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
  if (level == device::CpuLevel::kAvx2) return level_avx2::table();
#endif
  (void)level;
  return level_scalar::table();
}

}  // namespace kvx::ops::cpu
