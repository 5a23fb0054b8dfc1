// TurboMind's quant_policy: a bitmask that names the KV cache's mode, and what a mode stores.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "core/dtype.hpp"
#include "core/result.hpp"
#include "format/spec.hpp"

namespace kvx::engines::turbomind {

// Bits of quant_policy. A bit is never a bit width, although 4 and 8 look like one.
enum class QuantPolicy : int {
  kNone = 0x00,
  kReserve1 = 0x01,
  kReserve2 = 0x02,
  kCacheKVInt4 = 0x04,
  kCacheKVInt8 = 0x08,
  kCacheKVFp4 = 0x10,
};

enum class KvCacheMode : uint8_t {
  kNone,   // the compute type itself
  kInt4,   // 4-bit codes with a scale and a zero per token and head
  kInt8,   // 8-bit codes, likewise
  kFp4Mx,  // E2M1 with a power of two per 16 (not OCP's MXFP4, whose groups are 32)
  kFp4Nv,  // E2M1 with an E4M3 scale per 16 under a float per layer and KV head
};
std::string_view name_of(KvCacheMode mode);

constexpr bool is_fp4(KvCacheMode mode) {
  return mode == KvCacheMode::kFp4Mx || mode == KvCacheMode::kFp4Nv;
}

// Which mode the FP4 bit selects.
enum class Fp4Format : uint8_t { kAuto, kMx, kNv };

enum class OnUnsupported : uint8_t {
  kError,
  kFallBack,  // to the int8 bit, then the int4 bit, then no quantisation
};

struct KvCacheModeOptions {
  Fp4Format fp4_format = Fp4Format::kAuto;
  OnUnsupported on_unsupported = OnUnsupported::kError;
};

// The sm_version of a machine without a GPU: the software codec of this library.
inline constexpr int kCpu = 0;

// sm_version is major * 10 + minor, or kCpu. Precedence is FP4, then int8, then int4.
//
//   kMx, kNv  the CPU and every GPU that kvx supports (SM80 and newer): the codec is software where
//             the hardware has none, and the bytes are the same.
//   kAuto     the mode that the hardware supports: NV from SM100 on (100, 103, 110, 120, 121 and
//   later
//             families, which convert E2M1), MX on SM89 and SM90 (Ada and Hopper), MX on the CPU,
//             because its scales need no calibration. Other GPUs: UNSUPPORTED.
//
// INVALID_ARGUMENT: a reserved or unknown bit, or an impossible sm_version. UNSUPPORTED: FP4 on
// an architecture that has no mode for it; nothing falls back unless the options allow it.
// Without the FP4 bit sm_version is ignored.
Result<KvCacheMode> get_kv_cache_mode(int quant_policy, int sm_version,
                                      const KvCacheModeOptions& options = {});

// Bits of one stored number, and of each of the two parameters (scale, zero) that a token of a
// head has for K and for V; 0 where there are none. dtype is the engine's compute type T.
// Requires: format_of(mode, dtype) is no error.
int q_bits(KvCacheMode mode, DType dtype);
int t_bits(KvCacheMode mode, DType dtype);

// The format that a mode stores. INVALID_ARGUMENT when dtype is f32: TurboMind computes in f16 or
// bf16.
Result<format::FormatSpec> format_of(KvCacheMode mode, DType dtype);

// The recipe of a cache that owns TurboMind's blocks of this mode:
// "mxfp4_g16:search,order=turbomind". fp4 modes search their scales, which changes no layout and no
// reader. Errors as format_of().
Result<std::string> recipe_of(KvCacheMode mode, DType dtype);

}  // namespace kvx::engines::turbomind
