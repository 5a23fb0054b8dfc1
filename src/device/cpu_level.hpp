// CpuLevel: which instruction set the kernels may use, asked of the machine once.
#pragma once

#include <string_view>

#include "core/result.hpp"

namespace kvx::device {

// Each level has a kernel table of its own (ops/cpu/). NEON and AMX levels take their place here.
enum class CpuLevel { kScalar, kAvx2, kAvxVnni, kAvx512 };

// From the plainest to the best.
inline constexpr CpuLevel kAllCpuLevels[] = {CpuLevel::kScalar, CpuLevel::kAvx2, CpuLevel::kAvxVnni,
                                             CpuLevel::kAvx512};

constexpr std::string_view name_of(CpuLevel level) {
  constexpr std::string_view kNames[] = {"scalar", "avx2", "avxvnni", "avx512"};
  return kNames[static_cast<int>(level)];
}

// Whether this machine and its operating system run the level's instructions (CPUID and XGETBV).
bool supports(CpuLevel level);

// The best supported level, or the one that KVX_CPU=scalar|avx2|avxvnni|avx512 forces. An unknown
// or unsupported value of KVX_CPU is an error: INVALID_ARGUMENT or UNSUPPORTED.
Result<CpuLevel> choose_cpu_level();

}  // namespace kvx::device
