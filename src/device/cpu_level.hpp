// CpuLevel: which instruction set the kernels may use, asked of the machine once.
#pragma once

#include <string_view>

#include "core/result.hpp"

namespace kvx::device {

// Each level has a kernel table of its own (ops/cpu/). kAvx512Amx is kAvx512 with AMX's tiles of
// BF16 for prompts; kNeon and kDotProd are Arm's.
enum class CpuLevel { kScalar, kAvx2, kAvxVnni, kAvx512, kAvx512Amx, kNeon, kDotProd };

// From the plainest to the best of each processor family.
inline constexpr CpuLevel kAllCpuLevels[] = {
    CpuLevel::kScalar,    CpuLevel::kAvx2, CpuLevel::kAvxVnni, CpuLevel::kAvx512,
    CpuLevel::kAvx512Amx, CpuLevel::kNeon, CpuLevel::kDotProd};

constexpr std::string_view name_of(CpuLevel level) {
  constexpr std::string_view kNames[] = {"scalar",     "avx2", "avxvnni", "avx512",
                                         "avx512:amx", "neon", "dotprod"};
  return kNames[static_cast<int>(level)];
}

// Whether this build has the level, and this machine and its operating system run its instructions.
// On x86 CPUID and XGETBV answer, on Arm the operating system. Asking for kAvx512Amx asks Linux,
// once, to let this process use AMX's tiles.
bool supports(CpuLevel level);

// The best supported level, or the one that KVX_CPU forces by its name. An unknown or unsupported
// value of KVX_CPU is an error: INVALID_ARGUMENT or UNSUPPORTED.
Result<CpuLevel> choose_cpu_level();

}  // namespace kvx::device
