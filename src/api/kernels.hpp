// The CPU kernels that the API boundary's calls run with.
#pragma once

#include "ops/cpu/kernel_table.hpp"

namespace kvx::boundary {

// Chosen once. An unknown or unsupported KVX_CPU in the environment is every call's error.
inline Result<const ops::cpu::KernelTable*> chosen_kernels() {
  static const Result<device::CpuLevel> level = device::choose_cpu_level();
  if (!level.ok()) return level.error();
  return &ops::cpu::kernel_table(level.value());
}

}  // namespace kvx::boundary
