// The CPU levels of this machine, for tests that hold at every one of them.
#pragma once

#include <vector>

#include "ops/cpu/kernel_table.hpp"

namespace kvx::tests {

inline std::vector<device::CpuLevel> cpu_levels_here() {
  using device::CpuLevel;
  std::vector<CpuLevel> levels;
  for (const CpuLevel level : device::kAllCpuLevels) {
    if (device::supports(level)) levels.push_back(level);
  }
  return levels;
}

inline ops::CpuContext serial_context(device::CpuLevel level) {
  return {&ops::cpu::kernel_table(level), &serial_executor()};
}

}  // namespace kvx::tests
