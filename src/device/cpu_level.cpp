// Asks the machine which levels it runs: on x86 CPUID what the processor has and XGETBV what the
// operating system saves, on Arm the operating system.
#include "device/cpu_level.hpp"

#include <fmt/format.h>

#include <cstdint>
#include <cstdlib>
#include <string_view>

#if defined(__x86_64__)
#include <cpuid.h>
#elif defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#elif defined(__aarch64__) && defined(__APPLE__)
#include <sys/sysctl.h>
#endif
#if defined(__x86_64__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
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
                    has_all(c, bit_AVX512VNNI | bit_AVX512VBMI | bit_GFNI);
  if (__get_cpuid_count(7, 1, &a, &b, &c, &d) != 0) {
    features.avxvnni = features.avx2 && has_all(a, kAvxVnniBit);
  }
  return features;
}

// Linux saves AMX's tiles for processes that have asked. It refuses one whose signal stacks are too
// small for them.
bool may_use_tiles() {
#if defined(__linux__)
  constexpr int kRequestPermission = 0x1023;  // ARCH_REQ_XCOMP_PERM
  constexpr int kTileData = 18;               // the state's number in XCR0
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
  return false;
#endif
}

bool has_amx() {
  constexpr uint64_t kSavesTiles = 0x60000;             // their configuration and their data
  constexpr uint64_t kAmxBits = (1 << 22) | (1 << 24);  // AMX-BF16 and AMX-TILE
  constexpr uint64_t kAvx512Bf16Bit = 1 << 5;
  uint32_t a, b, c, d;
  if (__get_cpuid_count(7, 0, &a, &b, &c, &d) == 0 || !has_all(d, kAmxBits)) return false;
  if (__get_cpuid_count(7, 1, &a, &b, &c, &d) == 0 || !has_all(a, kAvx512Bf16Bit)) return false;
  return has_all(saved_states(), kSavesTiles) && may_use_tiles();
}

bool has_level(CpuLevel level) {
  static const Features features = ask_machine();
  if (level == CpuLevel::kAvx2) return features.avx2;
  if (level == CpuLevel::kAvxVnni) return features.avxvnni;
  if (level == CpuLevel::kAvx512Amx) {
    static const bool amx = features.avx512 && has_amx();
    return amx;
  }
  return level == CpuLevel::kAvx512 && features.avx512;
}

#elif defined(__aarch64__)

bool has_dot_products() {
#if defined(__linux__)
  constexpr unsigned long kDotProductBit = 1 << 20;  // HWCAP_ASIMDDP
  return (getauxval(AT_HWCAP) & kDotProductBit) != 0;
#elif defined(__APPLE__)
  int has = 0;
  size_t size = sizeof has;
  return sysctlbyname("hw.optional.arm.FEAT_DotProd", &has, &size, nullptr, 0) == 0 && has == 1;
#else
  return false;  // An operating system that is not asked yet.
#endif
}

// Every 64-bit Arm processor has Advanced SIMD.
bool has_level(CpuLevel level) {
  static const bool has_dots = has_dot_products();
  return level == CpuLevel::kNeon || (level == CpuLevel::kDotProd && has_dots);
}

#else

bool has_level(CpuLevel) {
  return false;
}

#endif

}  // namespace

bool supports(CpuLevel level) {
  if (level == CpuLevel::kScalar) return true;
  constexpr std::string_view kCompiled = " " KVX_CPU_LEVELS " ";  // as in cmake/cpu_levels.cmake
  return kCompiled.find(fmt::format(" {} ", name_of(level))) != std::string_view::npos &&
         has_level(level);
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
  return invalid_argument(
      "KVX_CPU is {}; expected scalar, avx2, avxvnni, avx512, avx512:amx, neon or dotprod", forced);
}

}  // namespace kvx::device
