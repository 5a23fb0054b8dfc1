// The one place that names the levels' kernel tables.
#include "ops/cpu/kernel_table.hpp"

namespace kvx::ops::cpu {

// Each is defined by its level_<name>.cpp.
namespace level_scalar {
const KernelTable& table();
}
namespace level_avx2 {
const KernelTable& table();
}
namespace level_avx512 {
const KernelTable& table();
}

const KernelTable& kernel_table(device::CpuLevel level) {
  switch (level) {
    case device::CpuLevel::kAvx512:
      return level_avx512::table();
    case device::CpuLevel::kAvx2:
      return level_avx2::table();
    case device::CpuLevel::kScalar:
      break;
  }
  return level_scalar::table();
}

}  // namespace kvx::ops::cpu
