// The CPU levels of this machine, for tests that hold at every one of them.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <string>
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

// The level as a part of a test's name, which has letters, digits and underscores only.
inline std::string level_test_name(const testing::TestParamInfo<device::CpuLevel>& test) {
  std::string name(device::name_of(test.param));
  std::replace(name.begin(), name.end(), ':', '_');
  return name;
}

inline ops::CpuContext serial_context(device::CpuLevel level) {
  return {&ops::cpu::kernel_table(level), &serial_executor()};
}

}  // namespace kvx::tests
