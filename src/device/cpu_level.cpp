// Asks CPUID what the processor has and XGETBV what the operating system saves.
#include "device/cpu_level.hpp"

#include <cstdint>
#include <cstdlib>

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace kvx::device {
namespace {

#if defined(__x86_64__)

struct Features {
  bool avx2 = false;
  bool avxvnni = false;  // AVX2 and dot products of bytes
  bool avx512 = false;
};

constexpr bool has_all(uint64_t bits, uint64_t wanted) {
  return (bits & wanted) == wanted;
}

// Which register states the operating system saves (XCR0). Requires: CPUID has OSXSAVE.
uint64_t saved_states() {
  uint32_t low;
  uint32_t high;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return (uint64_t{high} << 32) | low;
}

Features ask_machine() {
  constexpr uint64_t kSavesYmm = 0x06;  // XMM and YMM
  constexpr uint64_t kAvxVnniBit = 1 << 4;
  constexpr uint64_t kSavesZmm = 0xE6;  // and the mask registers, both halves of ZMM
  uint32_t a, b, c, d;
  if (__get_cpuid(1, &a, &b, &c, &d) == 0) return {};
  if (!has_all(c, bit_OSXSAVE | bit_AVX | bit_FMA | bit_F16C)) return {};
  const uint64_t saved = saved_states();
  if (__get_cpuid_count(7, 0, &a, &b, &c, &d) == 0) return {};
  Features features;
  features.avx2 = has_all(saved, kSavesYmm) && has_all(b, bit_AVX2);
  features.avx512 = features.avx2 && has_all(saved, kSavesZmm) &&
                    has_all(b, bit_AVX512F | bit_AVX512BW | bit_AVX512VL | bit_AVX512DQ) &&
                    has_all(c, bit_AVX512VNNI | bit_AVX512VBMI);
  if (__get_cpuid_count(7, 1, &a, &b, &c, &d) != 0) {
    features.avxvnni = features.avx2 && has_all(a, kAvxVnniBit);
  }
  return features;
}

#endif

}  // namespace

bool supports(CpuLevel level) {
  if (level == CpuLevel::kScalar) return true;
#if defined(__x86_64__)
  static const Features features = ask_machine();
  if (level == CpuLevel::kAvx2) return features.avx2;
  return level == CpuLevel::kAvxVnni ? features.avxvnni : features.avx512;
#else
  return false;
#endif
}

Result<CpuLevel> choose_cpu_level() {
  const char* forced = std::getenv("KVX_CPU");
  if (forced == nullptr || *forced == '\0') {
    CpuLevel best = CpuLevel::kScalar;
    for (const CpuLevel level : kAllCpuLevels) {
      if (supports(level)) best = level;
    }
    return best;
  }
  for (const CpuLevel level : kAllCpuLevels) {
    if (name_of(level) != forced) continue;
    if (supports(level)) return level;
    return unsupported("KVX_CPU is {}; this machine does not run it", forced);
  }
  return invalid_argument("KVX_CPU is {}; expected scalar, avx2, avxvnni or avx512", forced);
}

}  // namespace kvx::device
