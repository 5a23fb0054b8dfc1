// The CPU kernels that the API boundary's calls run with.
#pragma once

#include "ops/cpu/kernel_table.hpp"

namespace kvx::boundary {

// The kernels are chosen once. If KVX_CPU in the environment names an unknown or unsupported level,
// every call returns that error.
inline Result<const ops::cpu::KernelTable*> chosen_kernels() {
  static const Result<device::CpuLevel> level = device::choose_cpu_level();
  if (!level.ok()) return level.error();
  return &ops::cpu::kernel_table(level.value());
}

}  // namespace kvx::boundary
